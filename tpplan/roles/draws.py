"""Modules that draw random numbers in training: dropout, and attention that drops out by itself."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from tpplan.comm import Group
from tpplan.comm.randomness import answering
from tpplan.compat import Running, Site, draws, in_backward, running
from tpplan.compiled import DrawnFor
from tpplan.roles.lowered import Lowered


class Draws(Lowered):
    """Draws from the sequence that fits what it draws for.

    Where each rank has a part (its heads or columns; its rows under sequence parallelism), from
    the rank's own, so that no two parts have the same mask; where all hold the whole, from the one
    the ranks share, so that they agree.
    """

    p: float  # of a dropout module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training or _is_off(self):
            return super().forward(*args, **kwargs)
        state = self._tpplan
        kind, module = state.plan.draws, isinstance(self, nn.modules.dropout._DropoutNd)
        if kind == "mixed" and torch.compiler.is_compiling():
            self._refuse_compilation()
        if kind == "mixed" and not module:
            with answering(self._draws_own), _AtSites(self):
                return super().forward(*args, **kwargs)
        if kind == "mixed":
            kind = self._drawn_at(running().site)
        own = self._is_own(kind)
        if own and module:
            return self._dropped(kind, *args, **kwargs)
        if own and torch.compiler.is_compiling():
            self._refuse_compilation()
        with self._sequence(own):
            return super().forward(*args, **kwargs)

    def _is_own(self, kind: DrawnFor | None) -> bool:
        return kind == "region" or (kind == "stream" and self._tpplan.stream.sequence_parallel)

    def _drawn_at(self, where: Site) -> DrawnFor:
        """What is drawn for at a place in the code, of a module that draws for several."""
        plan = self._tpplan.plan
        kind = dict(plan.drawn_at).get(where)
        if kind is None:
            raise RuntimeError(
                f"{plan.path}: it draws dropout masks both for what is sharded over the ranks and "
                "for what each of them holds whole, and which of the two is not known of this "
                "place in the code, which draws for both or did not when the plan was compiled; "
                "set its p to 0 before tpplan.parallelize, or give each its own nn.Dropout"
            )
        return kind

    def _own_at(self, now: Running) -> bool:
        """Whether a place in its code draws from the rank's own sequence."""
        if now.checkpointed:
            raise RuntimeError(
                f"{self._tpplan.plan.path}: it draws dropout masks both for what is sharded over "
                "the ranks and for what each of them holds whole, in a part of its forward that is "
                "recomputed in backward, where they would be others; checkpoint the whole module, "
                "or set its dropout to 0"
            )
        return self._is_own(self._drawn_at(now.site))

    def _draws_own(self, before: Callable[[], bool]) -> bool:
        """The same of where its code is now, where it is this module's that runs."""
        now = running(Draws.forward.__code__)
        return self._own_at(now) if now.module is self else before()

    def _dropped(self, kind: DrawnFor | None, input: torch.Tensor) -> Any:
        """A dropout module on this rank's part of something."""
        state = self._tpplan
        stream = state.stream
        if state.length is not None or (kind == "region" and not state.alone):
            return self._masked(input)
        if stream.is_sharded(input):
            assert isinstance(input, DTensor)
            if state.plan.rows and not torch.compiler.is_compiling():
                return self._masked(input)  # goes local by itself
            out = self._masked(stream.to_local(input))
            return stream.to_global(out, input.size(stream.dim))
        if state.plan.rows:
            return self._masked(input)
        with self._sequence(own=False):  # called by itself, outside the stack, with a whole tensor
            return super().forward(input)

    def _masked(self, input: torch.Tensor) -> Any:
        if not torch.compiler.is_compiling():
            with self._tpplan.stream.randomness.own():
                return super().forward(input)
        if getattr(type(self).__bases__[-1], "forward", None) is not nn.Dropout.forward:
            self._refuse_compilation()
        return part_of_dropout(input, self.p, self._tpplan.transition.group)

    def _refuse_compilation(self) -> NoReturn:
        raise RuntimeError(
            f"{self._tpplan.plan.path}: dropout under tensor parallelism, of which each rank draws "
            "its own mask, compiles in an nn.Dropout of its own only; set its p to 0, or keep this "
            "module out of the compiled graph with torch.compiler.disable"
        )

    def _sequence(self, own: bool) -> AbstractContextManager[None]:
        """Within it, random numbers are the rank's own, or those that all ranks draw."""
        state = self._tpplan
        randomness = state.stream.randomness
        if own:
            return randomness.own()
        if randomness.on_own:
            state.within_own = True
        elif state.within_own and in_backward():
            raise RuntimeError(
                f"{state.plan.path}: activation checkpointing recomputes it from within a module "
                "that draws from another random sequence, so its mask would not be the one of the "
                "forward; checkpoint that whole module, or set its dropout to 0"
            )
        return randomness.shared()


class _AtSites(TorchDispatchMode):
    """In a module that draws for several: from the sequence that fits, at each place in its code.

    What is called inside of it draws by its own rules.
    """

    def __init__(self, module: Draws) -> None:
        super().__init__()
        self._module = module

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not draws(func, args, kwargs):
            return func(*args, **kwargs)
        now = running(Draws.forward.__code__)
        if now.module is not self._module:
            return func(*args, **kwargs)
        with self._module._sequence(self._module._own_at(now)):
            return func(*args, **kwargs)


def part_of_dropout(x: torch.Tensor, p: float, group: Group) -> torch.Tensor:
    """Dropout of a part, for compiled graphs: by a mask of this rank's own.

    All ranks draw the same two numbers. What becomes of them is fused into the kernel that reads
    ``x``, and computed again in backward: no mask is kept.
    """
    if p == 1:
        return torch.zeros_like(x)
    keys = torch.randint(2**31 - 1, (2,), dtype=torch.int32, device=x.device)
    return x * kept(x, p, keys, group.rank).to(x.dtype) / (1 - p)


def kept(x: torch.Tensor, p: float, keys: torch.Tensor, rank: int) -> torch.Tensor:
    """Which elements of ``x`` a rank keeps that drops each with probability ``p``.

    Args:
        keys: two random numbers that the ranks share.
    """
    columns = x.size(-1) if x.dim() else 1
    row = torch.arange(x.numel() // max(columns, 1), dtype=torch.int32, device=x.device)
    column = torch.arange(columns, dtype=torch.int32, device=x.device)
    # two numbers for each row, so that no row is another one shifted
    first, second = (_mixed(row + _mixed(_mixed(keys[i]) + rank)).unsqueeze(1) for i in (0, 1))
    bits = _mixed(_mixed(column ^ first) + second)
    return ((bits & 0x7FFFFFFF) >= round(p * 2**31)).view(x.shape)


def _mixed(bits: torch.Tensor) -> torch.Tensor:
    """32 bits that look random (the finalizer of MurmurHash3: Appleby 2011)."""
    bits = (bits ^ (bits >> 16 & 0xFFFF)) * (0x85EBCA6B - 2**32)
    bits = (bits ^ (bits >> 13 & 0x7FFFF)) * (0xC2B2AE35 - 2**32)
    return bits ^ (bits >> 16 & 0xFFFF)


def draws_in_training(model: nn.Module) -> bool:
    """Whether any module of ``model`` would draw random numbers now."""
    return any(
        isinstance(module, Draws) and module.training and not _is_off(module)
        for module in model.modules()
    )


def _is_off(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.dropout._DropoutNd) and module.p == 0
