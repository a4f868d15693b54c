"""What to choose: tensor, sequence, data and pipeline parallelism for a model on some GPUs.

Each size of the tensor-parallel group is executed abstractly, as in a dry run, with and without
sequence parallelism; of a mixture also with each way to share its experts, and with ranks of ep
that share them: as many as a node has room for, and as many as can be. Where a rank has no room
for what is gathered, it is also run keeping its rows only (``save: shard``). What is left of the
GPUs goes to data and pipeline parallelism by formulas (tpplan/cost/stages.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from torch import nn

from tpplan.cost.dry_run import Setting, dry_run
from tpplan.cost.hardware import Hardware
from tpplan.cost.memory import Memory, parameter_bytes
from tpplan.cost.run import DryRun
from tpplan.cost.stages import Stages
from tpplan.cost.timing import TimeSummary, summarize
from tpplan.language import PlanError
from tpplan.language.styles import GATHERED, SHARD
from tpplan.observe.caches import only_new_searched
from tpplan.planner.experts import experts_in, ways
from tpplan.simulate.execute import Training

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
        save: what layers keep of gathered inputs.
        ep: how many of dp's ranks share experts; shard: how those of tp do, "" for one rank
            and for models without experts.
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
    ep: int = 1
    shard: str = ""
    save: str = GATHERED


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


@only_new_searched()
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
        refused: list[str] = []
        chosen = replace(setting, tp=tp)
        try:
            for word, report in _executed(model, chosen, task, training, hardware, told, refused):
                found += _shared_out(report, word, task, hardware)
                notes = _costs(report, hardware)
            notes += refused
        except PlanError as error:
            notes.append(error.diagnostics[0].message)
        choices += found
        if not found and not notes:
            notes.append(f"{task.gpus} GPUs and {task.batch} sequences cannot be shared out")
        fastest = _fastest(c for c in found if c.fits)
        best = fastest or min(found, key=lambda c: c.bytes, default=None)
        sizes.append(Size(tp, best, (*notes, *_compared(found))))
    name, plan = type(model).__name__, setting.plan.name
    return Survey(name, plan, hardware, task, tuple(sizes), tuple(choices))


def _executed(
    model: nn.Module,
    setting: Setting,
    task: Task,
    training: Training,
    hardware: Hardware,
    told: Callable[[str], None],
    refusals: list[str],
) -> Iterator[tuple[str, DryRun]]:
    """What is executed for one size: how the ranks of tp share experts, and the run.

    Args:
        refusals: gets what is said of ways to share experts that do not go where others do.

    Raises:
        PlanError: where the plan cannot be cut so often.
    """
    tp, plan = setting.tp, setting.plan
    plans = (ways(plan) if tp > 1 else {}) or {"": plan}
    modes = (False, True) if tp > 1 and plan.sequence_parallel else (False,)
    refused: dict[str, PlanError] = {}

    def run(word: str, mode: bool, ep: int = 1, save: str | None = None) -> DryRun:
        shared = f", experts {word}" * bool(word) + f", ep {ep}" * (ep > 1)
        told(f"tp {tp}, {'TP+SP' if mode else 'TP'}{shared}" + (", rows kept" if save else ""))
        kept = plans[word].keeping(save)
        chosen = replace(setting, plan=kept, sequence_parallel=mode, ep=ep)
        return dry_run(model, chosen, task.micro_batch, task.seq, training, hardware=hardware)

    for word in list(plans):
        try:
            reports = [run(word, mode) for mode in modes]
            if modes[-1] and plan.save != SHARD and _is_tight(reports[-1], task, hardware):
                reports.insert(0, run(word, modes[-1], save=SHARD))
        except PlanError as error:
            refused[f"experts {word}"] = error
            del plans[word]
            continue
        yield from ((word, report) for report in reports)
    if not plans:
        raise next(iter(refused.values()))
    word = next(iter(plans))
    for ep in _sizes_of_ep(experts_in(reports[-1].compiled), tp, task, hardware):
        try:
            yield word, run(word, modes[-1], ep)
        except PlanError as error:
            refused[f"ep {ep}"] = error
    refusals += (f"{way}: {error.diagnostics[0].message}" for way, error in refused.items())


def _is_tight(report: DryRun, task: Task, hardware: Hardware) -> bool:
    """Whether some way to use the GPUs has no room for all that its layers keep."""
    found = _shared_out(report, "", task, hardware)
    return any(not c.fits and not c.checkpointing for c in found)


def _sizes_of_ep(experts: int, tp: int, task: Task, hardware: Hardware) -> list[int]:
    """As many ranks as share experts within a node, and as many as can share them at all."""
    possible = [n for n in SIZES[1:] if experts and not experts % n and not task.gpus % (tp * n)]
    near = [n for n in possible if tp * n <= hardware.node]
    return list(dict.fromkeys([*near[-1:], *possible[-1:]]))


def _compared(found: Iterable[Choice]) -> list[str]:
    """How fast the ways are in which the ranks may share experts, where there are several."""
    by_way: dict[tuple[int, str], list[Choice]] = {}
    for choice in found:
        by_way.setdefault((choice.ep, choice.shard), []).append(choice)
    if len(by_way) < 2:
        return []
    best = {way: _fastest(c for c in some if c.fits) for way, some in by_way.items()}
    told = (
        f"{f'ep {ep}' if ep > 1 else shard or 'whole'} "
        + ("does not fit" if choice is None else f"{1e3 * choice.seconds:.3g} ms")
        for (ep, shard), choice in best.items()
    )
    return [f"experts: {', '.join(told)}"]


def _costs(report: DryRun, hardware: Hardware) -> list[str]:
    """What is particular about a size."""
    tp, notes = report.compiled.tp, []
    if tp > hardware.node:
        share = report.time.total.exposed / report.time.total.seconds
        crossed = f"crosses the node of {hardware.node}: its collectives go over the network"
        notes.append(f"{crossed}, {100 * share:.0f} % of the time is waiting")
    entries = report.compiled.parameters.values()
    copies = [e for e in entries if e.shares_rows]
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


def _shared_out(report: DryRun, shard: str, task: Task, hardware: Hardware) -> Iterable[Choice]:
    """The choices of one size and mode: pipelines and data parallelism share what is left."""
    stage, ep = Stages(report), report.compiled.ep
    run = report.training.checkpointing
    runs: list[tuple[bool, Memory, TimeSummary]] = [(run, report.memory, report.time)]
    if report.other is not None and report.other_memory is not None:
        runs.append((not run, report.other_memory, summarize(report.other.steps, hardware)))
    left = task.gpus // report.compiled.tp
    for pp in (n for n in SIZES if n <= min(left, stage.elements)):
        dp = left // pp
        micros = task.batch // (dp * task.micro_batch)
        shared = report.compiled.tp * pp * dp == task.gpus and dp % ep == 0
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
                ep=ep,
                shard=shard,
                save=report.compiled.plan.save,
            )
