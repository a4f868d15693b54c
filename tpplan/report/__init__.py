"""What a plan does, found by executing it abstractly, and how it is shown."""

from tpplan.report.execute import dry_run
from tpplan.report.explain import explain
from tpplan.report.recorder import Collective, Recorder
from tpplan.report.report import Report

__all__ = ["Collective", "Recorder", "Report", "dry_run", "explain"]
