"""How long a dry run of a large model takes, and how much memory: each in a process of its own.

Llama-3.1-8B and 405B at tp 8, batch 1, sequence 8192, in bfloat16: one training step with memory
tracked, layers kept and recomputed, as ``tpplan dry-run`` prints it, imports included. ``--check``
exits with 1 where the 405B takes more than 10 seconds or 1.5 GB.
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.common import finish, option_parser, parse, table

CONFIGS = Path(__file__).with_name("configs")
SECONDS, BYTES = 10.0, 1.5e9


def measure(config: str) -> tuple[float, int]:
    """Seconds and the largest resident bytes of one command."""
    before = time.perf_counter()
    command = [sys.executable, "-m", "benchmarks.dry_run", "--run", config]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return time.perf_counter() - before, int(done.stdout.splitlines()[-1])


def run(config: str) -> None:
    """The command itself, and the memory it took."""
    from tpplan.cli import main

    line = f"dry-run llama.yaml --model {CONFIGS / config} --tp 8 --seq 8192"
    if main(line.split()):
        raise SystemExit(1)
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)


def main() -> int:
    """Measure, print, and judge where that was asked for."""
    if sys.argv[1:2] == ["--run"]:
        run(sys.argv[2])
        return 0
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
