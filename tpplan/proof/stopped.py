"""Where a rank's run stopped, and what is said of code that cannot go on there."""

from __future__ import annotations

import traceback

from torch import nn

from tpplan.compiled import CompiledPlan
from tpplan.planner.match import fold, folded
from tpplan.styles import named


class Stopped(Exception):
    """What a rank raised, and in which module."""

    def __init__(self, path: str, error: Exception) -> None:
        super().__init__(path, error)
        self.path, self.error = path, error

    @classmethod
    def running(cls, model: nn.Module, error: Exception) -> Stopped:
        """In the innermost module of whose code it was that ``error`` was raised."""
        names = {id(module): path for path, module in model.named_modules()}
        found = ""
        for frame, _ in traceback.walk_tb(error.__traceback__):
            found = names.get(id(frame.f_locals.get("self")), found)
        return cls(found, error)


def inlined(compiled: CompiledPlan, path: str) -> str | None:
    """Of code of the stack that calls projections itself: it has rows, and they give all."""
    elements = [p for p, m in compiled.modules.items() if m.element is not None]
    for around in (path, path.rpartition(".")[0]) if compiled.sequence_parallel else ():
        made = [
            p
            for p, m in compiled.modules.items()
            if m.boundaries and named(m.style).columns and p and p.rpartition(".")[0] == around
        ]
        if made and any(around == p or around.startswith(f"{p}.") for p in elements):
            stack = _on_rows(compiled, around)
            instead = (
                f"make the stack of what runs on rows there, 'layers: {stack}', and this code has "
                "the shape of all of it"
                if stack
                else "put what it does with these in a module of its own, which is given what they "
                "are given"
            )
            return (
                f"under sequence parallelism the code of {fold([around])} has a rank's rows of the "
                f"sequence, and {fold(made)} give all of them: {instead}; or turn "
                "sequence_parallel off"
            )
    return None


def _on_rows(compiled: CompiledPlan, around: str) -> str | None:
    """A pattern of the modules that the code of ``around`` calls with rows of the stream."""
    found: dict[str, None] = {}
    for path, plan in compiled.modules.items():
        if named(plan.style).rows and path.rpartition(".")[0] == around:
            found[path.rpartition(".")[2]] = None
    within = folded(around)
    if not found or not within:
        return None
    return f"{within}.{next(iter(found)) if len(found) == 1 else '{' + ','.join(found) + '}'}"
