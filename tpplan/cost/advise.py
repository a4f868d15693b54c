"""What to choose: tensor, sequence, data and pipeline parallelism for a model on some GPUs.

Each size of the tensor-parallel group is executed abstractly, as in a dry run, with and without
sequence parallelism; what is left of the GPUs goes to data and pipeline parallelism by formulas.
Data parallelism is FSDP's: parameters, gradients and optimizer state are shared out (Rajbhandari
et al. 2020, "ZeRO"; Zhao et al. 2023, "PyTorch FSDP"). Pipelines are 1F1B schedules without
interleaving: of p stages and m microbatches, (p-1)/m of the time is idle, and the first stage
holds the activations of p microbatches (Narayanan et al. 2021, "Efficient large-scale language
model training on GPU clusters using Megatron-LM", section 2.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from torch import nn

from tpplan.cost.costs import collective_seconds, send_seconds
from tpplan.cost.dry_run import Setting, dry_run
from tpplan.cost.hardware import Hardware
from tpplan.cost.memory import Memory, parameter_bytes
from tpplan.cost.run import DryRun
from tpplan.cost.timing import TimeSummary, summarize
from tpplan.language import PlanError
from tpplan.layout import Rows
from tpplan.simulate.execute import Training
from tpplan.simulate.steps import data_bytes

SIZES = (1, 2, 4, 8, 16, 32, 64)
USABLE = 0.9
"""The share of a GPU's memory that a plan may fill; the rest is the driver's, NCCL's and lost."""


@dataclass(frozen=True)
class Task:
    """What is to be trained on what.

    Attributes:
        gpus: how many there are; batch: sequences in a step, of all ranks.
        micro_batch: sequences that a rank computes at once; seq: tokens of a sequence.
    """

    gpus: int
    batch: int
    seq: int
    micro_batch: int = 1


@dataclass(frozen=True)
class Choice:
    """One way to use the GPUs: ``tp`` x ``pp`` x ``dp`` of them.

    Attributes:
        checkpointing: whether layers are recomputed in backward.
        bytes: the most that a GPU holds; fits: whether that is within its usable memory.
        seconds: of a step; communication: of it, exposed; idle: of it, the pipeline's bubble.
        tokens: per second and GPU.
    """

    tp: int
    sequence_parallel: bool
    checkpointing: bool
    pp: int
    dp: int
    bytes: int
    fits: bool
    seconds: float
    communication: float
    idle: float
    tokens: float


@dataclass(frozen=True)
class Size:
    """One size of the tensor-parallel group.

    Attributes:
        best: its fastest choice that fits, else the one that needs the least; None where the
            plan cannot be cut so often, or the GPUs not be shared out.
        notes: what it costs, or why it does not go.
    """

    tp: int
    best: Choice | None
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Survey:
    """What was found for each size, and the choice that is fastest of those that fit.

    All times are modelled.
    """

    model: str
    plan: str
    hardware: Hardware
    task: Task
    sizes: tuple[Size, ...]
    choices: tuple[Choice, ...]

    @property
    def best(self) -> Choice | None:
        """The fastest choice that fits; None where none does."""
        return _fastest(c for c in self.choices if c.fits)


def advise(
    model: nn.Module,
    setting: Setting,
    task: Task,
    training: Training,
    hardware: Hardware,
    told: Callable[[str], None] = lambda _: None,
) -> Survey:
    """Every way to train ``model`` on the task's GPUs, and which of them to choose.

    Args:
        setting: its ``tp`` and ``sequence_parallel`` do not count.
        told: is told what is being executed.
    """
    choices: list[Choice] = []
    sizes: list[Size] = []
    for tp in (n for n in SIZES if n <= task.gpus):
        found: list[Choice] = []
        notes: list[str] = []
        modes = (False, True) if tp > 1 and setting.plan.sequence_parallel else (False,)
        for mode in modes:
            told(f"tp {tp}, {'TP+SP' if mode else 'TP'}")
            chosen, batch = replace(setting, tp=tp, sequence_parallel=mode), task.micro_batch
            try:
                report = dry_run(model, chosen, batch, task.seq, training, hardware=hardware)
            except PlanError as error:
                notes.append(error.diagnostics[0].message)
                break
            found += _shared_out(report, task, hardware)
            notes = _costs(report, hardware)
        choices += found
        if not found and not notes:
            notes.append(f"{task.gpus} GPUs and {task.batch} sequences cannot be shared out")
        fastest = _fastest(c for c in found if c.fits)
        best = fastest or min(found, key=lambda c: c.bytes, default=None)
        sizes.append(Size(tp, best, tuple(notes)))
    name, plan = type(model).__name__, setting.plan.name
    return Survey(name, plan, hardware, task, tuple(sizes), tuple(choices))


def _costs(report: DryRun, hardware: Hardware) -> list[str]:
    """What is particular about a size."""
    tp, notes = report.compiled.tp, []
    if tp > hardware.node:
        share = report.time.total.communication / report.time.total.seconds
        crossed = f"crosses the node of {hardware.node}: its collectives go over the network"
        notes.append(f"{crossed}, {100 * share:.0f} % of the time")
    entries = report.compiled.parameters.values()
    copies = [e for e in entries if isinstance(e.placement, Rows) and e.placement.shared()]
    if copies:
        each = sum(parameter_bytes(e, e.local_shape) for e in copies)
        even = sum(parameter_bytes(e, e.shape) for e in copies) / tp
        more = f"{(each - even) / 2**20:.0f} MiB of their weights are held more than once"
        notes.append(f"more ranks than KV heads: {more}")
    return notes


def _fastest(choices: Iterable[Choice]) -> Choice | None:
    # of equally fast ones the simplest
    return min(
        choices, key=lambda c: (round(c.seconds, 6), c.pp, c.tp, c.checkpointing), default=None
    )


def _shared_out(report: DryRun, task: Task, hardware: Hardware) -> Iterable[Choice]:
    """The choices of one size and mode: pipelines and data parallelism share what is left."""
    stage = _Stages(report)
    run = report.training.checkpointing
    runs: list[tuple[bool, Memory, TimeSummary]] = [(run, report.memory, report.time)]
    if report.other is not None and report.other_memory is not None:
        runs.append((not run, report.other_memory, summarize(report.other.steps, hardware)))
    left = task.gpus // report.compiled.tp
    for pp in (n for n in SIZES if n <= min(left, stage.elements)):
        dp = left // pp
        micros = task.batch // (dp * task.micro_batch)
        shared = report.compiled.tp * pp * dp == task.gpus
        if not shared or micros * dp * task.micro_batch != task.batch or not micros:
            continue
        for checkpointing, memory, time in runs:
            seconds, communication, idle = stage.time(time, pp, dp, micros, hardware)
            held = stage.memory(memory, pp, dp, micros)
            yield Choice(
                tp=report.compiled.tp,
                sequence_parallel=report.compiled.sequence_parallel,
                checkpointing=checkpointing,
                pp=pp,
                dp=dp,
                bytes=held,
                fits=held <= USABLE * hardware.memory,
                seconds=seconds,
                communication=communication,
                idle=idle,
                tokens=task.batch * task.seq / (seconds * task.gpus),
            )


class _Stages:
    """What a pipeline's stages have of a model, and what FSDP sends of it."""

    def __init__(self, report: DryRun) -> None:
        self.report = report
        layers = {p: 0 for p, plan in report.compiled.modules.items() if plan.element is not None}
        ends = {True: 0, False: 0}
        for name, entry in report.compiled.parameters.items():
            size = parameter_bytes(entry, entry.local_shape)
            path = next((p for p in layers if name.startswith(f"{p}.")), None)
            if path is not None:
                layers[path] += size
            else:
                ends[not any(layers.values())] += size
        self.layers = sum(layers.values())
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

    def parameters(self, pp: int) -> float:
        """Bytes of the parameters of the largest stage."""
        if pp == 1:
            return self.layers + self.before + self.after
        most = -(-self.elements // pp) / self.elements
        return self.layers * most + max(self.before, self.after)

    def memory(self, memory: Memory, pp: int, dp: int, micros: int) -> int:
        """The most that a rank holds."""
        parameters = self.parameters(pp)
        states = parameters * self.per_byte
        peaks = [p.activations for phase, p in memory.peaks.items() if phase != "optimizer"]
        working = max(peaks, default=0) * min(pp, micros) / pp
        stepping = memory.peaks["optimizer"].activations if "optimizer" in memory.peaks else 0
        stepping_of_stage = stepping * parameters / max(self.parameters(1), 1) / dp
        if dp > 1 and pp == 1:
            # two layers and what is outside them are whole at a time, with one layer's gradients
            working += (2 + self.gradients) * self.largest + self.before + self.after
            states /= dp
        elif dp > 1:
            # over many microbatches parameters and gradients stay whole
            kept = parameters * (1 + self.gradients)
            states = kept + (states - kept) / dp
        return int(states + memory.buffers_per_rank + max(working, stepping_of_stage))

    def time(
        self, time: TimeSummary, pp: int, dp: int, micros: int, hardware: Hardware
    ) -> tuple[float, float, float]:
        """Seconds of a step, those of exposed communication, and idle ones."""
        phases = time.phases
        stepping = phases["optimizer"].seconds if "optimizer" in phases else 0.0
        micro = (time.total.seconds - stepping) / pp
        sent = sum(phases[p].communication for p in phases if p != "optimizer") / pp
        apart = self.report.compiled.tp >= hardware.node
        between = hardware.network if apart else hardware.link
        passed = 2 * send_seconds(self._stream() / pp, between) if pp > 1 else 0.0
        idle = (pp - 1) * (micro + passed)
        data = self._data_parallel(time, pp, dp, micros, hardware)
        total = micros * (micro + passed) + idle + data + stepping / (pp * dp)
        return total, micros * (sent + passed) + data, idle

    def _data_parallel(
        self, time: TimeSummary, pp: int, dp: int, micros: int, hardware: Hardware
    ) -> float:
        """Seconds of FSDP's collectives that computation does not hide."""
        if dp == 1:
            return 0.0
        size = int(self.parameters(pp))
        # the ranks of a data-parallel group are a tensor-parallel group apart
        spread = replace(hardware, node=max(1, hardware.node // self.report.compiled.tp))
        gather = collective_seconds("all_gather", size, dp, spread)
        scatter = collective_seconds("reduce_scatter", int(size * self.gradients), dp, spread)
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
