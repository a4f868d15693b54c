"""A checkpoint into a model, each rank its own part of every tensor."""

from __future__ import annotations

import io
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan.checkpoint.buffers import recomputed
from tpplan.checkpoint.distributed import Kept, fill, is_distributed, kept_in
from tpplan.checkpoint.files import CheckpointError, stored_in
from tpplan.checkpoint.merged import Merged, as_the_model_has_them
from tpplan.checkpoint.parts import chunks_of
from tpplan.progress import Progress
from tpplan.wrapping import adapted_model, wrapping_of

_SHOWN = 20
_UNMADE = (
    "no values: {} is an adapter's, on the meta device, and in no checkpoint of the model that was "
    "adapted: add the adapters in tpplan.from_pretrained(path, adapt=...)"
)


@dataclass(frozen=True)
class Loaded:
    """What was read on this rank.

    Attributes:
        bytes_read: of the files, headers apart.
        tensors: of the model's parameters and buffers, ties counted once.
    """

    bytes_read: int
    tensors: int


def load_checkpoint(model: nn.Module, path: str | Path) -> Loaded:
    """Fill ``model`` from a safetensors file, or a folder as transformers writes it, or DCP.

    Of a folder of ``torch.distributed.checkpoint`` what was saved of the model is read, whether it
    was saved alone or as a part.

    Of a model that ``parallelize`` sharded each rank reads the byte ranges of its own part, and
    holds no more than one tensor's part besides. What is on the meta device gets memory first,
    after everything was checked; floating numbers are converted to the model's dtype. Of a model
    with peft's adapters it may be the checkpoint of the model that was adapted: the adapters stay
    as they are. Nothing is sent: ranks call it alone or together.

    Raises:
        CheckpointError: with all that is missing, unexpected, or of another shape or kind, and
            files that are damaged; the model is as it was.
    """
    path = Path(path)
    if is_distributed(path):
        return _load_distributed(model, path)
    files = stored_in(path)
    called = _called(model, files)
    stored = as_the_model_has_them(adapted_model(model), called.values(), files)
    places = _prepared(model, stored, path, called)
    wanted = model.state_dict(keep_vars=True)
    bytes_read = 0
    with _progress(f"reading {path}") as progress:
        for count, (names, source) in enumerate(places.items(), 1):
            bytes_read += _fill(wanted[names[0]], stored[source])
            progress.say(
                f"reading {path}: {count} of {len(places)} tensors, {bytes_read / 1e9:.1f} GB"
            )
    return Loaded(bytes_read, len(places))


def _load_distributed(model: nn.Module, path: Path) -> Loaded:
    kept = kept_in(path, model.state_dict())
    wanted = model.state_dict()
    places = _prepared(model, kept, path, {name: name for name in wanted})
    wanted = model.state_dict()
    fill(path, {kept[source].key: wanted[names[0]] for names, source in places.items()})
    held = (
        local.numel() * kept[source].dtype.itemsize
        for names, source in places.items()
        for _, local in chunks_of(wanted[names[0]])
    )
    return Loaded(sum(held), len(places))


def _called(model: nn.Module, files: Container[str]) -> dict[str, str]:
    """The names of a model's tensors -> those that the model has for them whose files these are.

    That is the model itself, or the one that peft adapted, which has none for what peft added.
    """
    names = list(model.state_dict())
    wrapping = wrapping_of(model)
    if not wrapping.held or any(name in files for name in names):
        return {name: name for name in names}
    before = ((name, wrapping.before(name)) for name in names)
    return {name: called for name, called in before if called is not None}


def _prepared(
    model: nn.Module,
    stored: Mapping[str, Merged | Kept],
    path: Path,
    called: Mapping[str, str],
) -> dict[tuple[str, ...], str]:
    """``_matched``, and then memory for what is on the meta device, buffers with their values."""
    computed, lost = recomputed(model)
    places = _matched(model, stored, path, lost, called)
    materialize(model)
    for name, value in computed.items():
        model.get_buffer(name).copy_(value)
    return places


def _matched(
    model: nn.Module,
    stored: Mapping[str, Merged | Kept],
    path: Path,
    lost: Iterable[str],
    called: Mapping[str, str],
) -> dict[tuple[str, ...], str]:
    """The names that each tensor of the model has -> the one that it is stored under.

    Args:
        lost: buffers that nobody has values for.
        called: what ``_called`` says; what it does not name keeps the values that it has.
    """
    tied: dict[int, tuple[str, ...]] = {}
    wanted: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            tied[id(tensor)] = (*tied.get(id(tensor), ()), name)
            wanted[name] = tensor
    prefix = _prefix(adapted_model(model), called.values(), stored)
    places, problems, used = {}, [], set()
    for names in tied.values():
        sought = [prefix(called[name]) for name in names if name in called]
        source = next((name for name in sought if name in stored), None)
        used.update(sought)
        tensor = wanted[names[0]]
        if not sought:
            if tensor.is_meta:
                problems.append(_UNMADE.format(names[0]))
        elif source is None:
            problems.append(f"missing: {names[0]} {tuple(tensor.shape)}")
        elif stored[source].shape != tuple(tensor.shape):
            shapes = f"{stored[source].shape}, the model's is {tuple(tensor.shape)}"
            problems.append(f"another shape: {source} is {shapes}")
        elif _kind(stored[source].dtype) != _kind(tensor.dtype):
            kinds = f"{stored[source].dtype}, the model's is {tensor.dtype}"
            problems.append(f"another dtype: {source} is {kinds}")
        else:
            places[names] = source
    unused = sorted(stored.keys() - used)
    problems += [f"unexpected: {name} {stored[name].shape}" for name in unused]
    problems += [
        f"no values: the buffer {name} is on the meta device and in no checkpoint: compute it first"
        for name in lost
    ]
    if problems:
        more = len(problems) - _SHOWN
        raise CheckpointError(path, problems[:_SHOWN] + [f"and {more} more"] * (more > 0))
    return places


def _prefix(model: nn.Module, wanted: Iterable[str], stored: Iterable[str]) -> _Renamed:
    """Files of a base model lack the name that a model with a head has for it, or have it."""
    base, held = f"{getattr(model, 'base_model_prefix', '')}.", set(stored)
    names = list(wanted)
    if base == "." or any(name in held for name in names):
        return _Renamed("", "")
    if any(name.removeprefix(base) in held for name in names):
        return _Renamed(base, "")
    return _Renamed("", base)


@dataclass(frozen=True)
class _Renamed:
    less: str
    more: str

    def __call__(self, name: str) -> str:
        return self.more + name.removeprefix(self.less)


def _kind(dtype: torch.dtype) -> object:
    """Dtypes among which numbers are converted; each other one is by itself."""
    return "floating" if dtype.is_floating_point else dtype


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
