"""What was found, as text, as a page and as plain data."""

from tpplan.render.explain import explain
from tpplan.render.fusion import FusionReport
from tpplan.render.report import Advice, Report

__all__ = ["Advice", "FusionReport", "Report", "explain"]
