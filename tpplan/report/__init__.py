"""What a plan does, found by executing it abstractly, and how it is shown."""

from tpplan.report.dry_run import Setting, dry_run, with_labels
from tpplan.report.execute import Training
from tpplan.report.explain import explain
from tpplan.report.recorder import Recorder
from tpplan.report.report import Report
from tpplan.report.steps import Collective

__all__ = [
    "Collective",
    "Recorder",
    "Report",
    "Setting",
    "Training",
    "dry_run",
    "explain",
    "with_labels",
]
