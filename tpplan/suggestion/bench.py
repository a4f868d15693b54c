"""A model on random numbers, and modules of it run by themselves, for what hangs on what."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from tpplan.language import PlanError
from tpplan.models import RUNNABLE, ModelError, made_runnable
from tpplan.observe.calls import BATCH, LENGTH, Call, calls_for, in_float32
from tpplan.observe.chance import same_randomness
from tpplan.observe.twins import without_hooks
from tpplan.observe.untouched import as_before, by_itself

_SPREAD = 0.1
Hook = Callable[[nn.Module, Any, Any], Any]


class _Reached(Exception):
    """The module that was waited for was called."""


class Bench:
    """A copy of a model, or the same code made small, in evaluation.

    Attributes:
        model: the copy; of: the model that it stands for.
    """

    def __init__(self, model: nn.Module, of: nn.Module, calls: tuple[Call, ...]) -> None:
        self.model, self.of, self.calls = model, of, calls
        self._given: dict[str, Call | None] = {}

    def given(self, path: str) -> Call | None:
        """What a module is first called with; None where the model cannot be run so far."""
        if path not in self._given:
            self._given[path] = None
            module = self.model.get_submodule(path)

            def before(_: nn.Module, args: Any, kwargs: Any) -> None:
                self._given[path] = fresh((args, kwargs))
                raise _Reached

            handle = module.register_forward_pre_hook(before, with_kwargs=True)
            around = as_before(self.model), contextlib.suppress(Exception)
            with same_randomness(0), torch.no_grad(), handle, around[0], around[1]:
                for args, kwargs in self.calls:
                    given, named = fresh((args, kwargs))
                    self.model(*given, **named)
        return self._given[path]


def bench_for(model: nn.Module, whole: nn.Module, inputs: Any) -> Bench | None:
    """One for a model of which ``model`` has few layers; None where there are no numbers to run.

    Args:
        whole: the model itself, that may have to be made small.
    """
    try:
        small = model
        if sum(p.numel() for p in model.parameters()) > RUNNABLE:
            if inputs is not None:
                return None  # a call of the large model may not be one of the small
            small, _ = made_runnable(whole)
        elif any(p.is_meta for p in model.parameters()):
            small, _ = made_runnable(copy.deepcopy(model))
        calls = calls_for(small, inputs)
        calls = in_float32(calls if inputs is not None else _told_apart(calls))
        return Bench(_drawn(small), model, calls)
    except (ModelError, PlanError, RuntimeError):
        return None


def tensors_of(module: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, by name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def fresh(given: Any) -> Any:
    """A call with tensors and caches of its own."""

    def own(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().clone()

    # what is not a container of pytree's may hold tensors as well, such as a cache
    return copy.deepcopy(tree_map_only(torch.Tensor, own, given))


def run_until(
    module: nn.Module, given: Call, hooks: Mapping[str, Hook], end: str, norms: Iterable[str]
) -> None:
    """Run a module until one inside of it is called.

    Args:
        hooks: for modules inside, by their paths; what is not None is given in the place of
            what they give.
        end: the module to stop at, whose hook is told what it is given.
        norms: modules that multiply by their parameters, and what else they are given, instead:
            what statistics over a width that is cut need of other ranks is summed.
    """
    kept = {name: dict(vars(inner)) for name, inner in module.named_modules()}

    def stops(inner: nn.Module, args: Any) -> None:
        hooks[end](inner, args, None)
        raise _Reached

    with contextlib.ExitStack() as stack:
        for path, hook in hooks.items():
            inner = module.get_submodule(path)
            if path == end:
                stack.enter_context(inner.register_forward_pre_hook(stops))
            else:
                stack.enter_context(inner.register_forward_hook(hook))
        for path in norms:
            inner = module.get_submodule(path)
            object.__setattr__(inner, "forward", _multiplying(inner))
        stack.callback(_restore, module, kept)
        stack.enter_context(contextlib.suppress(_Reached))
        stack.enter_context(by_itself())
        args, kwargs = fresh(given)
        module(*args, **kwargs)


def _restore(module: nn.Module, kept: Mapping[str, Mapping[str, Any]]) -> None:
    """Its attributes as they were: code may keep a state for the next call."""
    for path, inner in module.named_modules():
        for name in vars(inner).keys() - kept[path].keys():
            object.__delattr__(inner, name)
        vars(inner).update(kept[path])


def _multiplying(module: nn.Module) -> Callable[..., torch.Tensor]:
    def forward(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
        first, *others = [t for t in tensors if t.is_floating_point()]
        out = first
        for factor in (*others, *module._parameters.values()):
            out = out if factor is None else out * (factor + 1.5)
        return out

    return forward


def _drawn(model: nn.Module) -> nn.Module:
    """A copy in evaluation with random numbers: norms around one, all else around zero."""
    drawn = copy.deepcopy(model).float().cpu().eval()
    without_hooks(drawn)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in drawn.parameters():
            if parameter.is_floating_point():
                parameter.requires_grad_(True)
                ones = parameter.dim() < 2 and bool((parameter == 1).all())
                parameter.normal_(1.0 if ones else 0.0, _SPREAD, generator=generator)
    return drawn


def _told_apart(calls: tuple[Call, ...]) -> tuple[Call, ...]:
    """Example inputs with ids that differ, that attention may look at some more than at others."""

    def ids(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            generator = torch.Generator().manual_seed(0)
            return torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        if tensor.shape != (BATCH, LENGTH):
            return tensor
        return torch.arange(BATCH * LENGTH).view(BATCH, LENGTH).to(tensor.dtype) % 13 + 1

    return tree_map_only(torch.Tensor, ids, calls)  # type: ignore[no-any-return]
