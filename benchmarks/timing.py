"""Device time and wall time of variants that take turns, and what they were measured on."""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import importlib.metadata
import math
import platform
import statistics
import time
from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field

import torch

Work = Callable[[int], object]
"""A call on the input set of that number; the results of a turn are kept until it is over."""

TRAFFIC = 4 << 30  # bytes of a turn: next to them, its start and end are nothing


@dataclass
class Times:
    """Microseconds of one call, by round."""

    kernel_us: list[float] = field(default_factory=list)
    wall_us: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        """Of the device time and of the wall time."""
        return {
            "kernel_us": statistics.median(self.kernel_us),
            "wall_us": statistics.median(self.wall_us),
        }


def device() -> torch.device:
    """The GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def environment() -> dict[str, str]:
    """The machine and the versions that figures belong to."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, no GPU"
    found = {"machine": f"{name} ({platform.machine()})", "python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "liger-kernel", "quack-kernels"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "none"
    return found


def header(found: Mapping[str, str]) -> str:
    """The environment as the line above a table."""
    return ", ".join(f"{name} {value}" for name, value in found.items())


def on_one_stream() -> None:
    """Make a side stream the current one, for graphs capture no other.

    Autograd runs the backward of an op on the stream of its forward, so both have to be on it.
    """
    if torch.cuda.is_available():
        torch.cuda.set_stream(torch.cuda.Stream())


def turn_of(moved: int) -> tuple[int, int]:
    """For a call that moves so many bytes: how many input sets there are, and calls in a turn.

    The sets together are several times the L2 cache, so no call finds its inputs there.
    """
    if not torch.cuda.is_available():
        return 1, 1
    cache: int = torch.cuda.get_device_properties(device()).L2_cache_size
    calls = min(max(TRAFFIC // moved, 4), 64)
    return min(calls, 1 + math.ceil(4 * cache / moved)), calls


class Turn:
    """Calls of one variant, captured in a graph where there is a GPU.

    A variant that synchronizes cannot be captured: its device time includes what the host adds.
    """

    def __init__(self, work: Work, sets: int, calls: int, captured: bool) -> None:
        self.work, self.sets, self.calls = work, sets, calls
        self.times = Times()
        self.graph: torch.cuda.CUDAGraph | None = None
        if not torch.cuda.is_available():
            return
        for number in range(max(sets, 3)):  # compilers and caches
            work(number % sets)
        torch.cuda.synchronize()
        if captured:
            self.graph = torch.cuda.CUDAGraph()
            # the results live side by side in the graph's memory: none is written over in the cache
            with torch.cuda.graph(self.graph, stream=torch.cuda.current_stream()):
                self.run()

    def run(self) -> None:
        """All calls, one by one."""
        results = [self.work(call % self.sets) for call in range(self.calls)]
        del results

    def kernels(self) -> None:
        """Add the device time of a call."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        if self.graph is None:
            self.run()
        else:
            self.graph.replay()
        end.record()
        torch.cuda.synchronize()
        self.times.kernel_us.append(start.elapsed_time(end) * 1e3 / self.calls)

    def wall(self) -> None:
        """Add the time of a call until the device is done, the host's included."""
        synchronize()
        start = time.perf_counter()
        for call in range(self.calls):
            self.work(call % self.sets)
        synchronize()
        self.times.wall_us.append((time.perf_counter() - start) * 1e6 / self.calls)


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def prepare(
    works: Mapping[str, Work],
    sets: int,
    calls: int,
    synchronizing: Container[str],
    optional: Container[str],
) -> tuple[dict[str, Turn], dict[str, str]]:
    """The turns of the works; why those of the optional ones that fail are left out."""
    turns, left_out = {}, {}
    for name, work in works.items():
        try:
            turns[name] = Turn(work, sets, calls, name not in synchronizing)
        except Exception as error:
            if name not in optional:
                raise
            left_out[name] = f"{type(error).__name__}: {str(error).strip().splitlines()[:1]}"
    return turns, left_out


def measure(turns: Mapping[str, Turn], rounds: int) -> dict[str, Times]:
    """The times of all variants, which take turns: each round begins with another."""
    names = list(turns)
    for number in range(rounds):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            turns[name].wall()
            if torch.cuda.is_available():
                turns[name].kernels()
            else:  # where the device is the host, the two are one
                turns[name].times.kernel_us = turns[name].times.wall_us
    return {name: turn.times for name, turn in turns.items()}
