"""Host time of a fused kernel's op, forward and backward, with nothing launched.

Each op is called as models call it, around the dispatcher where nobody looks, and through the
dispatcher as any ``torch.library.custom_op``. What a launch itself costs, the same in both, is left
out: no kernel runs.
"""

# mypy: disable-error-code="no-untyped-call"
from __future__ import annotations

import contextlib
import gc
import statistics
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.common import finish, option_parser, parse, table
from tpplan.kernels.operator import Operator

BAR = 1.5
"""The least that a custom op costs more."""
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


def main() -> int:
    """Measure, print; the exit status."""
    parser = option_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="turns of each way")
    parser.add_argument("--calls", type=int, default=300, help="steps in a turn")
    options = parse(parser)
    torch.set_num_threads(1)
    figures, rows, missed = {}, [], []
    for name, (kernel, call) in calls().items():
        work = step(call, torch.randn(ROWS, WIDTH))
        times: dict[str, list[float]] = {"around": [], "through": []}
        gc.collect()
        with nothing_launched(kernel):
            for _ in range(options.rounds):
                times["around"].append(measure(work, options.calls))
                with through_the_dispatcher():
                    times["through"].append(measure(work, options.calls))
        best = {way: min(found) for way, found in times.items()}
        ratio = best["through"] / best["around"]
        median = {way: statistics.median(found) for way, found in times.items()}
        figures[name] = {"best_us": best, "median_us": median, "ratio": ratio}
        rows.append((name, f"{best['around']:.0f}", f"{best['through']:.0f}", f"{ratio:.2f}"))
        if ratio < BAR:
            missed.append(f"{name}: a custom op costs {ratio:.2f} times as much < {BAR}")
    print(table(("µs forward+backward", "tpplan", "custom op", "ratio"), rows))
    return finish(options, {"ops": figures}, missed)


if __name__ == "__main__":
    raise SystemExit(main())
