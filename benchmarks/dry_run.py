"""How long a dry run of a large model takes, and how much memory: each in a process of its own.

Llama-3.1-8B and 405B at tp 8, batch 1, sequence 8192, in bfloat16: one training step with memory
tracked, layers kept and recomputed, as ``tpplan dry-run`` prints it, imports included. ``--check``
exits with 1 where the 405B takes more than 10 seconds or 1.5 GB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import finish, option_parser, parse, table

CONFIGS = Path(__file__).with_name("configs")
SECONDS, BYTES = 10.0, 1.5e9


def measure(config: str) -> tuple[float, int]:
    """Seconds and the largest resident bytes of one command."""
    line = f"-m tpplan dry-run llama.yaml --model {CONFIGS / config} --tp 8 --seq 8192"
    before = time.perf_counter()
    command = [sys.executable, *line.split()]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
        _, status, used = os.wait4(running.pid, 0)
        running.returncode = os.waitstatus_to_exitcode(status)
    if running.returncode:
        raise SystemExit(running.returncode)
    return time.perf_counter() - before, used.ru_maxrss * 1024


def main() -> int:
    """Measure, print, and judge where that was asked for."""
    options = parse(option_parser(__doc__))
    found = {}
    for config in ("llama-3.1-8b.json", "llama-3.1-405b.json"):
        found[config] = min(measure(config) for _ in range(2))
    rows = [(name, f"{s:.1f}", f"{b / 1e9:.2f}") for name, (s, b) in found.items()]
    print(table(("dry run", "seconds", "GB resident"), rows))
    seconds, size = found["llama-3.1-405b.json"]
    missed = [f"405B: {seconds:.1f} s, the bar is {SECONDS:.0f}"] * (seconds > SECONDS)
    missed += [f"405B: {size / 1e9:.2f} GB, the bar is {BYTES / 1e9}"] * (size > BYTES)
    return finish(options, found, missed)


if __name__ == "__main__":
    sys.exit(main())
