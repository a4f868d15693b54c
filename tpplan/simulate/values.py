"""Real values of ids, positions and masks in a run that is otherwise on fake tensors.

Models look at them: whether a batch is padded, whether positions begin again, which rows an expert
gets. On fake tensors that code either fails or takes a way that no real run takes.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakTensorKeyDictionary

from tpplan.compat import FakeTensor, NeedsValuesError, Uncompiled, without_fakes
from tpplan.simulate.recorder import tensors_in

_aten = torch.ops.aten
CHOOSING = {
    _aten.topk.default: 2,
    _aten.sort.default: 1,
    _aten.sort.stable: 1,
    _aten.argmax.default: 1,
    _aten.max.dim: 1,
}
"""Ops that say which entries are the largest -> the place of their dimension."""
_NUMBERS = (_aten.full.default, _aten.ones.default)
"""What code has one number of for each sequence (its language), and goes by."""
EACH = (*CHOOSING, *_NUMBERS, _aten.zeros.default)
"""Ops whose results are told apart by more than what they are given."""
_INDEXING = {_aten.index, _aten.index_put, _aten.index_put_}
_LARGEST = 2**20
"""Elements; what is larger (a mask for each pair of tokens) stays fake."""


class RealValues(Uncompiled):
    """Has ops on real tensors alone compute, where their results are small.

    To be entered after the fake mode. Tensors that are made of nothing count as real where they
    are not floating: positions, masks.

    Args:
        spread: whether code goes by what is chosen by numbers that are not there, as experts by
            their scores: then each is chosen as often as any other.
    """

    def __init__(self, spread: bool = False) -> None:
        super().__init__()
        self.spread = spread
        self._zeros = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if any(isinstance(t, FakeTensor) for t in args):  # most ops
            if not self.spread:
                return func(*args, **kwargs)
            if func is _aten.scatter.value and args[0] in self._zeros:
                return _marked(*args)
            args = _by_place(func, args)
            return _spread(func, args, kwargs, func(*args, **kwargs))
        given = tensors_in((args, kwargs))
        random = torch.Tag.nondeterministic_seeded in func.tags
        if func.namespace != "aten" or random or any(isinstance(t, FakeTensor) for t in given):
            return func(*args, **kwargs)
        if not func._schema.is_mutable:
            try:
                out = func(*args, **kwargs)
            except NeedsValuesError:
                out, made = None, []
            else:
                made = tensors_in(out)
                if not given and self._stays_fake(func, out, made):
                    return out
            if any(t.numel() > _LARGEST for t in made):
                return out
        with without_fakes():
            return func(*args, **kwargs)

    def _stays_fake(self, func: Any, out: Any, made: list[torch.Tensor]) -> bool:
        """Whether no code goes by the numbers of what was made of nothing."""
        if not any(map(torch.is_floating_point, made)):
            return False
        if func is _aten.zeros.default:
            self._zeros[out] = True
        return not (self.spread and func in _NUMBERS and out.dim() < 2)


def _marked(zeros: torch.Tensor, dim: int, index: torch.Tensor, value: Any) -> torch.Tensor:
    """Zeros with a number at some places: real where these are, for code counts them."""
    if isinstance(index, FakeTensor) or zeros.numel() > _LARGEST:
        return zeros.scatter(dim, index, value)
    with without_fakes():
        return torch.zeros(zeros.shape, dtype=zeros.dtype).scatter(dim, index, value)


def _by_place(func: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments whose masks with real values are the places where they hold: so many rows."""
    if func.overloadpacket not in _INDEXING:
        return args
    indices: list[Any] = []
    with without_fakes():
        for index in args[1]:
            masked = isinstance(index, torch.Tensor) and index.dtype == torch.bool
            if masked and not isinstance(index, FakeTensor):
                indices += index.nonzero().unbind(1)
            else:
                indices.append(index)
    return (args[0], indices, *args[2:])


def _spread(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> Any:
    """What an op gave, with every entry chosen as often where it chooses the largest ones."""
    dim_at = CHOOSING.get(func)
    if dim_at is None:
        return out
    several = isinstance(out, tuple)
    indices = out[1] if several else out
    dim = args[dim_at] if len(args) > dim_at else kwargs.get("dim", -1)
    if dim is None or indices.numel() > _LARGEST or not args[0].dim():
        return out
    entries = args[0].size(dim)
    kept = args[0].dim() == indices.dim()
    with without_fakes():
        shape = list(indices.movedim(dim, -1).shape) if kept else [*indices.shape, 1]
        chosen = torch.arange(math.prod(shape)).remainder(entries).view(shape)
        chosen = chosen.movedim(-1, dim) if kept else chosen.squeeze(-1)
        chosen = chosen.contiguous()
    return (out[0], chosen) if several else chosen
