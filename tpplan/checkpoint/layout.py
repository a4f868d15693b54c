"""How tensors are laid out in safetensors files that are yet to be written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from tpplan.checkpoint.files import DTYPES, LENGTH, Stored

_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_ALIGNED = 8


@dataclass(frozen=True)
class File:
    """A file to be written.

    Attributes:
        header: its first bytes, the length of the header included.
        size: of the whole file.
        tensors: where each of them is to be.
    """

    path: Path
    header: bytes
    size: int
    tensors: Mapping[str, Stored]


def laid_out(tensors: Mapping[str, torch.Tensor], folder: Path, most: int) -> list[File]:
    """``tensors``, in their order, in as few files as hold no more than ``most`` bytes each.

    Raises:
        ValueError: for a dtype that the format does not have.
    """
    groups: list[dict[str, torch.Tensor]] = [{}]
    held = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ValueError(
                f"{name} has the dtype {tensor.dtype}, which safetensors does not have"
            )
        size = tensor.numel() * tensor.dtype.itemsize
        if groups[-1] and held + size > most:
            groups.append({})
            held = 0
        groups[-1][name] = tensor
        held += size
    return [
        _file(group, folder / f"model-{number:05}-of-{len(groups):05}.safetensors")
        for number, group in enumerate(groups, 1)
    ]


def _file(tensors: Mapping[str, torch.Tensor], path: Path) -> File:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    starts, at = {}, 0
    # the widest numbers first: each then begins at a multiple of its width
    for name, tensor in sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize):
        starts[name], stop = at, at + math.prod(tensor.shape) * tensor.dtype.itemsize
        place = {"shape": list(tensor.shape), "data_offsets": [at, stop]}
        entries[name] = {"dtype": _NAMES[tensor.dtype], **place}
        at = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNED)
    header = len(text).to_bytes(LENGTH, "little") + text
    stored = {
        name: Stored(path, t.dtype, tuple(t.shape), len(header) + starts[name])
        for name, t in tensors.items()
    }
    return File(path, header, len(header) + at, stored)
