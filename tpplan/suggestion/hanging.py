"""What the results of a region hang on: of each of its parameters, which numbers go into which.

A region's last product is given columns. Each of these is differentiated, and where a gradient is
zero, nothing hangs on that number: so it is seen which rows of a weight belong together, in
whatever order they lie, and which are for all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tpplan.observe.calls import Call
from tpplan.suggestion.bench import Hook, run_until, tensors_of

_FINEST = 64


@dataclass(frozen=True)
class Part:
    """Numbers side by side along a dimension: so many units, each as wide; of one unit all."""

    units: int
    width: int


@dataclass(frozen=True)
class Cut:
    """A tensor that ranks share: the dimension, and what lies along it."""

    dim: int
    parts: tuple[Part, ...]


@dataclass
class Hanging:
    """What was seen of a module around a region.

    Attributes:
        width: of what the last product is given.
        cuts: of parameters and buffers that ranks share; whole: those that each has all of.
        inside: products whose sums the region goes on with, and how the columns of the sum are
            shared; None where all of it is for all ranks.
        unseen: buffers on which nothing hangs at this length.
        columns: what was given to the last product and these; sums: what these gave.
        shared: how many numbers ranks share.
        rounds: into how many equal parts the columns lie of which each rank has some, where
            these belong together, as heads that take turns with keys do.
    """

    width: int
    cuts: dict[str, Cut] = field(default_factory=dict)
    whole: dict[str, int] = field(default_factory=dict)
    inside: dict[str, Cut | None] = field(default_factory=dict)
    unseen: dict[str, torch.Tensor] = field(default_factory=dict)
    columns: dict[str, torch.Tensor] = field(default_factory=dict)
    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    shared: int = 0
    rounds: int = 1

    @property
    def left(self) -> int:
        """How many numbers each rank has all of."""
        return sum(self.whole.values())


def hanging(
    module: nn.Module,
    given: Call,
    end: str,
    norms: Sequence[str],
    products: Sequence[str],
) -> list[Hanging]:
    """What is seen, and what is with a product whose sum the region goes on with, if that is more.

    Args:
        end: the last product, by its path inside of ``module``; products: the others.
        norms: modules that normalise, perhaps over what is to be cut.
    """
    with torch.enable_grad():
        first = _seen(module, given, end, (), norms)
        if first is not None and not _matrices(module, first):
            return [first]
        found = [_seen(module, given, end, (product,), norms) for product in products]
    others = [seen for seen in found if seen is not None]
    best = min(others, key=lambda seen: seen.left, default=None)
    if best is None or (first is not None and best.left >= first.left):
        return [] if first is None else [first]
    # a sum is sent, so that it has to spare much
    return [best] if first is None or first.left > first.shared else [first, best]


def _matrices(module: nn.Module, seen: Hanging) -> int:
    tensors = tensors_of(module)
    return sum(n for name, n in seen.whole.items() if tensors[name].dim() > 1)


def _seen(
    module: nn.Module, given: Call, end: str, inside: Sequence[str], norms: Sequence[str]
) -> Hanging | None:
    """By one way to divide it; None where that shows nothing."""
    columns: dict[str, torch.Tensor] = {}
    leaves: dict[str, torch.Tensor] = {}
    sums: dict[str, torch.Tensor] = {}

    def taken(path: str) -> Hook:
        def hook(_: nn.Module, args: Any, out: Any) -> Any:
            columns[path] = args[0]
            if out is None:
                return None
            sums[path], leaves[path] = out.detach(), out.detach().requires_grad_()
            return leaves[path]

        return hook

    tensors = {name: t for name, t in tensors_of(module).items() if t.is_floating_point()}
    for tensor in tensors.values():
        tensor.requires_grad_(True)
    try:
        run_until(module, given, {p: taken(p) for p in (*inside, end)}, end, norms)
    except Exception:  # code that needs more than it was called with
        return None
    if not {end, *inside} <= columns.keys() or not all(c.requires_grad for c in columns.values()):
        return None
    many = _pieces([int(c.shape[-1]) for c in columns.values()])
    if many == 1:
        return None
    tensors |= {f"{path}.": leaf for path, leaf in leaves.items()}
    hung = _gradients(list(columns.values()), tensors, many)
    found = Hanging(int(columns[end].shape[-1]), inside=dict.fromkeys(inside), sums=sums)
    found.columns = {path: c.detach() for path, c in columns.items()}
    _sort(found, hung, tensors)
    if not inside and _matrices(module, found):
        found = _in_rounds(module, found, hung, tensors, many)
    buffers = {name for name, _ in module.named_buffers()} - found.whole.keys() - found.cuts.keys()
    found.unseen = {name: tensors[name] for name in sorted(buffers & tensors.keys())}
    return found if found.cuts else None


def _in_rounds(
    module: nn.Module,
    first: Hanging,
    hung: Mapping[str, Sequence[torch.Tensor]],
    tensors: Mapping[str, torch.Tensor],
    many: int,
) -> Hanging:
    """The same with columns in the fewest parts by which no matrix is whole, if there are such."""
    for rounds in (n for n in range(2, many // 2 + 1) if many % n == 0):
        turned = {
            name: [mask.unflatten(0, (rounds, -1)).transpose(0, 1).flatten(0, 1) for mask in masks]
            for name, masks in hung.items()
        }
        found = Hanging(first.width, columns=first.columns, rounds=rounds)
        _sort(found, turned, tensors)
        if found.cuts and not _matrices(module, found):
            return found
    return first


def _sort(
    found: Hanging,
    hung: Mapping[str, Sequence[torch.Tensor]],
    tensors: Mapping[str, torch.Tensor],
) -> None:
    """Write down of each tensor whether it is cut or whole; a sum's name ends with a dot."""
    for name, masks in hung.items():
        cut, path = _cut(masks), name.rpartition(".")[0]
        if name.endswith("."):
            found.inside[path] = cut
        elif path in found.inside:
            continue
        elif cut is not None:
            found.cuts[name] = cut
            found.shared += tensors[name].numel()
        elif bool(masks[0].any()):
            found.whole[name] = tensors[name].numel()


def _pieces(widths: Sequence[int]) -> int:
    """Into how many equal pieces all widths can be cut, and no more than are differentiated."""
    return max(n for n in range(1, _FINEST + 1) if all(w % n == 0 for w in widths))


def _gradients(
    columns: Sequence[torch.Tensor], tensors: Mapping[str, torch.Tensor], many: int
) -> dict[str, list[torch.Tensor]]:
    """For each tensor and each of its dimensions: [piece of the columns, index] that hang."""
    hung: dict[str, list[torch.Tensor]] = {}
    generator = torch.Generator().manual_seed(0)
    wanted = list(tensors.values())
    for piece in range(many):
        own = [c.unflatten(-1, (many, -1))[..., piece, :] for c in columns]
        cotangents = [torch.randn(c.shape, generator=generator, dtype=c.dtype) for c in own]
        found = torch.autograd.grad(own, wanted, cotangents, retain_graph=True, allow_unused=True)
        for (name, tensor), gradient in zip(tensors.items(), found, strict=True):
            if gradient is None:
                continue
            sizes = tensor.shape or (1,)
            masks = hung.setdefault(name, [torch.zeros(many, n, dtype=torch.bool) for n in sizes])
            for dim, mask in enumerate(masks):
                others = [d for d in range(tensor.dim()) if d != dim]
                mask[piece] = (gradient != 0).sum(others).bool() if others else gradient != 0
    return hung


def _cut(masks: Sequence[torch.Tensor]) -> Cut | None:
    """Along the dimension that lies in parts, if one does; of the finest pieces that do."""
    many = masks[0].shape[0]
    for step in (n for n in range(1, many // 2 + 1) if many % n == 0):
        for dim, mask in enumerate(masks):
            coarse = mask.unflatten(0, (-1, step)).any(1)
            parts = None if bool(coarse.all()) else _parts(coarse)
            if parts is not None:
                return Cut(dim, parts)
    return None


def _parts(mask: torch.Tensor) -> tuple[Part, ...] | None:
    """Parts side by side, of each of which every piece has an equal share; None of anything else.

    Args:
        mask: [piece, index], which pieces hang on the number there.
    """
    many = mask.shape[0]
    runs: list[list[int]] = []  # first piece, the one after the last, how many numbers
    for index in range(mask.shape[1]):
        at = mask[:, index].nonzero().flatten()
        if not len(at) or int(at[-1] - at[0]) + 1 != len(at):
            return None
        first, last = int(at[0]), int(at[-1]) + 1
        if runs and runs[-1][:2] == [first, last]:
            runs[-1][2] += 1
        else:
            runs.append([first, last, 1])
    parts, left = [], list(runs)
    while left:
        step, width = left[0][1] - left[0][0], left[0][2]
        if many % step:
            return None
        units = many // step
        if left[:units] != [[i * step, (i + 1) * step, width] for i in range(units)]:
            return None
        parts.append(Part(units, width))
        del left[:units]
    return tuple(parts) if any(part.units > 1 for part in parts) else None
