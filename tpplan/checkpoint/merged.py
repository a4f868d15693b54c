"""Checkpoints that hold in several tensors what a transformers model has in one.

The files of most mixtures have a tensor for each matrix of each expert, and names of their own;
transformers stacks them when it loads. Which goes where is asked of transformers, if it is loaded;
of a stacked tensor each rank reads no more than what lies in its part.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpplan.checkpoint.files import Stored
from tpplan.checkpoint.read import part_of, read_into

_MAPPING, _LOADING = "transformers.conversion_mapping", "transformers.core_model_loading"


@dataclass(frozen=True)
class Piece:
    """A stored tensor in a larger one.

    Attributes:
        offsets: where it begins.
        stacked: whether it is one of those along the first dimension, which it has not itself.
    """

    offsets: tuple[int, ...]
    stored: Stored
    stacked: bool

    @property
    def sizes(self) -> tuple[int, ...]:
        """How much of the larger one it is."""
        return (1, *self.stored.shape) if self.stacked else self.stored.shape


@dataclass(frozen=True)
class Merged:
    """A tensor of which a checkpoint holds the pieces, often a single one."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def read_into(self, part: torch.Tensor, offsets: Sequence[int]) -> None:
        """The block that begins at ``offsets``, into ``part``; nothing else is read.

        Raises:
            OSError: where a file ends before it.
        """
        for piece in self.pieces:
            ends = zip(piece.offsets, piece.sizes, offsets, part.shape, strict=True)
            cut = [(max(at, o), min(at + n, o + s)) for at, n, o, s in ends]
            if any(start >= stop for start, stop in cut):
                continue
            due = part[tuple(slice(a - o, b - o) for (a, b), o in zip(cut, offsets, strict=True))]
            inner = [start - at for (start, _), at in zip(cut, piece.offsets, strict=True)]
            if piece.stacked:
                due, inner = due[0], inner[1:]
            if due.dtype == self.dtype and due.is_contiguous() and due.device.type == "cpu":
                read_into(due, piece.stored, inner)
            else:
                due.copy_(part_of(piece.stored, inner, due.shape))


def whole(stored: Stored) -> Merged:
    """A tensor that a checkpoint holds in one piece."""
    return Merged(stored.dtype, stored.shape, (Piece((0,) * len(stored.shape), stored, False),))


def as_the_model_has_them(
    model: nn.Module, names: Iterable[str], stored: Mapping[str, Stored]
) -> Mapping[str, Merged]:
    """Stored tensors under the names of the model, those that it has in one put together.

    What transformers does otherwise, with other operations, is left as it is stored.
    """
    mapping: Any = sys.modules.get(_MAPPING)
    loading: Any = sys.modules.get(_LOADING)
    held = dict.fromkeys(names, True)
    alone = {name: whole(tensor) for name, tensor in stored.items()}
    if mapping is None or loading is None or not hasattr(model, "base_model_prefix"):
        return alone
    if all(name in stored for name in held):
        return alone
    transforms = mapping.get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    found: dict[str, Merged] = {}
    pieces: dict[str, dict[str, list[str]]] = {}
    for name in sorted(stored, key=loading.dot_natural_key):
        new, pattern = (
            (name, None)
            if name in held
            else loading.rename_source_key(
                name, renamings, converters, model.base_model_prefix, held
            )
        )
        if new not in held:
            found[name] = alone[name]
        elif pattern is None:
            found[new] = alone[name]
        else:
            pieces.setdefault(new, {}).setdefault(pattern, []).append(name)
    for new, sources in pieces.items():
        converter = by_pattern[next(iter(sources))]
        merged = _merged(converter, loading, {p: [stored[n] for n in sources[p]] for p in sources})
        if merged is None:
            found.update({name: alone[name] for names in sources.values() for name in names})
        else:
            found[new] = merged
    return found


def _merged(converter: Any, loading: Any, sources: Mapping[str, Sequence[Stored]]) -> Merged | None:
    """Sources stacked, concatenated, or both, as a converter has them; None of anything else."""
    kinds = [type(operation) for operation in converter.operations]
    stack, concatenate = loading.MergeModulelist, loading.Concatenate
    if kinds not in ([stack], [stack, concatenate], [concatenate]):
        return None
    stacked = kinds[0] is stack
    along = converter.operations[-1].dim if kinds[-1] is concatenate else None
    if stacked and converter.operations[0].dim != 0:
        return None
    every = [s for p in converter.source_patterns for s in sources.get(p, ())]
    if len({s.dtype for s in every}) > 1 or len({len(s.shape) for s in every}) > 1:
        return None
    pieces: list[Piece] = []
    start = 0
    for pattern in converter.source_patterns:
        for index, source in enumerate(sources.get(pattern, ())):
            offsets = [index] * stacked + [0] * len(source.shape)
            if along is not None:
                offsets[along] += start
            pieces.append(Piece(tuple(offsets), source, stacked))
        if along is not None and sources.get(pattern):
            start += pieces[-1].sizes[along]
    ends = [[o + n for o, n in zip(p.offsets, p.sizes, strict=True)] for p in pieces]
    shape = tuple(max(end) for end in zip(*ends, strict=True))
    # pieces that overlap, or leave something out, are not what was stored
    complete = math.prod(shape) == sum(math.prod(p.sizes) for p in pieces)
    return Merged(every[0].dtype, shape, tuple(pieces)) if complete else None
