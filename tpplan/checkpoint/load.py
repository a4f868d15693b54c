"""A checkpoint into a model, each rank its own part of every tensor."""

from __future__ import annotations

import io
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan.checkpoint.buffers import recomputed
from tpplan.checkpoint.distributed import Kept, fill, is_distributed, kept_in
from tpplan.checkpoint.files import CheckpointError, stored_in
from tpplan.checkpoint.matching import called, matched
from tpplan.checkpoint.merged import Merged, as_the_model_has_them
from tpplan.checkpoint.parts import chunks_of
from tpplan.progress import Progress
from tpplan.wrapping import adapted_model

_SHOWN = 20


@dataclass(frozen=True)
class Loaded:
    """What was read on this rank.

    Attributes:
        bytes_read: of the files, headers apart.
        tensors: of the model's parameters and buffers, ties counted once.
    """

    bytes_read: int
    tensors: int


def load_checkpoint(model: nn.Module, path: str | Path, strict: bool = True) -> Loaded:
    """Fill ``model`` from a safetensors file, or a folder as transformers writes it, or DCP.

    Of a folder of ``torch.distributed.checkpoint`` what was saved of the model is read, whether it
    was saved alone or as a part.

    Of a model that ``parallelize`` sharded each rank reads the byte ranges of its own part, and
    holds no more than one tensor's part besides. What is on the meta device gets memory first,
    after everything was checked; floating numbers are converted to the model's dtype. Of a model
    with peft's adapters it may be the checkpoint of the model that was adapted: the adapters stay
    as they are. What transformers knows to be in files or to lack in them is no error. Nothing is
    sent: ranks call it alone or together.

    Args:
        strict: whether what is missing or unexpected otherwise is an error; else it is left as it
            is, with a warning.

    Raises:
        CheckpointError: with all that is missing, unexpected, or of another shape or kind, and
            files that are damaged; the model is as it was.
    """
    path = Path(path)
    if is_distributed(path):
        return _load_distributed(model, path, strict)
    files = stored_in(path)
    known = called(model, files)
    stored = as_the_model_has_them(adapted_model(model), known.values(), files)
    places = _prepared(model, stored, path, known, strict)
    wanted = model.state_dict(keep_vars=True)
    bytes_read = 0
    with _progress(f"reading {path}") as progress:
        for count, (names, source) in enumerate(places.items(), 1):
            bytes_read += _fill(wanted[names[0]], stored[source])
            progress.say(
                f"reading {path}: {count} of {len(places)} tensors, {bytes_read / 1e9:.1f} GB"
            )
    return Loaded(bytes_read, len(places))


def _load_distributed(model: nn.Module, path: Path, strict: bool) -> Loaded:
    kept = kept_in(path, model.state_dict())
    wanted = model.state_dict()
    places = _prepared(model, kept, path, {name: name for name in wanted}, strict)
    wanted = model.state_dict()
    fill(path, {kept[source].key: wanted[names[0]] for names, source in places.items()})
    held = (
        local.numel() * kept[source].dtype.itemsize
        for names, source in places.items()
        for _, local in chunks_of(wanted[names[0]])
    )
    return Loaded(sum(held), len(places))


def _prepared(
    model: nn.Module,
    stored: Mapping[str, Merged | Kept],
    path: Path,
    names: Mapping[str, str],
    strict: bool,
) -> dict[tuple[str, ...], str]:
    """Where everything is, and then memory for what is on meta, buffers with their values."""
    found = matched(model, stored, names)
    computed, lost = recomputed(model, found.left)
    missing = [f"missing: {name} {tuple(t.shape)}" for name, t in found.lacking.items()]
    excess = [f"unexpected: {name} {stored[name].shape}" for name in found.excess]
    problems = [*found.problems, *(missing + excess if strict else ())]
    problems += [
        f"no values: the buffer {name} is on the meta device and in no checkpoint: compute it first"
        for name in lost
    ]
    blank = {**found.left, **({} if strict else found.lacking)}
    problems += [
        f"no values: {name} is on the meta device and in no checkpoint"
        for name, tensor in blank.items()
        if tensor.is_meta and name not in computed and name not in lost
    ]
    if problems:
        raise CheckpointError(path, _shown(problems))
    if missing + excess:
        text = "\n".join([f"{path}: loaded but for", *_shown(missing + excess)])
        warnings.warn(text, stacklevel=3)
    materialize(model)
    for name, value in computed.items():
        model.get_buffer(name).copy_(value)
    return found.places


def _shown(problems: list[str]) -> list[str]:
    more = len(problems) - _SHOWN
    return problems[:_SHOWN] + [f"and {more} more"] * (more > 0)


def materialize(model: nn.Module) -> None:
    """Memory for what is on the meta device; all else is left as it is."""
    tensors = [*model.parameters(), *model.buffers()]
    if not any(t.is_meta for t in tensors):
        return
    meshes = [t.device_mesh.device_type for t in tensors if isinstance(t, DTensor)]
    device = [*meshes, *(t.device.type for t in tensors if not t.is_meta), "cpu"][0]
    tied: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            tied.setdefault(id(parameter), []).append((module, name))
    model._apply(lambda t: torch.empty_like(t, device=device) if t.is_meta else t)
    for (first, leaf), *others in tied.values():
        for module, name in others:
            module._parameters[name] = first._parameters[leaf]


@torch.no_grad()
def _fill(tensor: torch.Tensor, stored: Merged) -> int:
    """Write this rank's part of a stored tensor; how many bytes were read for it."""
    read = 0
    for offsets, local in chunks_of(tensor):
        stored.read_into(local, offsets)
        read += local.numel() * stored.dtype.itemsize
    return read


def _progress(text: str) -> Progress:
    """How far it is, on a terminal of the first rank."""
    first = not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
    return Progress(text, None if first else io.StringIO())
