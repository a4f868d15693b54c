"""Whether everything is run (``make thorough``), or what fits a suite of a few minutes."""

from __future__ import annotations

import os

THOROUGH = os.environ.get("TPPLAN_TESTS") == "all"
