"""Who sees, traces or replaces the ops that are called; fake tensors."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
from torch._subclasses import fake_tensor
from torch.utils import _python_dispatch

from tpplan.compat.replaced import there

NeedsValuesError = (
    fake_tensor.DataDependentOutputException,
    fake_tensor.DynamicOutputShapeException,
)
"""What an op raises whose result depends on values that fake tensors do not have."""

# called for every op and collective: not wrapped
dispatch_is_observed: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""Whether a mode is to see, or to replace, the ops that are called (how many)."""
functions_are_observed: Callable[[], int] = torch._C._len_torch_function_stack
"""Whether a mode is to see, or to replace, the functions that are called (how many)."""


def fake_mode() -> Any:
    """The mode that makes fake tensors now; None where none does."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE)  # type: ignore[attr-defined]


def fakes_are_made() -> bool:
    """Whether ops make fake tensors now: nothing is computed, and nothing sent."""
    return fake_mode() is not None


class Uncompiled(_python_dispatch.TorchDispatchMode):
    """A mode within which nothing is compiled.

    TorchDynamo's wrapper, which keeps it from compiling what a mode does, takes longer than that.
    """

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


_Function = TypeVar("_Function", bound=Callable[..., Any])


def constant_in_graphs(function: _Function) -> _Function:
    """``function``, which is called when a graph that calls it is made, and not by the graph.

    As ``torch.compiler.assume_constant_result``, which imports the compiler, has it.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function


def is_fake(value: object) -> bool:
    """Whether it is a tensor that is fake, or a DTensor or another wrapper of fakes."""
    return fake_tensor.is_fake(value)


def tracer(sharded: bool) -> str | None:
    """Who records this forward in a form that holds no collectives, or no ``sharded`` tensors."""
    if torch.fx._symbolic_trace.is_fx_symbolic_tracing():
        return "torch.fx"
    if torch._C._get_tracing_state() is not None:
        return "torch.jit"
    exports = torch.compiler.is_exporting() and not torch.compiler.is_dynamo_compiling()
    return "torch.export without strict=True" if sharded and exports else None


def is_transformed() -> bool:
    """Whether one of torch.func's transforms (grad, vmap, jvp) runs now."""
    if torch.compiler.is_compiling():
        return False
    return torch._C._are_functorch_transforms_active()


def is_wrapped(x: torch.Tensor) -> bool:
    """Whether ``x`` stands for others in one of torch.func's transforms, or in a batch of them.

    A backward may be batched (``is_grads_batched``) where its forward was not.
    """
    known = torch._C._functorch
    return known.is_functorch_wrapped_tensor(x) or known.is_legacy_batchedtensor(x)


def only_old_graphs() -> bool:
    """Whether torch.compile makes no graph here any more and runs code that has none as it is.

    It does once a function has as many as it may have (``recompile_limit``).
    """
    return torch._C._dynamo.eval_frame.get_eval_frame_callback() is False


def is_traced() -> bool:
    """Whether torch.compile traces now; what ops write in place, it makes functions of."""
    return torch._guards.TracingContext.try_get() is not None


def without_fakes() -> contextlib.AbstractContextManager[object]:
    """Within it, ops compute, although a fake mode is active."""
    return fake_tensor.unset_fake_temporarily()


@contextlib.contextmanager
def rehearsed_in(context: contextlib.AbstractContextManager[object]) -> Iterator[None]:
    """Within it, DTensor tries ops on fake tensors, to know their results' sizes, in ``context``.

    It holds a lock while it does so, which is nothing unless ranks are threads.
    """
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    outer = there(ShardingPropagator, "_fake_mode_lock")
    ShardingPropagator._fake_mode_lock = context  # type: ignore[assignment]
    try:
        yield
    finally:
        ShardingPropagator._fake_mode_lock = outer


def dispatch_modes() -> list[Any]:
    """The modes that are to see the ops that are called, the outermost first."""
    return _python_dispatch._get_current_dispatch_mode_stack()


def unobserved() -> contextlib.AbstractContextManager[object]:
    """Within it, no mode sees the ops that are called: they are no part of the computation."""
    observed = dispatch_is_observed()
    return _python_dispatch._disable_current_modes() if observed else contextlib.nullcontext()


def unmoded() -> contextlib.AbstractContextManager[None]:
    """Within it, no mode sees torch's functions."""
    return torch._C.DisableTorchFunction()  # type: ignore[no-any-return]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep torch from logging what is no news: the traceback of an error on fake tensors that is
    raised as well, and that a norm over two dimensions of a mesh is summed over one and the other.
    """
    names = ("torch._subclasses.fake_tensor", "torch.distributed.tensor._redistribute")
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def unfused() -> Iterator[None]:
    """Without the fused attention layers of ``torch.nn``, which do not call their submodules."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
