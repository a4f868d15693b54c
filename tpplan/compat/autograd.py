"""Autograd's nodes, hooks and gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

_RUN_AT_ONCE = 2**62
# Within it, ops skip their autograd registrations; for code inside autograd functions. The
# functional collectives have theirs in Python, which costs more than the call itself. Not for code
# that is being compiled.
below_autograd: Callable[[], contextlib.AbstractContextManager[object]] = (
    torch._C._AutoDispatchBelowAutograd
)


class Function(torch.autograd.Function):
    """One that costs less to apply: torch's looks at each argument for what a transform of
    torch.func left behind, in Python."""

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """As torch's, without arguments by name."""
        if torch._C._are_functorch_transforms_active():
            return super().apply(*args)
        return super(torch.autograd.Function, cls).apply(*args)  # type: ignore[misc]


def hooks_of(leaf: torch.Tensor) -> tuple[Any, Any]:
    """The tables of a leaf's hooks: on its gradient, and after that is accumulated."""
    return leaf._backward_hooks, leaf._post_accumulate_grad_hooks  # type: ignore[attr-defined]


def set_hooks(leaf: torch.Tensor, hooks: tuple[Any, Any]) -> None:
    """Give a leaf the hooks of another one, under the handles that users hold."""
    if hooks[0]:
        leaf._backward_hooks = hooks[0]
    if hooks[1]:
        leaf._post_accumulate_grad_hooks = hooks[1]  # type: ignore[attr-defined]


def is_held_elsewhere(gradient: torch.Tensor) -> bool:
    """Whether autograd holds on to a gradient that it gave to a function."""
    return gradient._use_count() > 1  # type: ignore[attr-defined, no-any-return]


def in_backward() -> bool:
    """Whether this thread is inside autograd's backward (activation checkpointing recomputes)."""
    if torch.compiler.is_compiling():
        return False
    return backward_pass() != -1


# called for every product: not wrapped
backward_pass: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs in this thread, which no other has had; -1 outside."""


# the pass holds on to what it is given, and lets go of it also where it fails
at_end_of_backward: Callable[[Callable[[], None]], None] = (
    torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
)
"""Have a function called at the end of the backward pass that runs in this thread."""


def sequence_number() -> int:
    """The number that the next autograd node this thread records will have."""
    return torch._C._autograd._get_sequence_nr()  # type: ignore[attr-defined, no-any-return]


def saved_tensors_hooks() -> object:
    """The hooks that what is saved for backward goes through now, None where there are none."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True)  # type: ignore[attr-defined]


def running_node() -> int | None:
    """The number of the autograd node whose backward runs in this thread, None outside backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def differentiates_backward() -> bool:
    """Whether the backward that is running is itself recorded (``create_graph=True``)."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def run_when_ready(node: Any) -> None:
    """Let autograd run ``node`` as soon as its gradients are complete.

    The engine orders ready nodes by creation, latest first; a node kept over several forwards
    would wait for the end of the backward pass and hold every gradient until then.
    """
    node._set_sequence_nr(_RUN_AT_ONCE)


def run_after(node: Any, number: int) -> None:
    """Let autograd run ``node`` after all that are ready and were recorded since ``number``."""
    node._set_sequence_nr(number)
