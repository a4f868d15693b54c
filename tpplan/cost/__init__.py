"""What a step costs: collectives, memory and time on some hardware, and what to choose."""

from tpplan.cost.advise import Survey, Task, advise
from tpplan.cost.curves import with_companions
from tpplan.cost.dry_run import Setting, dry_run, with_labels
from tpplan.cost.hardware import (
    Efficiency,
    Hardware,
    HardwareSource,
    Link,
    load_hardware,
    shipped_hardware,
)
from tpplan.cost.run import DryRun
from tpplan.cost.timing import Layer, Share, Span, TimeSummary

__all__ = [
    "DryRun",
    "Efficiency",
    "Hardware",
    "HardwareSource",
    "Layer",
    "Link",
    "Setting",
    "Share",
    "Span",
    "Survey",
    "Task",
    "TimeSummary",
    "advise",
    "dry_run",
    "load_hardware",
    "shipped_hardware",
    "with_companions",
    "with_labels",
]
