"""Numbers that code decides by: on a rank they must be numbers of the whole, or some of these.

A mean over a rank's columns is another number than the mean over all. Where code goes on with it,
the results show that. Where it asks only whether it is positive, they do not, as long as the two
happen to have one sign.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor

from tpplan.compat import is_transformed
from tpplan.proof.noted import Misstep, now
from tpplan.styles.replicate import REPLICATE

_COMPARISONS = (
    *("gt", "lt", "ge", "le", "eq", "ne"),
    *("greater", "less", "greater_equal", "less_equal", "not_equal"),
)
# what gives whole numbers, or a Python one
_STEPS = (
    *("sign", "sgn", "round", "floor", "ceil", "trunc", "fix", "frac"),
    *("int", "long", "short", "char", "byte", "bool"),
)
_READS = ("item", "tolist", "__bool__", "__int__", "__float__", "__index__")
# what asks how far apart two are, and what holds one to the other
_NEAR = ("allclose", "isclose", "equal")
_BOUNDS = ("clamp_min", "clamp_max", "maximum", "minimum", "fmax", "fmin")
# of a quotient
_WRAPS = ("remainder", "fmod", "floor_divide")
# what stays within bounds
_WITHIN = ("clamp", "clip", "hardtanh", "threshold", "relu6")
_CASTS = (torch.Tensor.to, torch.Tensor.type)
_MOST = 2**16
_TOLERANCE = 1e-6


def _named(names: Sequence[str], *forms: str) -> set[Any]:
    found = [getattr(torch.Tensor, form.format(name), None) for name in names for form in forms]
    found += [getattr(module, name, None) for name in names for module in (torch, F)]
    return {f for f in found if callable(f)}


def _first(x: torch.Tensor) -> torch.Tensor:
    return x


def _both(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return torch.cat([x.flatten(), y.flatten()])


# what decides, and by what of its operands, of which there are one or two
_DECIDES: Mapping[Any, tuple[int, Callable[..., torch.Tensor]]] = {
    **dict.fromkeys(_named(_STEPS, "{}", "{}_"), (1, _first)),
    **dict.fromkeys(_named(_READS, "{}"), (1, _first)),
    **dict.fromkeys(_named(_WITHIN, "{}", "{}_"), (1, _first)),
    **dict.fromkeys(_named(_COMPARISONS, "{}", "__{}__", "{}_"), (2, torch.sub)),
    **dict.fromkeys(_named((*_NEAR, *_BOUNDS), "{}", "{}_"), (2, torch.sub)),
    **dict.fromkeys(_named(_WRAPS, "{}", "{}_"), (2, torch.div)),
    **dict.fromkeys(_named(("mod", "floordiv"), "__{}__", "__i{}__"), (2, torch.div)),
    **dict.fromkeys(_named(("bucketize", "searchsorted"), "{}"), (2, _both)),
}


@dataclass(frozen=True)
class Decision:
    """What a line of a module's code decides by."""

    path: str
    line: tuple[str, int]
    numbers: torch.Tensor


def note(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """That the model's own code decides by these, if ``function`` does and they have fractions.

    DTensors compute as the whole, wherever they are shown.
    """
    notes = now()
    count, of = _DECIDES.get(function) or (int(_is_cast(function, args, kwargs)), _first)
    operands = args[:count]
    if notes is None or not operands or len(operands) < count:
        return
    if not all(isinstance(x, torch.Tensor | int | float) for x in operands):
        return
    if torch.compiler.is_compiling() or is_transformed():
        return
    tensors = [x for x in operands if isinstance(x, torch.Tensor)]
    if any(isinstance(x, DTensor) for x in tensors):
        return
    if not any(x.is_floating_point() for x in tensors) or not _fit(tensors, of is _both):
        return
    line = _line()
    if line is None:
        return
    numbers = of(*(torch.as_tensor(x).detach().double() for x in operands))
    notes.decided.append(Decision(notes.path(), line, numbers[numbers.isfinite()]))


def _is_cast(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether it makes whole numbers."""
    kinds = [x for x in (*args[1:], kwargs.get("dtype")) if isinstance(x, torch.dtype)]
    return function in _CASTS and any(not (k.is_floating_point or k.is_complex) for k in kinds)


def _fit(tensors: Sequence[torch.Tensor], apart: bool) -> bool:
    """Whether they go together, unless each goes by itself, and are few numbers."""
    if apart:
        return sum(x.numel() for x in tensors) <= _MOST
    try:
        return bool(math.prod(torch.broadcast_shapes(*(x.shape for x in tensors))) <= _MOST)
    except RuntimeError:
        return False


def _line() -> tuple[str, int] | None:
    """That of the code which called torch; None where that is no model's."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        package = name.partition(".")[0]
        if package not in ("torch", "tpplan"):
            return frame.f_code.co_filename, frame.f_lineno
        if package == "tpplan" and not name.startswith("tpplan.proof."):
            return None
        frame = frame.f_back  # type: ignore[assignment]
    return None


def misdecided(
    due: Sequence[Decision], got: Sequence[Decision], ordered: bool = True
) -> Misstep | None:
    """By what a rank decides that is no number of those by which the unsharded model does.

    It may decide by fewer of them. Give the first rank's decisions: it has no rows of padding.

    Args:
        ordered: whether those of a line come in one order. In backward ranks have orders of
            their own.
    """
    whole = defaultdict[tuple[str, tuple[str, int]], list[torch.Tensor]](list)
    for decision in due:
        whole[decision.path, decision.line].append(decision.numbers)
    if not ordered:
        whole.update({place: [torch.cat(found)] for place, found in whole.items()})
    for decision in got:
        waiting = whole[decision.path, decision.line]
        if waiting and not _are_among(decision.numbers, waiting.pop(0) if ordered else waiting[0]):
            return Misstep(
                decision.path,
                "decides by numbers of a rank's own part, which are others than those of the whole",
                f"compute them from what all ranks have alike, in a module that is "
                f"'{REPLICATE.name}' or gathers its input; or leave that module out of the plan",
                decision.line,
            )
    return None


def _are_among(numbers: torch.Tensor, whole: torch.Tensor) -> bool:
    if not numbers.numel() or not whole.numel():
        return True
    known = whole.sort().values
    above = torch.searchsorted(known, numbers).clamp(max=known.numel() - 1)
    below = (above - 1).clamp(min=0)
    away = torch.minimum((known[above] - numbers).abs(), (known[below] - numbers).abs())
    return bool((away <= _TOLERANCE * max(1e-30, float(whole.abs().max()))).all())
