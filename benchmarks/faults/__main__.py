"""Each fault is planted in fresh ranks and must be caught by a check.

python -m benchmarks.faults [--only TEXT] [--jobs N]
"""

from __future__ import annotations

import sys

from benchmarks.faults.run import main

sys.exit(main())
