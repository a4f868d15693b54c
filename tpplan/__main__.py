"""``python -m tpplan``, and the installed command."""

from __future__ import annotations

import gc
import sys

from tpplan.cli import main

_NEW = 100_000
"""Objects that are made before garbage is looked for: torch's import alone makes a million."""


def run() -> int:
    """``main``, as a process that does nothing else and ends with it.

    What is imported stays. To search it for garbage, again and again while it comes and once more
    at the end, took a fifth of all the time that the check of a small model needed.
    """
    gc.set_threshold(_NEW, *gc.get_threshold()[1:])
    code = main()
    gc.freeze()
    return code


if __name__ == "__main__":
    sys.exit(run())
