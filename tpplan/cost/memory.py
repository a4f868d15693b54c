"""Memory of a rank: what is held throughout, and what a step needs beyond it, phase by phase."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from tpplan.compiled import CompiledPlan, ParameterPlan
from tpplan.simulate.steps import Step

_RUNNING = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Peak:
    """The most that a rank holds in a phase.

    Attributes:
        bytes: everything; activations: of it, what is neither parameter, buffer, optimizer state
            nor gradient of a parameter.
        module: what runs then, "" for the model itself.
    """

    bytes: int
    activations: int
    module: str


@dataclass(frozen=True)
class Memory:
    """Bytes on the first rank, which has the most of what does not divide evenly.

    Attributes:
        parameters_total: of the whole model, each one once.
        buffers_per_rank: every rank has them all.
        gradients_per_rank: of parameters, when all are there.
        optimizer_per_rank: its state and, where there are, float32 copies of 16-bit parameters.
        peaks: by phase: forward, backward and optimizer.
    """

    parameters_total: int
    parameters_per_rank: int
    buffers_per_rank: int
    gradients_per_rank: int
    optimizer_per_rank: int
    peaks: Mapping[str, Peak]

    @property
    def states_per_rank(self) -> int:
        """Parameters, buffers, gradients and optimizer state: what training always holds."""
        kept = self.parameters_per_rank + self.buffers_per_rank
        return kept + self.gradients_per_rank + self.optimizer_per_rank

    @property
    def peak_per_rank(self) -> int:
        """The most that is held at any time."""
        return max((peak.bytes for peak in self.peaks.values()), default=self.states_per_rank)

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        more = {"states_per_rank": self.states_per_rank, "peak_per_rank": self.peak_per_rank}
        return {**asdict(self), **more}


def memory_of(
    compiled: CompiledPlan, steps: Sequence[Step], optimizer: Mapping[str, int], buffers: int
) -> Memory:
    """The memory of a run.

    Args:
        optimizer: bytes for each parameter, which are there from the second step on.
        buffers: bytes of the model's buffers.
    """
    entries = compiled.parameters.values()
    parameters = sum(parameter_bytes(e, e.local_shape) for e in entries)
    state = sum(optimizer.values())
    peaks: dict[str, Peak] = {}
    held = gradients = 0
    for step in steps:
        # the optimizer's own step is where its state is seen to be made
        base = parameters + buffers + (0 if step.phase == "optimizer" else state)
        most = held + step.peak
        activations = most - gradients - (state if step.phase == "optimizer" else 0)
        outer = peaks.get(step.phase)
        if outer is None or base + most > outer.bytes:
            peaks[step.phase] = Peak(base + most, max(activations, 0), step.module)
        held += step.net
        gradients += step.gradients
    return Memory(
        parameters_total=sum(parameter_bytes(e, e.shape) for e in entries),
        parameters_per_rank=parameters,
        buffers_per_rank=buffers,
        gradients_per_rank=gradients,
        optimizer_per_rank=state,
        peaks={phase: peaks[phase] for phase in _RUNNING if phase in peaks},
    )


def parameter_bytes(entry: ParameterPlan, shape: tuple[int, ...]) -> int:
    """Bytes of a parameter of that shape."""
    return math.prod(shape) * torch.empty((), dtype=entry.dtype, device="meta").element_size()
