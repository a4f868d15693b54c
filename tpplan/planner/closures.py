"""Functions kept in a model that hold parts of it: no copy of the model takes these along.

A model is traced and proved on copies. ``copy.deepcopy`` copies a bound method with its module, but
leaves a function, and what it closes over, as they are: the copy would run the original's modules.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import types
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from tpplan.language import Diagnostic, Plan, PlanError
from tpplan.observe.reading import filled

# torch says that a compiled module runs hooks on all modules twice
_OF_HOOKS = r"Using `torch\.compile"
_HINT = "make it a method of the module's class, or give it what it uses as an argument"


@contextlib.contextmanager
def on_copies(model: nn.Module, plan: Plan) -> Iterator[None]:
    """Within it only copies of ``model`` run.

    Raises:
        PlanError: where code of a copy called a module of ``model`` itself; or what is raised
            within, after functions that are its likely cause.
    """
    inside, called = {id(module): path for path, module in model.named_modules()}, set[int]()
    # others may well be shared with copies
    counting = {id(m) for m in model.modules() if next(m.parameters(), None) is not None}
    thread = threading.get_ident()  # another one may be at work with the model

    def note(module: nn.Module, args: Any) -> None:
        if id(module) in counting and threading.get_ident() == thread:
            called.add(id(module))

    handle = register_module_forward_pre_hook(note)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", _OF_HOOKS)
            yield
    except PlanError as error:
        known = {d.message for d in error.diagnostics}
        found = _led_back(model, plan, inside, called)
        if not found or any(d.message in known for d in found):
            raise
        raise PlanError([*found, *error.diagnostics]) from error.__cause__
    finally:
        handle.remove()
    if called:
        raise PlanError(_led_back(model, plan, inside, called))


def _led_back(
    model: nn.Module, plan: Plan, inside: Mapping[int, str], called: Collection[int]
) -> list[Diagnostic]:
    """What is said of functions that hold modules; of hooks, where any module was ``called``.

    Where one was, and nothing holds it, of that.
    """
    found: dict[str, Diagnostic] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            hooks = name.endswith("_hooks")
            held = _held(value.values() if hooks else [value], inside)
            # torch.compile's own closure is made anew in a copy
            compiled = "_orig_mod" in module._modules
            if held is None or ((hooks or compiled) and not called):
                continue
            whole, what = f"{path}.{name}".lstrip("."), inside[id(held)] or "the model itself"
            message = (
                f"{whole}: this function closes over {what}, which no copy of the model takes "
                "along, so nothing can be proved of it"
            )
            found.setdefault(name, Diagnostic(message, plan.rules[0].position, _HINT))
    if called and not found:
        path = next(inside[id(module)] for module in model.modules() if id(module) in called)
        message = (
            f"{path or 'the model itself'}: a copy of the model still calls this module, so "
            "nothing can be proved of it: code keeps it elsewhere than in the model"
        )
        found[""] = Diagnostic(message, plan.rules[0].position, _HINT)
    return list(found.values())


def _held(values: Iterable[Any], inside: Collection[int]) -> nn.Module | None:
    """A module that plain functions among ``values`` hold, or a method of which they do."""
    pending, met = [(value, False) for value in values], set[int]()
    while pending:
        value, closed = pending.pop()
        if id(value) in met:
            continue
        met.add(id(value))
        owner = value.__self__ if isinstance(value, types.MethodType) else value
        if closed and isinstance(owner, nn.Module) and id(owner) in inside:
            return owner
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or () if filled(cell)]
            parts = [*cells, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
            pending += ((part, True) for part in (*parts, *vars(value).values()))
        elif isinstance(value, types.MethodType):
            pending.append((value.__func__, closed))
        elif isinstance(value, functools.partial):
            given = (*value.args, *value.keywords.values()) if closed else ()
            pending += ((part, closed) for part in (value.func, *given))
    return None
