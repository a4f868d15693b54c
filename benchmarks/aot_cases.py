"""Which kernels ``aot.py`` compiles: the launches of real calls, recorded instead of run.

Calls are those of the package's own functions and their autograd, on tensors of the true widths and
few rows, so kernels, blocks, warps and arguments are what a model would launch.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

ROWS = 16
NAMES = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
}
Call = Callable[[], object]


@dataclass(frozen=True)
class Argument:
    """What the just-in-time compiler makes of one argument."""

    name: str
    kind: str
    """A type, or ``constexpr``."""
    value: Any = None
    divisible: bool = False
    """By 16, an address or a number."""


@dataclass(frozen=True)
class Job:
    """One kernel as it is compiled: of the ops in ``module``, its body in ``room``."""

    module: str
    room: str
    kernel: str
    arguments: tuple[Argument, ...]
    warps: int


@dataclass(frozen=True)
class Case:
    """What a job is for; the same job may be for several widths."""

    variant: str
    width: int
    dtype: str


def specialised(name: str, value: Any, constant: bool) -> Argument:
    """An argument by the rules of Triton's own specialisation."""
    if isinstance(value, torch.Tensor):
        return Argument(name, "*" + NAMES[value.dtype], divisible=value.data_ptr() % 16 == 0)
    if constant or value is None or (value == 1 and isinstance(value, int)):
        return Argument(name, "constexpr", value)
    if isinstance(value, float):
        return Argument(name, "fp32")
    kind = "i32" if -(2**31) <= value < 2**31 else "i64"
    return Argument(name, kind, divisible=value % 16 == 0)


@contextmanager
def recording(group: str) -> Iterator[list[Job]]:
    """What a module of ``tpplan.kernels`` launches."""
    module, jobs = import_module(f"tpplan.kernels.{group}"), list[Job]()

    def launch(kernel: Any, grid: tuple[int, ...]) -> Callable[..., None]:
        def run(*args: Any, num_warps: int, **constants: Any) -> None:
            given = dict(zip(kernel.arg_names, args, strict=False)) | constants
            arguments = tuple(
                specialised(name, given[name], name in constants) for name in kernel.arg_names
            )
            jobs.append(Job(group, kernel.fn.__module__, kernel.fn.__name__, arguments, num_warps))

        return run

    with patch.multiple(module, launch=launch, fused=lambda *_: True):
        yield jobs


def jobs(group: str) -> dict[Job, list[Case]]:
    """All jobs of a module, and what each is for."""
    found: dict[Job, list[Case]] = {}
    # what float16 could change, the width of its loads, it shares with bfloat16: one kernel will do
    dtypes = [torch.bfloat16, torch.float32] + [torch.float16] * (group == "gated")
    for dtype in dtypes:
        for variant, width, call in CASES[group](dtype):
            with recording(group) as launched:
                call()
            for job in launched:
                found.setdefault(job, []).append(Case(variant, width, NAMES[dtype]))
    return found


def _tensor(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def _both(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Call:
    """Forward, and backward with a gradient of its own for each result."""

    def call() -> None:
        results = function(*args, **kwargs)
        results = results if isinstance(results, tuple) else (results,)
        torch.autograd.backward(results, [torch.empty_like(r) for r in results])

    return call


# 2048 and less are as 768; of rows that are not aligned: the widest of each kernel, and one between
NORM_WIDTHS = (768, 4095, 4096, 4097, 8192, 16383, 16384, 32767, 32768, 65536)


def _norms(dtype: torch.dtype) -> Iterator[tuple[str, int, Call]]:
    norm = import_module("tpplan.kernels.norm")
    for h in NORM_WIDTHS:
        x, more = _tensor(ROWS, h, dtype=dtype), _tensor(ROWS, h, dtype=dtype)
        w, b = _tensor(h, dtype=dtype), _tensor(h, dtype=dtype)
        rms, layer = {"eps": 1e-6, "centred": False}, {"eps": 1e-5, "centred": True}
        yield "rms", h, _both(norm.norm, x, w, **rms)
        yield "rms early + residual", h, _both(norm.residual_norm, x, more, w, **rms, early=True)
        yield "layer + bias", h, _both(norm.norm, x, w, b, **layer)
        yield "layer + bias + residual", h, _both(norm.residual_norm, x, more, w, b, **layer)
        if h == 4096:
            yield "rms offset", h, _both(norm.norm, x, w, **rms, offset=1.0)
            yield "layer without weight", h, _both(norm.norm, x, None, **layer)
            wide = _tensor(h, dtype=torch.float32)
            yield "rms early, float32 weight", h, _both(norm.norm, x, wide, **rms, early=True)


MLP_WIDTHS = (14336, 28672, 28672 // 8, 4097)


def _gelus(dtype: torch.dtype) -> Iterator[tuple[str, int, Call]]:
    gelu = import_module("tpplan.kernels.gelu").gelu
    for h, tanh, shifts in itertools.product(MLP_WIDTHS, (True, False), (True, False)):
        bias = _tensor(h, dtype=dtype) if shifts else None
        name = ("tanh" if tanh else "erf") + " + bias" * shifts
        yield name, h, _both(gelu, _tensor(ROWS, h, dtype=dtype), bias, tanh=tanh)


def _gates(dtype: torch.dtype) -> Iterator[tuple[str, int, Call]]:
    gated = import_module("tpplan.kernels.gated")
    for h, kind in itertools.product(MLP_WIDTHS, ("silu", "gelu", "gelu_tanh")):
        gate, up = _tensor(ROWS, h, dtype=dtype), _tensor(ROWS, h, dtype=dtype)
        yield kind, h, _both(gated.gated, gate, up, kind=kind)
        both = _tensor(ROWS, 2 * h, dtype=dtype)
        yield f"{kind} packed", h, _both(gated.gated_packed, both, kind=kind)


VOCABULARIES = (128256 // 8, 50257)


def _losses(dtype: torch.dtype) -> Iterator[tuple[str, int, Call]]:
    loss = import_module("tpplan.kernels.cross_entropy")

    def call(v: int, smooth: bool, weight: torch.Tensor | None) -> None:
        logits = torch.empty(ROWS, v, dtype=dtype)
        target, each = torch.zeros(ROWS, dtype=torch.int64), torch.empty(ROWS)
        loss.statistics(logits, target, v, weight, smooth=smooth, fuse=True)
        every = each if smooth else None
        loss.gradient(logits, target, v, weight, each, each, each, each, every, fuse=True)

    for v in VOCABULARIES:
        weight = torch.empty(v)
        yield "plain", v, lambda v=v: call(v, False, None)  # type: ignore[misc]
        yield "smooth", v, lambda v=v: call(v, True, None)  # type: ignore[misc]
        yield "smooth, weights", v, lambda v=v, w=weight: call(v, True, w)  # type: ignore[misc]


def _look_ups(dtype: torch.dtype) -> Iterator[tuple[str, int, Call]]:
    look_up = import_module("tpplan.kernels.embedding").look_up
    for h in (768, 4096, 8192, 4097):
        ids, weight = torch.zeros(ROWS, dtype=torch.int64), _tensor(ROWS, h, dtype=dtype)
        yield "look-up", h, _both(look_up, ids, weight, ROWS)


def _moves(dtype: torch.dtype) -> Iterator[tuple[str, int, Call]]:
    transition = import_module("tpplan.kernels.transition")
    for h in (768, 8192, 4097):
        whole = torch.empty(2, ROWS, h, dtype=dtype)
        packed = torch.empty(2, 2, ROWS // 2, h, dtype=dtype)
        bias = torch.empty(h, dtype=dtype)
        yield "pack", h, lambda x=whole: transition.pack(x, 1, 2)  # type: ignore[misc]
        yield "pack + bias", h, lambda x=whole, b=bias: transition.pack(x, 1, 2, bias=b)  # type: ignore[misc]
        if dtype != torch.float32:
            yield "pack + cast", h, lambda x=whole: transition.pack(x, 1, 2, dtype=torch.float32)  # type: ignore[misc]
        yield "unpack", h, lambda x=packed: transition.unpack(x, 1, ROWS)  # type: ignore[misc]


CASES: dict[str, Callable[[torch.dtype], Iterator[tuple[str, int, Call]]]] = {
    "norm": _norms,
    "gelu": _gelus,
    "gated": _gates,
    "cross_entropy": _losses,
    "embedding": _look_ups,
    "transition": _moves,
}
