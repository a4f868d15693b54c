"""Modules that draw random numbers in training: dropout, and attention that drops out by itself."""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan.comm import Group
from tpplan.compat import in_backward
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
        stream, kind = state.stream, state.plan.draws
        if kind == "mixed":
            raise RuntimeError(
                f"{state.plan.path}: it draws dropout masks both for what is sharded over the "
                "ranks and for what each of them holds whole, which is not supported in training "
                "with p > 0; set one of the two p to 0 before tpplan.parallelize, or give each "
                "its own nn.Dropout"
            )
        own = kind == "region" or (kind == "stream" and stream.sequence_parallel)
        if own and isinstance(self, nn.modules.dropout._DropoutNd):
            return self._dropped(*args, **kwargs)
        if own and torch.compiler.is_compiling():
            self._refuse_compilation()
        if own:
            with stream.randomness.own():
                return super().forward(*args, **kwargs)
        return self._alike(*args, **kwargs)

    def _dropped(self, input: torch.Tensor) -> Any:
        """A dropout module on this rank's part of something."""
        state = self._tpplan
        stream = state.stream
        if state.length is not None or (state.plan.draws == "region" and not state.alone):
            return self._masked(input)
        if stream.is_sharded(input):
            assert isinstance(input, DTensor)
            if state.plan.rows and not torch.compiler.is_compiling():
                return self._masked(input)  # goes local by itself
            out = self._masked(stream.to_local(input))
            return stream.to_global(out, input.size(stream.dim))
        if state.plan.rows:
            return self._masked(input)
        return self._alike(input)  # called by itself, outside the stack, with a whole tensor

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
            "its own mask, compiles in an nn.Dropout only; set its p to 0, or keep this module "
            "out of the compiled graph with torch.compiler.disable"
        )

    def _alike(self, *args: Any, **kwargs: Any) -> Any:
        """Draw what all ranks draw."""
        state = self._tpplan
        randomness = state.stream.randomness
        if randomness.on_own:
            state.within_own = True
        elif state.within_own and in_backward():
            raise RuntimeError(
                f"{state.plan.path}: activation checkpointing recomputes it from within a module "
                "that draws from another random sequence, so its mask would not be the one of the "
                "forward; checkpoint that whole module, or set its dropout to 0"
            )
        with randomness.shared():
            return super().forward(*args, **kwargs)


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
