"""What ops answer to fake tensors, remembered from layer to layer, and from run to run.

A fake mode remembers too, but takes far longer to find out what it was asked than to answer it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, in_kernel_invocation_manager

_MOST = 2**16
_PLAIN = (
    *(type(None), bool, int, float, str),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format),
)
_ANSWERS: dict[Any, Answer] = {}


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
        single: whether that is one tensor, not a tuple of some.
        told: what whoever asks has found out about the op with it.
    """

    made: tuple[Made, ...]
    single: bool
    told: Any


class Question(NamedTuple):
    """A call of an op: what tells it from others, and the tensors it is given."""

    key: tuple[Any, ...]
    given: list[FakeTensor]


def asked(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Question | None:
    """A call of an op; None where its answer may hang on more than sizes, or it is written to."""
    if type(func) is not OpOverload or func._schema.is_mutable:
        return None
    key: list[Any] = [func, torch.get_default_dtype()]  # that of whole numbers divided
    given: list[FakeTensor] = []
    if not _tell(args, key, given) or (kwargs and not _tell(_pairs(kwargs), key, given)):
        return None
    return Question(tuple(key), given) if given else None


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
        and tensor.layout is torch.strided
        and not tensor.dtype.is_complex
        and tensor.fake_device.type == "cpu"
        and not tensor.is_neg()
    )


def remembered(question: Question) -> Answer | None:
    """What the like was answered."""
    return _ANSWERS.get(question.key)


def again(answer: Answer, question: Question) -> Any:
    """An answer, made of the tensors of another call."""
    given = question.given
    mode = given[0].fake_mode
    made = []
    for base, shape, stride, offset, dtype in answer.made:
        with in_kernel_invocation_manager(mode):
            empty = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
            if base is not None:
                empty.set_(given[base].untyped_storage(), offset, shape, stride)
        made.append(FakeTensor(mode, empty, given[0].fake_device))
    return made[0] if answer.single else tuple(made)


def remember(question: Question, out: Any, told: Any) -> None:
    """Keep what a call was answered, if the like can be made again."""
    given = question.given
    made = [out] if isinstance(out, torch.Tensor) else out
    if type(made) not in (list, tuple) or not all(type(t) is FakeTensor for t in made):
        return
    bases = {t.untyped_storage()._cdata: i for i, t in reversed([*enumerate(given)])}
    kept, fresh = list[Made](), set[int]()
    for tensor in made:
        storage = tensor.untyped_storage()
        base = bases.get(storage._cdata)
        shape, stride = tuple(tensor.shape), tensor.stride()
        offset = tensor.storage_offset()
        if any(tensor is other for other in given) or not _is_plain(tensor):
            return
        if base is None:
            size = 0 if 0 in shape else _span(shape, stride) * tensor.element_size()
            if offset or storage._cdata in fresh or storage.nbytes() != size:
                return
            fresh.add(storage._cdata)
        if tensor.requires_grad or not all(type(n) is int for n in (*shape, *stride)):
            return
        kept.append(Made(base, shape, stride, int(offset), tensor.dtype))
    if len(_ANSWERS) >= _MOST:
        _ANSWERS.clear()
    _ANSWERS[question.key] = Answer(tuple(kept), isinstance(out, torch.Tensor), told)


def _span(shape: Sequence[int], stride: Sequence[int]) -> int:
    return 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
