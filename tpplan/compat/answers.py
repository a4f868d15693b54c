"""What ops answer to fake tensors, remembered from layer to layer, and from run to run.

A fake mode remembers too, but takes far longer to find out what it was asked than to answer it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.tensor import DTensor

from tpplan.compat.modes import Uncompiled, fake_mode

_MOST = 2**16
_PLAIN = (
    *(type(None), bool, int, float, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_ANSWERS: dict[Any, Answer] = {}
_DEVICE = torch.ops.prim.device.default
_UNTOLD = object()
"""In the place of what was found out about an op, where nobody looked."""
_CPU = torch.device("cpu")
_FRESH: dict[str, Any] = {}
"""What a new fake tensor holds, whatever its mode."""


class Made(NamedTuple):
    """A tensor that an op made; ``base``: which of those given it is a view of, None: of none."""

    base: int | None
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


@dataclass(frozen=True)
class Answer:
    """What an op made.

    Attributes:
        made: of a tensor that it was given and gives back, its number among them.
        kind: of which type that is: one tensor, a tuple or list of some, None.
        told: what whoever asks has found out about the op with it.
    """

    made: tuple[Made | int, ...]
    kind: type
    told: Any


class Question(NamedTuple):
    """A call of an op: what tells it from others, and the tensors it is given."""

    key: tuple[Any, ...]
    given: list[FakeTensor]
    mode: FakeTensorMode
    call: tuple[Any, Sequence[Any], dict[str, Any]]


def asked(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Question | None:
    """A call of an op; None where its answer may hang on more than sizes."""
    if type(func) is not OpOverload:
        return None
    key: list[Any] = [func, torch.get_default_dtype()]  # that of whole numbers divided
    given: list[FakeTensor] = []
    if not _tell(args, key, given) or (kwargs and not _tell(_pairs(kwargs), key, given)):
        return None
    if func._schema.is_mutable:
        key += (tensor.untyped_storage().nbytes() for tensor in given)
    mode = given[0].fake_mode if given else fake_mode()
    return None if mode is None else Question(tuple(key), given, mode, (func, args, kwargs))


def _pairs(kwargs: dict[str, Any]) -> Iterable[Any]:
    for name in sorted(kwargs):
        yield name
        yield kwargs[name]


def _tell(values: Iterable[Any], key: list[Any], given: list[FakeTensor]) -> bool:
    for value in values:
        kind = type(value)
        if kind is FakeTensor:
            if not _is_plain(value):
                return False
            key += (value.shape, value.stride(), value.storage_offset(), value.dtype)
            given.append(value)
        elif kind in _PLAIN:
            key += (kind, value)  # 1 and 1.0 and True are the same otherwise
        elif kind in (list, tuple):
            key.append(len(value))
            if not _tell(value, key, given):
                return False
        else:
            return False
    return True


def _is_plain(tensor: Any) -> bool:
    """Whether it is like any other of its sizes."""
    return (
        tensor.constant is None
        and tensor.fake_device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.dtype.is_complex
        and not tensor.is_neg()
    )


def remembered(question: Question) -> Answer | None:
    """What the like was answered to somebody who found out about it."""
    answer = _ANSWERS.get(question.key)
    return None if answer is None or answer.told is _UNTOLD else answer


def again(answer: Answer, question: Question) -> Any:
    """An answer, made of the tensors of another call."""
    given, mode = question.given, question.mode
    made: list[FakeTensor] = []
    for one in answer.made:
        if isinstance(one, int):
            made.append(given[one])
            continue
        base, shape, stride, offset, dtype = one
        with torch._C._DisableTorchDispatch():
            if base is None:
                empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            else:
                empty = torch.empty(0, dtype=dtype, device="meta")
                empty.set_(given[base].untyped_storage(), offset, shape, stride)
        made.append(_fake(mode, empty))
    if answer.kind is FakeTensor:
        return made[0]
    return None if answer.kind is type(None) else answer.kind(made)


def _fake(mode: FakeTensorMode, elem: torch.Tensor) -> FakeTensor:
    """``FakeTensor(mode, elem, _CPU)``, which sets and checks one thing after the other."""
    if not _FRESH:
        _FRESH.update(vars(FakeTensor(mode, elem, _CPU)))
        del _FRESH["fake_mode"]
    options = {"dispatch_device": True, "device_for_backend_keys": _CPU}
    made = torch.Tensor._make_subclass(FakeTensor, elem, False, **options)  # type: ignore[arg-type]
    vars(made).update(_FRESH, fake_mode=mode)
    if mode._allow_unsafe_data_ptr_access:
        torch._C._set_warn_deprecated_on_mutable_data_ptr(made)
    else:
        torch._C._set_throw_on_mutable_data_ptr(made)
    return made


def remember(question: Question, out: Any, told: Any) -> None:
    """Keep what a call was answered, if the like can be made again."""
    mutable = question.call[0]._schema.is_mutable
    made = [out] if isinstance(out, torch.Tensor) else [] if out is None else out
    if type(made) not in (list, tuple) or not all(type(t) is FakeTensor for t in made):
        return
    if mutable and not _left_sizes(question):
        return
    places = {id(tensor): place for place, tensor in enumerate(question.given)}
    bases = {t.untyped_storage()._cdata: i for i, t in reversed([*enumerate(question.given)])}
    kept, fresh = list[Made | int](), set[int]()
    for tensor in made:
        place = places.get(id(tensor))
        one = _made(tensor, bases, fresh) if place is None else place
        if one is None or (place is not None and not mutable):
            return
        kept.append(one)
    if len(_ANSWERS) >= _MOST:
        _ANSWERS.clear()
    _ANSWERS[question.key] = Answer(tuple(kept), type(out), told)


class Answering(Uncompiled):
    """Within it, ops on fake tensors whose like was run before are answered from memory."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE and type(args[0]) is FakeTensor:
            return args[0].fake_device
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        question = asked(func, args, kwargs)
        answer = None if question is None else _ANSWERS.get(question.key)
        if question is not None and answer is not None:
            return again(answer, question)
        out = func(*args, **kwargs)
        if question is not None:
            remember(question, out, _UNTOLD)
        return out


def _left_sizes(question: Question) -> bool:
    """Whether an op that writes to what it was given wrote numbers alone."""
    now = asked(*question.call)
    return now is not None and now.key == question.key


def _made(tensor: torch.Tensor, bases: Mapping[int, int], fresh: set[int]) -> Made | None:
    """How to make the like of a tensor; None where that is not known.

    Args:
        bases: which of the tensors given has a storage; fresh: those that are new.
    """
    storage = tensor.untyped_storage()
    base = bases.get(storage._cdata)
    shape, stride = tuple(tensor.shape), tensor.stride()
    offset = tensor.storage_offset()
    if not _is_plain(tensor) or tensor.requires_grad:
        return None
    if not all(type(n) is int for n in (*shape, *stride)):
        return None
    if base is None:
        size = 0 if 0 in shape else _span(shape, stride) * tensor.element_size()
        if offset or storage._cdata in fresh or storage.nbytes() != size:
            return None
        fresh.add(storage._cdata)
    return Made(base, shape, stride, int(offset), tensor.dtype)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
