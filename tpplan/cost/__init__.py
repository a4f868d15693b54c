"""What a step costs: collectives, memory and time on some hardware, and what to choose."""

from tpplan.cost.advise import Advice, Task, advise
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
from tpplan.cost.run import Report
from tpplan.cost.timing import Layer, Share, Span, TimeSummary

__all__ = [
    "Advice",
    "Efficiency",
    "Hardware",
    "HardwareSource",
    "Layer",
    "Link",
    "Report",
    "Setting",
    "Share",
    "Span",
    "Task",
    "TimeSummary",
    "advise",
    "dry_run",
    "load_hardware",
    "shipped_hardware",
    "with_companions",
    "with_labels",
]
