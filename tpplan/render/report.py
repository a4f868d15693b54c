"""What users hold of a dry run and of advice: the data, and the ways to show it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from tpplan.compiled import ParameterPlan
from tpplan.cost.advise import Survey
from tpplan.cost.run import DryRun
from tpplan.cost.timing import flops_by_module, summarize
from tpplan.layout import Rows
from tpplan.render import advice_text, text
from tpplan.render.console import plain
from tpplan.render.html import render_html
from tpplan.simulate.steps import PHASES

JSON_VERSION = 1


@dataclass(frozen=True)
class Report(DryRun):
    """A dry run. ``print(report)`` shows it, ``to_dict()`` is its stable, versioned form."""

    @classmethod
    def of(cls, found: DryRun) -> Report:
        """What was found, to be shown; its companions as well."""
        values = {field.name: getattr(found, field.name) for field in fields(found)}
        return cls(**{**values, "companions": tuple(map(cls.of, found.companions))})

    def to_dict(self) -> dict[str, Any]:
        """Plain data, the ``--json`` of the command line; its shape is fixed by ``version``."""
        compiled = self.compiled
        return {
            "version": JSON_VERSION,
            "model": self.model,
            "plan": compiled.plan.name,
            "tp": compiled.tp,
            "ep": compiled.ep,
            "sequence_parallel": compiled.sequence_parallel,
            "batch": self.batch,
            "seq": self.seq,
            "counts": {phase: self.counts(phase) for phase in PHASES},
            "bytes": {phase: self.bytes_sent(phase) for phase in PHASES},
            "worst_bytes": {phase: self.worst_bytes_sent(phase) for phase in PHASES},
            "collectives": [c.to_dict() for c in self.collectives],
            "parameters": [_parameter(e) for e in compiled.parameters.values()],
            "parameter_counts": dict(self.parameter_counts),
            "executed": {stack: list(run) for stack, run in self.executed.items()},
            "checkpointing": self.training.checkpointing,
            "memory": self.memory.to_dict(),
            "time": self.time.to_dict(),
            "alternative": self._alternative(),
            "flops": dict(flops_by_module(self.steps)),
            "hardware": self.hardware.to_dict(),
        }

    def _alternative(self) -> dict[str, Any] | None:
        """The run with checkpointing where this one is without, or without."""
        if self.other is None or self.other_memory is None:
            return None
        return {
            "checkpointing": not self.training.checkpointing,
            "memory": self.other_memory.to_dict(),
            "time": summarize(self.other.steps, self.hardware).to_dict(),
        }

    def to_html(self, command: str | None = None) -> str:
        """One self-contained page; ``command``: the command line that made the report."""
        return render_html(self, command=command)

    def __str__(self) -> str:
        return plain(text.layout(self))


@dataclass(frozen=True)
class Advice(Survey):
    """How to share out GPUs. ``print(advice)`` shows it."""

    @classmethod
    def of(cls, found: Survey) -> Advice:
        """What was found, to be shown."""
        return cls(**{field.name: getattr(found, field.name) for field in fields(found)})

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        return {
            "version": 1,
            "modelled": True,
            "model": self.model,
            "plan": self.plan,
            "hardware": self.hardware.name,
            "task": asdict(self.task),
            "best": None if self.best is None else asdict(self.best),
            "sizes": [asdict(size) for size in self.sizes],
            "choices": [asdict(choice) for choice in self.choices],
        }

    def __str__(self) -> str:
        return plain(advice_text.layout(self))


def _parameter(entry: ParameterPlan) -> dict[str, Any]:
    return {
        "name": entry.name,
        "shape": list(entry.shape),
        "dtype": str(entry.dtype).removeprefix("torch."),
        "placement": str(rows) if isinstance(rows := entry.placement, Rows) else repr(rows),
        "placement_over_ep": None if entry.over_ep is None else repr(entry.over_ep),
        "local_shape": list(entry.local_shape),
        "gradient_summed": entry.summed,
        "aliases": list(entry.aliases),
        "rule": None if entry.rule is None else entry.rule.pattern.text,
    }
