"""Calls of a model: the one it is proved with, another length, larger numbers."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from tpplan.observe.calls import Call
from tpplan.observe.calls import vocabulary_of as vocabulary_of


def length_of(call: Call, dim: int) -> int:
    """The size along the sequence dimension of the first tensor that has one, 0 without any."""
    tensors = (t for t in tree_leaves(call) if isinstance(t, torch.Tensor) and t.dim() >= 2)
    return next((int(t.size(dim)) for t in tensors if t.dim() > dim), 0)


def resized(call: Call, dim: int, length: int, wanted: int) -> Call:
    """``call`` with its sequences, ``length`` long along ``dim``, ``wanted`` long."""

    def sequences(t: torch.Tensor) -> set[int]:
        last = t.dim() - 1
        found = {d for d in (dim,) if d < t.dim() and t.size(d) == length}
        if t.dim() == 1 or not t.is_floating_point():
            found |= {d for d in range(t.dim()) if t.size(d) == length and (d or not found)}
        if last > 0 and t.size(last) == t.size(last - 1) == length:  # a mask
            found |= {last - 1, last}
        return found

    def grown(t: torch.Tensor) -> torch.Tensor:
        for d in sequences(t):
            t = t.index_select(d, torch.arange(wanted) % length)
        return t

    return tree_map_only(torch.Tensor, grown, call)  # type: ignore[no-any-return]


def other_lengths(length: int, tp: int) -> list[int]:
    """Lengths that ``tp`` does not divide, the first longer than ``length``.

    Code that asks how long its input is shows where a rank has no more than it asks for, and the
    whole has: what it asks for between a rank's part of the one and the other length is found.
    """
    longer = max(2 * length - 1, length + 2) if length <= 32 else length + 1
    return [n for n in (longer, longer - 1, length - 1, length - 2) if n > 0 and n % tp]


def beside(length: int, tp: int) -> int:
    """Another length, of which a rank has as many rows, with those of padding.

    Code that keeps rows for calls as long finds them kept where the whole has none.
    """
    return length + 1 if length % tp else length - 1


def loud(call: Call, factor: float) -> Call:
    """``call`` with its floating tensors times ``factor``; not masks, which are not finite."""

    def louder(t: torch.Tensor) -> torch.Tensor:
        return t * factor if t.is_floating_point() and bool(t.isfinite().all()) else t

    return tree_map_only(torch.Tensor, louder, call)  # type: ignore[no-any-return]


def drawn_where_alike(call: Call, generator: torch.Generator) -> Call:
    """A user's call; activations that are all the same number, which hides mistakes, are drawn."""

    def stirred(t: torch.Tensor) -> torch.Tensor:
        if not t.is_floating_point() or t.dim() < 3 or not t.numel():
            return t
        if not bool((t == t.flatten()[0]).all()) or not bool(t.isfinite().all()):
            return t
        return torch.randn(t.shape, generator=generator, dtype=t.dtype)

    return tree_map_only(torch.Tensor, stirred, call)  # type: ignore[no-any-return]


def other_batch(call: Call, number: int) -> Call:
    """``call`` as a data-parallel rank with that number may have it: others of its ids, other rows.

    Masks and positions stay: what is no more than 1, or does not fall along its rows. Of number 0
    it is the call itself.
    """
    generator = torch.Generator().manual_seed(number)

    def drawn(t: torch.Tensor) -> torch.Tensor:
        if t.dim() < 2 or not t.numel() or t.is_complex() or t.dtype == torch.bool:
            return t
        if t.is_floating_point():
            if t.dim() < 3 or not bool(t.isfinite().all()):
                return t
            size = float(t.detach().norm()) / t.numel() ** 0.5
            return torch.randn(t.shape, generator=generator, dtype=t.dtype).mul_(size)
        if int(t.max()) <= 1 or bool((t.diff(dim=-1) >= 0).all()):
            return t
        chosen = torch.randint(t.numel(), t.shape, generator=generator)
        return t.flatten()[chosen]

    return tree_map_only(torch.Tensor, drawn, call) if number else call  # type: ignore[no-any-return]


def with_options(forward: Callable[..., Any], call: Call, accepts: Callable[[Call], bool]) -> Call:
    """``call`` with a tensor for each further argument, by default None, for which one is accepted.

    Other code may run where one is given: a loss of its own, a mask. Activations like those of the
    call are tried, and ones, of which the first is zero, in the shape of its ids: right as a mask,
    as positions, as kinds of tokens and as labels.
    """
    leaves = [t for t in tree_leaves(call) if isinstance(t, torch.Tensor) and t.dim() >= 2]
    floats = next((torch.ones_like(t) for t in leaves if t.is_floating_point()), None)
    ids = next((torch.ones_like(t) for t in leaves if t.dtype == torch.long), None)
    if ids is not None:
        ids[:1, :1] = 0
    parameters = inspect.signature(forward).parameters
    for name in list(parameters)[len(call[0]) :]:
        if name in call[1] or parameters[name].default is not None:
            continue
        for tensor in (ids, floats):
            if tensor is not None:
                longer = (call[0], {**call[1], name: tensor})
                if accepts(longer):
                    call = longer
                    break
    return call
