"""Random models and plans against real ranks: right or refused, never anything else.

python -m benchmarks.random_models --models 2000 --edits 10000 [--jobs 2] [--seed N] [--out F]
"""

from __future__ import annotations

import sys

from benchmarks.random_models.run import main

sys.exit(main())
