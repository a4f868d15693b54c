"""Other example inputs, for a model that does not run on plain token ids."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tpplan.language import Diagnostic, PlanError, Position
from tpplan.observe.calls import BATCH, LENGTH, example_inputs, random_ids

P = ParamSpec("P")
R = TypeVar("R")
GIVE_INPUTS = "give inputs= with which the model's forward can be called"
"""The advice where a model does not run on what was made for it, by which that is known."""
_CHOICES = 2
_SIZES = ("micro_batch", "batch", "seq")


def with_other_inputs(function: Callable[P, R], sized: bool = True) -> Callable[P, R]:
    """``function``, called again with others where its model does not run on the first ids.

    For functions of a model, or of what makes one, that take ``inputs``; what the user gave is
    never another. Where the model runs on none of them either, the first error is raised.

    Args:
        sized: whether they have the size that the function is asked for, if it is.
    """
    signature = inspect.signature(function)

    @functools.wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return function(*args, **kwargs)
        except PlanError as error:
            call = signature.bind(*args, **kwargs)
            call.apply_defaults()
            if call.arguments["inputs"] is not None or not does_not_run(error):
                raise
            failure = error
        model = next(iter(call.arguments.values()))
        made = model if isinstance(model, nn.Module) else model()
        size = [call.arguments.get(name) if sized else None for name in _SIZES]
        for inputs in other_inputs(made, size[0] or size[1], size[2]):
            call.arguments["inputs"] = inputs
            try:
                return function(*call.args, **call.kwargs)
            except PlanError as error:
                if not does_not_run(error):
                    raise
        raise failure

    return called


def cannot_run(
    error: Exception,
    position: Position | None = None,
    hint: str = GIVE_INPUTS,
    related: tuple[tuple[str, Position], ...] = (),
) -> PlanError:
    """What is said of a model that does not run; see ``Diagnostic``."""
    message = f"the model cannot be run on example inputs: {type(error).__name__}: {error}"
    return PlanError([Diagnostic(message, position, hint, related)])


def does_not_run(error: Exception) -> bool:
    """Whether a model did not run on what was made for it, as an error says."""
    told = error.diagnostics if isinstance(error, PlanError) else ()
    return any(diagnostic.hint == GIVE_INPUTS for diagnostic in told)


def other_inputs(
    model: nn.Module, batch: int | None = None, length: int | None = None
) -> Iterator[Any]:
    """Calls with random token ids, as ``inputs=`` takes them, from the most usual one.

    A token that ends a text at the end of each, and nowhere else, which some pool by (BART's
    classifier); several choices for each text, (batch, choices, length); where ``batch`` is not
    asked for, one text alone, for what knows no padding.
    """

    def ids(batch: int) -> Any:
        generator = torch.Generator().manual_seed(0)
        return random_ids(model, example_inputs(model, batch, length or LENGTH), generator)

    if not any(map(_are_ids, tree_leaves(example_inputs(model)))):
        return
    ends = getattr(getattr(model, "config", None), "eos_token_id", None)
    end = ends[0] if isinstance(ends, list) and ends else ends
    if isinstance(end, int):
        yield _changed(ids(batch or BATCH), lambda t: _ended(t, end))
    yield _changed(ids(batch or BATCH), _with_choices)
    if batch is None:
        yield _changed(ids(1), lambda t: t)


def _are_ids(t: torch.Tensor) -> bool:
    return t.dtype == torch.long and t.dim() == 2


def _ended(ids: torch.Tensor, end: int) -> torch.Tensor:
    ids = ids.where(ids != end, end - 1 if end else 1)
    ids[:, -1] = end
    return ids


def _with_choices(ids: torch.Tensor) -> torch.Tensor:
    return torch.stack([ids.roll(i, -1) for i in range(_CHOICES)], 1)


def _changed(call: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The call with its ids changed: the keyword arguments, or else the positional ones."""

    def changed(t: torch.Tensor) -> torch.Tensor:
        return change(t) if _are_ids(t) else t

    args, kwargs = tree_map_only(torch.Tensor, changed, call)
    return kwargs or args
