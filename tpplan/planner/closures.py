"""Functions kept as attributes that hold parts of the model: no copy of it takes these along.

A model is traced and proved on copies. ``copy.deepcopy`` copies a bound method with its module, but
leaves a function, and what it closes over, as they are: the copy would run the original's modules.
"""

from __future__ import annotations

import types

from torch import nn

from tpplan.language import Diagnostic, PlanError


def led_by_closures(model: nn.Module, error: PlanError) -> PlanError:
    """``error``, after its likely cause where functions of the model hold modules of it."""
    inside = {id(module): path for path, module in model.named_modules()}
    position = next((d.position for d in error.diagnostics if d.position is not None), None)
    found: dict[str, Diagnostic] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            held = _held(value)
            if held is None or id(held) not in inside:
                continue
            whole, what = f"{path}.{name}".lstrip("."), inside[id(held)] or "the model itself"
            hint = "make it a method of the module's class, or give it what it uses as an argument"
            message = (
                f"{whole}: this function closes over {what}, which no copy of the model takes "
                "along, so nothing can be proved of it"
            )
            found[name] = Diagnostic(message, position, hint)
    known = {d.message for d in error.diagnostics}
    if not found or any(d.message in known for d in found.values()):
        return error
    return PlanError([*found.values(), *error.diagnostics])


def _held(value: object) -> nn.Module | None:
    """A module that a plain function closes over; None where it is none, or holds none."""
    if not isinstance(value, types.FunctionType):
        return None
    cells = value.__closure__ or ()
    held = (cell.cell_contents for cell in cells if cell != types.CellType())
    return next((one for one in held if isinstance(one, nn.Module)), None)
