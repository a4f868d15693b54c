"""Stages of a pipeline that give each other shards of the stream, not all of it.

Between stages that are sequence-parallel inside, each rank needs its own rows only: Megatron-LM
sends no more than these either (Korthikanti et al., https://arxiv.org/abs/2205.05198, §4.2.2).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan.comm.conjugates import split
from tpplan.comm.stream import Stream
from tpplan.roles.lowered import Lowered

_Module = TypeVar("_Module", bound=nn.Module)


def shard_stage(module: _Module, *, first: bool, last: bool) -> _Module:
    """Let a stage of a pipeline receive and send this rank's shard of the stream.

    What stands between the stages is [batch, sequence / tp, width] then: no all-gather at the end
    of a stage, and 1/tp of the bytes from rank to rank. The code inside of the stage sees the whole
    sequence's shape, as it does between the layers of a model. Without sequence parallelism nothing
    changes, for there is no shard.

    Args:
        module: what ``PipelineStage`` is given: a parallelized model, or a module of yours around
            one, or around pieces of one. It takes the stream as its only positional argument, and
            returns it. Changed in place, by two hooks.
        first: whether it begins the pipeline: it is given the whole input, as the user gave it.
        last: whether it ends the pipeline: it returns whole outputs, or logits.

    Returns:
        The module.

    Raises:
        ValueError: for a module in which nothing, or more than one model, was parallelized.
        RuntimeError: in a forward, where what is received or sent is not one tensor, or of a
            sequence that the ranks do not share evenly.
    """
    streams = {id(m._tpplan.stream): m._tpplan.stream for m in _lowered(module)}
    if len(streams) != 1:
        raise ValueError(
            f"shard_stage: {type(module).__name__} holds {len(streams)} parallelized models; give "
            "it a stage of one, after tpplan.parallelize"
        )
    (stream,) = streams.values()
    if stream.sequence_parallel:
        stage = _Stage(stream, first, last)
        module.register_forward_pre_hook(stage.receive)
        module.register_forward_hook(stage.send, always_call=True)
    return module


def _lowered(module: nn.Module) -> list[Lowered]:
    return [inner for inner in module.modules() if isinstance(inner, Lowered)]


@dataclass
class _Stage:
    """What happens to the stream at the ends of a stage."""

    stream: Stream
    first: bool
    last: bool

    def receive(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        stream = self.stream
        if not self.first:
            x = self._one(args[0] if len(args) == 1 else args, "receives")
            args = (stream.to_global(x, x.size(stream.dim) * stream.group.size),)
        stream.hands_on = not self.last
        return args

    def send(self, module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        stream = self.stream
        stream.hands_on = False
        if self.last or out is None:  # where the forward raised
            return out
        x = self._one(out, "returns")
        length, size = x.size(stream.dim), stream.group.size
        if length % size:
            raise RuntimeError(
                f"shard_stage: a sequence of {length} tokens has no equal shards for {size} ranks; "
                f"pad it to {-(-length // size) * size}"
            )
        if isinstance(x, DTensor):
            x = stream.to_local(x)
        else:
            x = split(x, stream.dim, stream.source.transition)
        # schedules detach it in place, which torch refuses for views
        return x.clone()

    def _one(self, x: Any, what: str) -> torch.Tensor:
        """The stream: [batch, sequence, ..., width]."""
        if not isinstance(x, torch.Tensor) or x.dim() < self.stream.dim + 2:
            told = f"of shape {list(x.shape)}" if isinstance(x, torch.Tensor) else type(x).__name__
            raise RuntimeError(
                f"shard_stage: a stage hands on one tensor [batch, sequence, width], but this one "
                f"{what} {told}"
            )
        return x
