"""Host time of a fused kernel's op, forward and backward, on a GPU that is not there.

Each op is called as models call it, around the dispatcher where nobody looks, and through the
dispatcher as any ``torch.library.custom_op``, without its launches; these are measured by
themselves, as tpplan starts a kernel and by Triton's own way to it. No kernel runs.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common import finish, option_parser, parse, table
from benchmarks.stub_driver import stub_driver
from tpplan.kernels import launch
from tpplan.kernels.operator import Operator

BARS = {"ops": 1.5, "launches": 1.25}
"""The least that a custom op, and launches by Triton's own way, cost more."""
ROWS, WIDTH = 4, 64


def calls() -> dict[str, tuple[str, Callable[[], Tensor]]]:
    """By name: the module of the kernel, and a forward on tensors that need gradients."""
    x, y = (torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(2))
    w, b = (torch.randn(WIDTH, requires_grad=True) for _ in range(2))
    kernels = {name: import_module(f"tpplan.kernels.{name}") for name in ("norm", "gelu", "gated")}
    norm, gelu, gated = (kernels[name] for name in ("norm", "gelu", "gated"))
    return {
        "LayerNorm": ("norm", lambda: norm.norm(x, w, b, eps=1e-5, centred=True)),
        "RMSNorm": ("norm", lambda: norm.norm(x, w, eps=1e-6, centred=False)),
        "bias + GeLU": ("gelu", lambda: gelu.gelu(x, b, tanh=True)),
        "SwiGLU": ("gated", lambda: gated.gated(x, y, kind="silu")),
    }


@contextlib.contextmanager
def nothing_launched(kernel: str) -> Iterator[None]:
    """Ops of a module of ``tpplan.kernels`` prepare their launches, and leave them."""
    module = import_module(f"tpplan.kernels.{kernel}")
    nothing = lambda *_args, **_options: None  # noqa: E731
    with patch.multiple(module, launch=lambda *_: nothing, fused=lambda *_: True):
        yield


def through_the_dispatcher() -> contextlib.AbstractContextManager[object]:
    """All ops are called as custom ops."""
    return patch.object(Operator, "__call__", lambda self, *args: self._op(*args))


def step(call: Callable[[], Tensor], grad: Tensor) -> Callable[[], None]:
    """Forward and backward."""
    return lambda: call().backward(grad)


def measure(work: Callable[[], None], repeats: int) -> float:
    """µs of processor time of one call."""
    start = time.process_time()
    for _ in range(repeats):
        work()
    return (time.process_time() - start) / repeats * 1e6


def by_triton(kernel: Any, grid: Any, _: int, args: Any, constants: Any) -> None:
    """``launch.start`` by Triton's own way."""
    kernel[grid](*args, **constants)


def launches(call: Callable[[], Tensor]) -> list[tuple[Any, ...]]:
    """What forward and backward give to ``launch.start``."""
    found = list[tuple[Any, ...]]()
    with patch.object(launch, "start", lambda *given: found.append(given)):
        step(call, torch.randn(ROWS, WIDTH))()
    return found


def op_ways(kernel: str, call: Callable[[], Tensor]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The op of a module of ``tpplan.kernels``, as models call it and as a custom op."""
    work = step(call, torch.randn(ROWS, WIDTH))
    with nothing_launched(kernel):
        yield "tpplan", work
        with through_the_dispatcher():
            yield "PyTorch's", work


def launch_ways(given: list[tuple[Any, ...]]) -> Iterator[tuple[str, Callable[[], None]]]:
    """The launches as tpplan starts them, and as Triton does."""
    for name, start in {"tpplan": launch.start, "Triton's": by_triton}.items():

        def work(start: Callable[..., None] = start) -> None:
            for one in given:
                start(*one)

        yield name, work


def compare(
    options: argparse.Namespace, ways: Callable[[], Iterator[tuple[str, Callable[[], None]]]]
) -> dict[str, Any]:
    """Figures of two ways that take turns, and of the second's least time in that of the first."""
    times = defaultdict[str, list[float]](list)
    gc.collect()
    for _ in range(options.rounds):
        for name, work in ways():
            times[name].append(measure(work, options.calls))
    best = {name: min(found) for name, found in times.items()}
    first, second = best.values()
    median = {name: statistics.median(found) for name, found in times.items()}
    return {"best_us": best, "median_us": median, "ratio": second / first}


def main() -> int:
    """Measure, print; the exit status."""
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each way")
    parser.add_argument("--calls", type=int, default=300, help="steps in a turn")
    options = parse(parser)
    torch.set_num_threads(1)
    ops, starts = dict[str, Any](), dict[str, Any]()
    for name, (kernel, call) in calls().items():
        ops[name] = compare(options, functools.partial(op_ways, kernel, call))
    with stub_driver():
        for name, (_, call) in calls().items():
            starts[name] = compare(options, functools.partial(launch_ways, launches(call)))
    missed = list[str]()
    for title, found in (("ops", ops), ("launches", starts)):
        rows = [
            (name, *(f"{time:.1f}" for time in one["best_us"].values()), f"{one['ratio']:.2f}")
            for name, one in found.items()
        ]
        peer = list(next(iter(found.values()))["best_us"])[1]
        print(table((f"{title}, µs forward+backward", "tpplan", peer, "ratio"), rows), end="\n\n")
        missed += [
            f"{name}: {peer} {title} cost {one['ratio']:.2f} times as much < {BARS[title]}"
            for name, one in found.items()
            if one["ratio"] < BARS[title]
        ]
    return finish(options, {"ops": ops, "launches": starts}, missed)


if __name__ == "__main__":
    raise SystemExit(main())
