"""A model in pipeline stages, with data parallelism over them: memory and time, by formulas.

Data parallelism is FSDP's: parameters, gradients and optimizer state are shared out (Rajbhandari
et al. 2020, "ZeRO"; Zhao et al. 2023, "PyTorch FSDP"). Pipelines are 1F1B schedules without
interleaving: of p stages and m microbatches, (p-1)/m of the time is idle, and the first stage
holds the activations of p microbatches (Narayanan et al. 2021, "Efficient large-scale language
model training on GPU clusters using Megatron-LM", section 2.2). Experts that ranks of ep share are
the same on dp / ep of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from tpplan.cost.costs import collective_seconds, send_seconds
from tpplan.cost.hardware import Hardware
from tpplan.cost.memory import Memory, parameter_bytes
from tpplan.cost.run import DryRun
from tpplan.cost.timing import TimeSummary
from tpplan.simulate.steps import data_bytes


@dataclass(frozen=True)
class Parameters:
    """Bytes of parameters: ``alike`` on all ranks of ep, and those that they have ``apart``."""

    alike: float
    apart: float

    @property
    def whole(self) -> float:
        """All of them, on a rank."""
        return self.alike + self.apart

    def over(self, dp: int, ep: int) -> float:
        """What a rank keeps of them where ``dp`` ranks, those of ep among them, share them out."""
        return self.alike / dp + self.apart / (dp // ep)


class Stages:
    """What a pipeline's stages have of a model, and what FSDP sends of it."""

    def __init__(self, report: DryRun) -> None:
        self.report, self.ep = report, report.compiled.ep
        layers = {p: 0 for p, plan in report.compiled.modules.items() if plan.element is not None}
        ends = {True: 0, False: 0}
        apart = 0
        for name, entry in report.compiled.parameters.items():
            size = parameter_bytes(entry, entry.local_shape)
            apart += size if entry.over_ep is not None else 0
            path = next((p for p in layers if name.startswith(f"{p}.")), None)
            if path is not None:
                layers[path] += size
            else:
                ends[not any(layers.values())] += size
        self.layers, self.apart = sum(layers.values()), apart
        self.largest = max(layers.values(), default=0)
        stacks = {path.rpartition(".")[0] for path in layers}
        # a pipeline cuts one stack
        self.elements = len(layers) if len(stacks) == 1 else 1
        self.before, self.after = ends[True], ends[False]
        whole = self.layers + self.before + self.after
        # gradients and optimizer state go with the parameters
        self.states = report.memory.states_per_rank - report.memory.buffers_per_rank
        self.per_byte = self.states / whole if whole else 0.0
        self.gradients = report.memory.gradients_per_rank / whole if whole else 0.0

    def parameters(self, pp: int) -> Parameters:
        """Those of the largest stage."""
        most, ends = 1.0, self.before + self.after
        if pp > 1:
            most = -(-self.elements // pp) / self.elements
            ends = max(self.before, self.after)
        return Parameters((self.layers - self.apart) * most + ends, self.apart * most)

    def memory(self, memory: Memory, pp: int, dp: int, micros: int) -> int:
        """The most that a rank holds."""
        parameters = self.parameters(pp)
        states = parameters.whole * self.per_byte
        peaks = [p.activations for phase, p in memory.peaks.items() if phase != "optimizer"]
        working = max(peaks, default=0) * min(pp, micros) / pp
        stepping = memory.peaks["optimizer"].activations if "optimizer" in memory.peaks else 0
        own = parameters.over(dp, self.ep)
        stepping_of_stage = stepping * own / max(self.parameters(1).whole, 1)
        if dp > 1 and pp == 1:
            # two layers and what is outside them are whole at a time, with one layer's gradients
            working += (2 + self.gradients) * self.largest + self.before + self.after
            states = own * self.per_byte
        elif dp > 1:
            # over many microbatches parameters and gradients stay whole
            kept = 1 + self.gradients
            states = parameters.whole * kept + own * (self.per_byte - kept)
        return int(states + memory.buffers_per_rank + max(working, stepping_of_stage))

    def time(
        self, time: TimeSummary, pp: int, dp: int, micros: int, hardware: Hardware
    ) -> tuple[float, float, float]:
        """Seconds of a step, those of exposed communication, and idle ones."""
        phases = time.phases
        stepping = phases["optimizer"].seconds if "optimizer" in phases else 0.0
        micro = (time.total.seconds - stepping) / pp
        sent = sum(phases[p].exposed for p in phases if p != "optimizer") / pp
        apart = self.report.compiled.tp >= hardware.node
        between = hardware.network if apart else hardware.link
        passed = 2 * send_seconds(self._stream() / pp, between) if pp > 1 else 0.0
        idle = (pp - 1) * (micro + passed)
        data = self._data_parallel(time, pp, dp, micros, hardware)
        parameters = self.parameters(pp)
        stepping *= parameters.over(dp, self.ep) / max(parameters.whole, 1) / pp
        total = micros * (micro + passed) + idle + data + stepping
        return total, micros * (sent + passed) + data, idle

    def _data_parallel(
        self, time: TimeSummary, pp: int, dp: int, micros: int, hardware: Hardware
    ) -> float:
        """Seconds of FSDP's collectives that computation does not hide."""
        if dp == 1:
            return 0.0
        parameters, gather, scatter = self.parameters(pp), 0.0, 0.0
        for size, share in ((parameters.alike, 1), (parameters.apart, self.ep)):
            # the ranks of such a group are a tensor-parallel group apart, or all of ep's
            node = max(1, hardware.node // (self.report.compiled.tp * share))
            spread, ranks = replace(hardware, node=node), dp // share
            gather += collective_seconds("all_gather", int(size), ranks, spread)
            sent = int(size * self.gradients)
            scatter += collective_seconds("reduce_scatter", sent, ranks, spread)
        hidden = {p: share.compute / pp for p, share in time.phases.items()}
        forward, backward = hidden.get("forward", 0.0), hidden.get("backward", 0.0)
        if pp == 1:
            exposed = max(0.0, gather - forward) + max(0.0, gather + scatter - backward)
            return micros * exposed
        return max(0.0, gather - forward) + max(0.0, scatter - backward)

    def _stream(self) -> float:
        """Bytes of the stream between two stages that a rank sends: its part of it under SP."""
        compiled = self.report.compiled
        shapes = [
            data_bytes(c.shape, c.dtype)
            for c in self.report.collectives
            if c.phase == "forward" and compiled.modules.get(c.module) is not None
        ]
        whole = max(set(shapes), key=shapes.count, default=0)
        return whole / (compiled.tp if compiled.sequence_parallel else 1)
