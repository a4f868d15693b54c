"""A model into safetensors files, each rank its own part of every tensor."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from tpplan.checkpoint.files import INDEX, SINGLE, CheckpointError, Stored, stored_in
from tpplan.checkpoint.layout import File, laid_out
from tpplan.checkpoint.parts import bytes_of, chunks_of, is_first_with
from tpplan.checkpoint.read import runs
from tpplan.checkpoint.together import everyones, from_first, is_first, together
from tpplan.comm.chunked import Chunked

_MOST = 5 * 10**9


def save_checkpoint(model: nn.Module, path: str | Path, max_file_bytes: int = _MOST) -> None:
    """Write ``model`` into the folder ``path``, as transformers writes an unsharded one.

    Every rank calls it, and writes what it holds: names, shapes and order of the numbers are those
    of the unsharded model; of tensors that are tied the first name is kept. A transformers model's
    configs are written too. What the folder held before is whole until the new files are, and only
    then removed: whenever the ranks are stopped, either is there.

    Args:
        max_file_bytes: from where on there are several files, and an index of them.

    Raises:
        ValueError: on every rank, where ranks hold different models, or one of them cannot write.
    """
    tensors = _tensors(model)
    folder, token = Path(path), from_first(secrets.token_hex(4))
    _require_same({name: (tuple(t.shape), str(t.dtype)) for name, t in tensors.items()})
    draft = folder / f".tpplan-{token}"
    files = laid_out(tensors, draft, max_file_bytes)
    failure = "the checkpoint was not saved"
    try:
        together(lambda: _begin(draft, files), failure, first_only=True)
        together(lambda: _write(tensors, files), failure)
        together(lambda: _publish(model, folder, draft, files, token), failure, first_only=True)
    finally:
        if is_first():
            shutil.rmtree(draft, ignore_errors=True)


def _tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What is saved, each tensor once."""
    seen: dict[int, str] = {}
    found = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor) and seen.setdefault(id(tensor), name) == name:
            if tensor.is_meta:
                raise ValueError(f"{name} is on the meta device: it has no numbers to save")
            found[name] = tensor
    return found


def _begin(draft: Path, files: Iterable[File]) -> None:
    """Files of their final size, with headers and no numbers; what a killed save left goes."""
    for left in draft.parent.glob(".tpplan-*"):
        shutil.rmtree(left, ignore_errors=True)
    draft.mkdir(parents=True)
    for file in files:
        with file.path.open("wb") as out:
            out.write(file.header)
            out.truncate(file.size)


@torch.no_grad()
def _write(tensors: Mapping[str, torch.Tensor], files: Iterable[File]) -> None:
    lowest, first = _lowest(tensors.values()), is_first()
    for file in files:
        with file.path.open("r+b", buffering=0) as out:
            for name, stored in file.tensors.items():
                tensor = tensors[name]
                holds = lowest[tensor.device_mesh] if isinstance(tensor, DTensor) else first
                for offsets, local in _own(tensor, holds):
                    _put(out.fileno(), local, stored, offsets)
            os.fsync(out.fileno())


def _lowest(tensors: Iterable[torch.Tensor]) -> dict[DeviceMesh, bool]:
    """Whether this rank is of the first of several groups that each hold all of a tensor.

    By the mesh of the tensor: experts may be on a larger one than the rest.
    """
    meshes = dict.fromkeys(t.device_mesh for t in tensors if isinstance(t, DTensor))
    mine = [int(mesh.mesh.min()) for mesh in meshes]
    least = [min(some) for some in zip(*everyones(mine), strict=True)]
    return {mesh: m == first for mesh, m, first in zip(meshes, mine, least, strict=True)}


def _own(tensor: torch.Tensor, lowest: bool) -> Iterator[tuple[Sequence[int], torch.Tensor]]:
    """The blocks of a tensor that this rank writes: each is written once."""
    if not isinstance(tensor, DTensor):
        yield from chunks_of(tensor) if lowest else ()
        return
    here = tensor.device_mesh.get_coordinate() or ()
    alike = zip(here, tensor.placements, strict=True)
    if not lowest or any(place and kind.is_replicate() for place, kind in alike):
        return
    for offsets, local in chunks_of(tensor):
        if not isinstance(tensor, Chunked) or is_first_with(tensor, offsets):
            yield offsets, local


def _put(file: int, local: torch.Tensor, stored: Stored, offsets: Sequence[int]) -> None:
    part = local.detach().cpu().contiguous()
    if not part.numel():
        return
    memory = bytes_of(part)
    at = 0
    for start, length in runs(stored, offsets, part.shape):
        done = 0
        while done < length:
            done += os.pwrite(file, memory[at + done : at + length], start + done)
        at += length


def _publish(
    model: nn.Module, folder: Path, draft: Path, files: Sequence[File], token: str
) -> None:
    """Put the new files in their places; the last of them is what makes them count."""
    for config in (getattr(model, "config", None), getattr(model, "generation_config", None)):
        if config is not None and hasattr(config, "save_pretrained"):
            config.save_pretrained(draft)
    for written in draft.glob("*.json"):
        os.replace(written, folder / written.name)
    before = _held(folder)
    if len(files) == 1:
        os.replace(files[0].path, folder / SINGLE)
        kept = {SINGLE}
    else:
        names = [file.path.name.replace("model-", f"model-{token}-", 1) for file in files]
        for file, name in zip(files, names, strict=True):
            os.replace(file.path, folder / name)
        total = sum(file.size - len(file.header) for file in files)
        named = zip(files, names, strict=True)
        places = {tensor: name for file, name in named for tensor in file.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        (draft / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        os.replace(draft / INDEX, folder / INDEX)
        kept = {INDEX, *names}
    for name in before - kept:
        (folder / name).unlink(missing_ok=True)


def _held(folder: Path) -> set[str]:
    """The files of the checkpoint that a folder holds."""
    names = {name for name in (SINGLE, INDEX) if (folder / name).exists()}
    try:
        return names | {stored.path.name for stored in stored_in(folder).values()}
    except CheckpointError:
        return names


def _require_same(held: Mapping[str, object]) -> None:
    """Raise on every rank where they do not hold the same tensors."""
    everyone = everyones(dict(held))
    for number, other in enumerate(everyone):
        names = everyone[0].keys() | other.keys()
        odd = sorted(name for name in names if everyone[0].get(name) != other.get(name))
        if odd:
            differ = f"{', '.join(odd[:4])} differ"
            raise ValueError(f"rank {number} holds another model than rank 0: {differ}")
