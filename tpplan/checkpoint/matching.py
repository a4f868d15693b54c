"""Which stored tensor is which of a model's, and what does not fit."""

from __future__ import annotations

import re
import sys
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from tpplan.checkpoint.distributed import Kept
from tpplan.checkpoint.merged import Merged
from tpplan.wrapping import adapted_model, wrapping_of

_UNMADE = (
    "no values: {} is an adapter's, on the meta device, and in no checkpoint of the model that was "
    "adapted: add the adapters in tpplan.from_pretrained(path, adapt=...)"
)
_AT_ONCE = 2**24  # numbers of two tensors that are compared


@dataclass
class Matching:
    """What was found.

    Attributes:
        places: the names that each tensor of the model has -> the one that it is stored under.
        problems: what does not fit.
        excess, lacking: what the model has no place for, and what it has and the files do not.
        left: of those the names that transformers knows to be in no file.
    """

    places: dict[tuple[str, ...], str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    excess: list[str] = field(default_factory=list)
    lacking: dict[str, torch.Tensor] = field(default_factory=dict)
    left: dict[str, torch.Tensor] = field(default_factory=dict)


def called(model: nn.Module, files: Container[str]) -> dict[str, str]:
    """The names of a model's tensors -> those that the model has for them whose files these are.

    That is the model itself, or the one that peft adapted, which has none for what peft added.
    """
    names = list(model.state_dict())
    wrapping = wrapping_of(model)
    if not wrapping.held or any(name in files for name in names):
        return {name: name for name in names}
    before = ((name, wrapping.before(name)) for name in names)
    return {name: earlier for name, earlier in before if earlier is not None}


def matched(
    model: nn.Module, stored: Mapping[str, Merged | Kept], names: Mapping[str, str]
) -> Matching:
    """What is stored, by the tensors of a model.

    Args:
        names: what ``called`` says; what it does not name keeps the values that it has.
    """
    tied: dict[int, tuple[str, ...]] = {}
    wanted: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if isinstance(tensor, torch.Tensor):
            tied[id(tensor)] = (*tied.get(id(tensor), ()), name)
            wanted[name] = tensor
    base = adapted_model(model)
    prefix = _prefix(base, names.values(), stored)
    found, used = Matching(), set[str]()
    for own in tied.values():
        sought = [prefix(names[name]) for name in own if name in names]
        sources = [name for name in sought if name in stored]
        used.update(sought)
        tensor = wanted[own[0]]
        if not sought:
            if tensor.is_meta:
                found.problems.append(_UNMADE.format(own[0]))
        elif not sources:
            known = any(_is_known(base, "missing", name) for name in sought)
            (found.left if known else found.lacking)[own[0]] = tensor
        elif (problem := _misfit(sources, stored, tensor)) is not None:
            found.problems.append(problem)
        else:
            found.places[own] = sources[0]
    unused = sorted(stored.keys() - used)
    found.excess += [name for name in unused if not _is_known(base, "unexpected", name)]
    return found


def _misfit(
    sources: Sequence[str], stored: Mapping[str, Merged | Kept], tensor: torch.Tensor
) -> str | None:
    """What is wrong with what is stored of a tensor of the model, if anything is."""
    source, *others = sources
    if stored[source].shape != tuple(tensor.shape):
        shapes = f"{stored[source].shape}, the model's is {tuple(tensor.shape)}"
        return f"another shape: {source} is {shapes}"
    if _kind(stored[source].dtype) != _kind(tensor.dtype):
        kinds = f"{stored[source].dtype}, the model's is {tensor.dtype}"
        return f"another dtype: {source} is {kinds}"
    for other in others:
        if not _equal(stored[source], stored[other], tensor):
            return (
                f"two for one: {source} and {other} differ, and the model has one tensor for both: "
                "build it untied (config.tie_word_embeddings = False), or remove one of them"
            )
    return None


def _equal(one: Merged | Kept, other: Merged | Kept, tensor: torch.Tensor) -> bool:
    """Whether two that are stored of one tensor of the model are the same."""
    if one.shape != other.shape:
        return False
    if isinstance(one, Kept) or isinstance(other, Kept):
        assert isinstance(one, Kept) and isinstance(other, Kept)
        return one.is_as(other, tensor)
    rows, *rest = one.shape or (1,)
    each = max(1, _AT_ONCE // max(1, torch.Size(rest).numel()))
    for start in range(0, rows, each):
        sizes = (min(each, rows - start), *rest) if one.shape else ()
        offsets = (start, *(0 for _ in rest)) if one.shape else ()
        parts = [torch.empty(sizes, dtype=t.dtype) for t in (one, other)]
        for t, part in zip((one, other), parts, strict=True):
            t.read_into(part, offsets)
        if one.dtype == other.dtype:  # of float8 torch compares none
            parts = [part.reshape(-1).view(torch.uint8) for part in parts]
        if not torch.equal(parts[0], parts[1].to(parts[0].dtype)):
            return False
    return True


def _is_known(model: nn.Module, what: str, name: str) -> bool:
    """Whether transformers knows of a name that files of this kind of model have or lack it.

    Classes of models say so; of rotary frequencies, which older files have for each layer,
    ``from_pretrained`` does.
    """
    if "transformers" not in sys.modules:
        return False
    patterns = list(getattr(model, f"_keys_to_ignore_on_load_{what}", None) or ())
    ends = "rotary_emb.inv_freq"
    if what == "unexpected" and any(n.endswith(ends) for n, _ in model.named_buffers()):
        patterns.append(re.escape(ends))
    return any(re.search(pattern, name) for pattern in patterns)


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
