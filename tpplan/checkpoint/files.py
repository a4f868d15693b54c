"""What safetensors files hold, read from their headers; nothing of theirs is executed.

A file is the length of its header (8 bytes, little-endian), the header in JSON (name -> dtype,
shape, first and last byte) and the numbers (https://github.com/huggingface/safetensors). A folder
may hold several, with an index of which tensor is in which.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES: Mapping[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
LENGTH = 8
_MOST = 100_000_000  # bytes of a header, as in the format's own library


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or does not fit the model.

    Attributes:
        problems: every one that was found.
    """

    def __init__(self, path: Path, problems: list[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join([f"{path}: this checkpoint cannot be used:", *problems]))


@dataclass(frozen=True)
class Stored:
    """A tensor in a file; ``start``: where its first byte is."""

    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int


class _Problem(Exception):
    """What is wrong with one file."""


def stored_in(path: Path) -> dict[str, Stored]:
    """Every tensor of a safetensors file, or of a folder with one or with an index of several.

    Raises:
        CheckpointError: naming all files that cannot be read, and how.
    """
    if not path.exists():
        raise CheckpointError(path, ["there is no such file or folder"])
    if not path.is_dir():
        return _all(path, {path: None})
    if (path / SINGLE).exists():
        return _all(path, {path / SINGLE: None})
    if not (path / INDEX).exists():
        pickled = sorted(p.name for p in path.iterdir() if p.suffix in (".bin", ".pt", ".pth"))
        also = f"; {', '.join(pickled[:3])} would run code when read, convert it" if pickled else ""
        raise CheckpointError(path, [f"it holds neither {SINGLE} nor {INDEX}{also}"])
    try:
        return _all(path, _indexed(path / INDEX))
    except _Problem as problem:
        raise CheckpointError(path, [str(problem)]) from problem


def _all(path: Path, wanted: Mapping[Path, list[str] | None]) -> dict[str, Stored]:
    """What is in files; of each the tensors that are listed, or all."""
    found: dict[str, Stored] = {}
    problems: list[str] = []
    for file, names in wanted.items():
        try:
            held = header_of(file)
        except _Problem as problem:
            problems.append(f"{file.name}: {problem}")
            continue
        for name in held if names is None else names:
            if name in held:
                found[name] = held[name]
            else:
                problems.append(f"{file.name}: the index says that it holds {name}, it does not")
    if problems:
        raise CheckpointError(path, problems)
    return found


def _indexed(index: Path) -> dict[Path, list[str] | None]:
    read = _parsed(index.name, index.read_bytes())
    places = read.get("weight_map") if isinstance(read, dict) else None
    if not isinstance(places, dict) or not places:
        raise _Problem(f"{index.name}: it has no weight_map")
    files: dict[Path, list[str] | None] = {}
    for name, file in places.items():
        plain = isinstance(file, str) and file == os.path.basename(file) and "\0" not in file
        if not plain or file in ("", ".", ".."):
            raise _Problem(f"{index.name}: {name} is said to be in {file!r}, no file of the folder")
        files.setdefault(index.parent / file, []).append(name)  # type: ignore[union-attr]
    return files


def header_of(path: Path) -> dict[str, Stored]:
    """The tensors of one file."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(LENGTH), "little")
            if size < LENGTH or not 0 < length <= min(_MOST, size - LENGTH):
                raise _Problem("no safetensors file: it does not begin with the size of a header")
            header = file.read(length)
    except OSError as error:
        raise _Problem(f"cannot be read: {error.strerror}") from error
    read = _parsed("its header", header)
    if not isinstance(read, dict):
        raise _Problem("its header is no JSON object")
    data, found, ends = LENGTH + length, {}, []
    for name, entry in read.items():
        if name != "__metadata__":
            start, stop, stored = _entry(path, name, entry, data)
            found[name] = stored
            ends.append((start, stop, name))
    reached = 0
    for start, stop, name in sorted(ends):
        if start != reached:
            raise _Problem(f"{name} begins at byte {start}, what is before it ends at {reached}")
        reached = stop
    if reached != size - data:
        raise _Problem(f"it has {size - data} bytes of numbers, and its header tells of {reached}")
    return found


def _parsed(what: str, text: bytes) -> Any:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        read = dict(pairs)
        if len(read) < len(pairs):
            raise _Problem(f"{what} has a name twice")
        return read

    try:
        return json.loads(text.decode(), object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise _Problem(f"{what} is no JSON") from error


def _entry(path: Path, name: str, entry: Any, data: int) -> tuple[int, int, Stored]:
    """One tensor of a header: its first byte and its end among the numbers, and where it is."""
    if not isinstance(entry, dict):
        raise _Problem(f"{name} is no JSON object")
    dtype, shape, ends = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _Problem(f"{name} has the dtype {dtype!r}, which torch does not have")
    if not _is_counts(shape) or not _is_counts(ends) or len(ends) != 2:
        raise _Problem(f"{name} has no shape, or no place")
    start, stop = ends
    if stop - start != math.prod(shape) * DTYPES[dtype].itemsize:
        said = f"is said to have {stop - start} bytes"
        raise _Problem(f"{name} of shape {shape} and dtype {dtype} {said}")
    return start, stop, Stored(path, DTYPES[dtype], tuple(shape), data + start)


def _is_counts(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
