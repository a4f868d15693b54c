"""How long a dry run of a large model takes, and how much memory: each in a process of its own.

Llama-3.1-8B and 405B at tp 8, batch 1, sequence 8192, in bfloat16: one training step with memory
tracked, layers kept and recomputed, as ``tpplan dry-run`` prints it, imports included. DeepSeek-V3
at tp 8 x ep 32 and Qwen3-235B-A22B at tp 8, sequence 2048, with the page (``--html``), for which
seven more settings are executed. ``--check`` exits with 1 where the 405B takes more than 10 seconds
or 1.5 GB, or one of the mixtures more than 20 seconds or 2 GB.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.common import finish, option_parser, parse, table

CONFIGS = Path(__file__).with_name("configs")


@dataclass(frozen=True)
class Case:
    """A command.

    Attributes:
        plan, config, options: what it is told; page: whether it writes the page too.
        seconds, bytes: the bars; None where there are none.
    """

    plan: str
    config: str
    options: str
    page: bool = False
    seconds: float | None = None
    bytes: float | None = None

    def command(self, page: Path) -> list[str]:
        """Its words; ``page``: where that would go."""
        line = f"-m tpplan dry-run {self.plan} --model {CONFIGS / self.config} {self.options}"
        return [sys.executable, *line.split(), *(["--html", str(page)] if self.page else [])]

    def missed(self, name: str, seconds: float, size: int) -> list[str]:
        """The bars that it is above."""
        found = []
        if self.seconds is not None and seconds > self.seconds:
            found.append(f"{name}: {seconds:.1f} s, the bar is {self.seconds:.0f}")
        if self.bytes is not None and size > self.bytes:
            found.append(f"{name}: {size / 1e9:.2f} GB, the bar is {self.bytes / 1e9}")
        return found


CASES = {
    "8B": Case("llama.yaml", "llama-3.1-8b.json", "--tp 8 --seq 8192"),
    "405B": Case("llama.yaml", "llama-3.1-405b.json", "--tp 8 --seq 8192", seconds=10, bytes=1.5e9),
    "DeepSeek-V3, page": Case(
        "deepseek_v3.yaml", "deepseek-v3.json", "--tp 8 --ep 32", page=True, seconds=20, bytes=2e9
    ),
    "Qwen3-235B, page": Case(
        "mixtral.yaml", "qwen3-235b-a22b.json", "--tp 8", page=True, seconds=20, bytes=2e9
    ),
}


def measure(case: Case) -> tuple[float, int]:
    """Seconds and the largest resident bytes of one command."""
    with tempfile.TemporaryDirectory() as folder:
        command = case.command(Path(folder, "page.html"))
        before = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as running:
            _, status, used = os.wait4(running.pid, 0)
            running.returncode = os.waitstatus_to_exitcode(status)
    if running.returncode:
        raise SystemExit(running.returncode)
    return time.perf_counter() - before, used.ru_maxrss * 1024


def main() -> int:
    """Measure, print, and judge where that was asked for."""
    options = parse(option_parser(__doc__))
    found = {name: min(measure(case) for _ in range(2)) for name, case in CASES.items()}
    rows = [(name, f"{s:.1f}", f"{b / 1e9:.2f}") for name, (s, b) in found.items()]
    print(table(("dry run", "seconds", "GB resident"), rows))
    missed = [said for name, case in CASES.items() for said in case.missed(name, *found[name])]
    return finish(options, found, missed)


if __name__ == "__main__":
    sys.exit(main())
