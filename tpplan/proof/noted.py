"""What is noted of a step of the proof, as the model's code runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import nn

from tpplan.compat import running

if TYPE_CHECKING:
    from tpplan.proof.decided import Decision
    from tpplan.proof.drawn import Drawn


@dataclass
class Notes:
    """Random numbers that were drawn, and decisions that were made, in the order of the code.

    Attributes:
        paths: of the modules, by their ids.
    """

    paths: dict[int, str] = field(default_factory=dict)
    drawn: list[Drawn] = field(default_factory=list)
    decided: list[Decision] = field(default_factory=list)

    def path(self) -> str:
        """That of the module that runs now."""
        return self.paths.get(id(running().module), "")


@dataclass(frozen=True)
class Misstep:
    """What a module does otherwise than it must, and what helps.

    Attributes:
        line: of the model's code: a file and a number.
    """

    path: str
    what: str
    hint: str
    line: tuple[str, int] | None = None


_noted: ContextVar[Notes | None] = ContextVar("noted", default=None)


def now() -> Notes | None:
    """Those of the step that runs, if one does."""
    return _noted.get()


@contextlib.contextmanager
def noting(model: nn.Module) -> Iterator[Notes]:
    """What ``model`` does within it."""
    notes = Notes({id(module): path for path, module in model.named_modules()})
    before = _noted.set(notes)
    try:
        yield notes
    finally:
        _noted.reset(before)
