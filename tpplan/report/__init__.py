"""What a plan does, found by executing it abstractly, and how it is shown."""

from tpplan.report.advise import Advice, Task, advise
from tpplan.report.curves import with_companions
from tpplan.report.dry_run import Setting, dry_run, with_labels
from tpplan.report.execute import Training
from tpplan.report.explain import explain
from tpplan.report.hardware import (
    Efficiency,
    Hardware,
    HardwareSource,
    Link,
    load_hardware,
    shipped_hardware,
)
from tpplan.report.recorder import Recorder
from tpplan.report.report import Report
from tpplan.report.steps import Collective
from tpplan.report.timing import Layer, Share, Span, TimeSummary

__all__ = [
    "Advice",
    "Collective",
    "Efficiency",
    "Hardware",
    "HardwareSource",
    "Layer",
    "Link",
    "Recorder",
    "Report",
    "Setting",
    "Share",
    "Span",
    "Task",
    "TimeSummary",
    "Training",
    "advise",
    "dry_run",
    "explain",
    "load_hardware",
    "shipped_hardware",
    "with_companions",
    "with_labels",
]
