"""Checkpoints of ``torch.distributed.checkpoint``: what is in them, and into tensors.

Their table of contents is a pickle. It is read here with the few classes that it is made of and no
others, so that no code of the file's runs.
"""

from __future__ import annotations

import pickle
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tpplan.checkpoint.files import INDEX, SINGLE, CheckpointError
from tpplan.checkpoint.parts import chunks_of

CONTENTS = ".metadata"
_MADE_OF = {
    "torch.distributed.checkpoint.metadata": None,
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath", "WindowsPath", "PureWindowsPath"},
}
# of Python 3.13 only, which others read too
_CALLED = {"pathlib._local": "pathlib"}


@dataclass(frozen=True)
class Kept:
    """A tensor in such a checkpoint at ``path``, and its name there."""

    path: Path
    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    def is_as(self, other: Kept, like: torch.Tensor) -> bool:
        """Whether another one has the same numbers, where this rank has numbers of ``like``.

        Raises:
            CheckpointError: see ``fill``.
        """
        ours, theirs = (torch.empty_like(like, device="cpu", dtype=self.dtype) for _ in range(2))
        fill(self.path, {self.key: ours, other.key: theirs})
        pairs = zip(chunks_of(ours), chunks_of(theirs), strict=True)
        return all(torch.equal(one, another) for (_, one), (_, another) in pairs)


def is_distributed(path: Path) -> bool:
    """Whether a folder holds such a checkpoint, and no safetensors."""
    other = (path / SINGLE).exists() or (path / INDEX).exists()
    return (path / CONTENTS).exists() and not other


def kept_in(path: Path, names: Iterable[str]) -> dict[str, Kept]:
    """The tensors of a folder, by the names that a model has for them.

    A model may be part of what was saved, under a name of its own ({"model": ..., "optimizer":
    ...}): under which most of ``names`` are found.

    Raises:
        CheckpointError: with all that is damaged.
    """
    contents = _contents(path)
    tensors = {
        key: Kept(path, key, entry.properties.dtype, tuple(entry.size))
        for key, entry in contents.state_dict_metadata.items()
        if hasattr(entry, "properties")
    }
    wanted = set(names)
    prefixes: Counter[str] = Counter()
    for key in tensors:
        words = key.split(".")
        starts = (".".join(words[:n]) + "." if n else "" for n in range(len(words)))
        prefixes.update(start for start in starts if key[len(start) :] in wanted)
    prefix = max(prefixes, key=lambda start: (prefixes[start], -len(start)), default="")
    return {k[len(prefix) :]: kept for k, kept in tensors.items() if k.startswith(prefix)}


def fill(path: Path, into: Mapping[str, torch.Tensor]) -> None:
    """Fill tensors, by their names there; each rank reads what it holds, alone.

    Raises:
        CheckpointError: where a file is damaged in a way that its contents do not show.
    """
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import StorageMeta
    from torch.distributed.checkpoint.state_dict_loader import load

    class Reader(FileSystemReader):
        """Of contents that were looked through."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            found = _contents(path)
            found.storage_meta = found.storage_meta or StorageMeta()
            found.storage_meta.load_id = self.load_id
            return found

    try:
        load(dict(into), storage_reader=Reader(path), no_dist=True)
    except Exception as error:
        raise CheckpointError(path, [f"{type(error).__name__} while reading: {error}"]) from error


class _Contents(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        module = _CALLED.get(module, module)
        known = _MADE_OF.get(module, set())
        plain = module == "torch" and isinstance(
            getattr(torch, name, None), torch.dtype | torch.layout | torch.memory_format
        )
        if plain or (module, name) == ("torch", "Size") or known is None or name in known:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name} is no part of a checkpoint")


def _contents(path: Path) -> Any:
    """The table of contents; every place in it is within a file of the folder."""
    try:
        with (path / CONTENTS).open("rb") as file:
            contents = _Contents(file).load()
        places = list(contents.storage_data.values())
        problems = {problem for place in places if (problem := _missing(path, place))}
    except Exception as error:
        problems = {f"{CONTENTS} cannot be read: {type(error).__name__}: {error}"}
    if problems:
        raise CheckpointError(path, sorted(problems))
    return contents


def _missing(path: Path, place: Any) -> str | None:
    """What keeps the numbers of a place from being read."""
    file = path / place.relative_path
    if not file.resolve().is_relative_to(path.resolve()):
        return f"{place.relative_path} is outside the folder"
    if not file.is_file():
        return f"{place.relative_path} is missing"
    if place.offset < 0 or place.length < 0 or place.offset + place.length > file.stat().st_size:
        return f"{place.relative_path} ends before the numbers that are to be in it"
    return None
