"""What a model was found to do, for compiling a plan onto it again, for other ranks or modes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")


class Known:
    """Remembers what hangs on neither tp, ep nor the mode, as traces of the unsharded model do.

    Attributes:
        settled: a model and what a region of it hangs on -> the model, and which of the changes to
            numbers of its code made it right: the one to try first when that is asked again.
    """

    def __init__(self, any_plan: Known | None = None) -> None:
        self._found: dict[Hashable, tuple[tuple[object, ...], object]] = {}
        self._any_plan = any_plan
        self.settled: dict[Hashable, tuple[object, int]] = {}
        if any_plan is not None:
            self.settled = any_plan.settled

    @property
    def any_plan(self) -> Known:
        """Of what hangs on no plan either, as the traces."""
        return self._any_plan or self  # not an attribute: a cycle would outlive its use

    def of_another_plan(self) -> Known:
        """One for another plan, which may have regions in common with those before."""
        return Known(self.any_plan)

    def once(self, about: tuple[object, ...], key: Hashable, find: Callable[[], T]) -> T:
        """What ``find`` gives, which is asked the first time only.

        Args:
            about: objects that it hangs on, which have to be the very same.
            key: what it hangs on besides, and which of all that is found it is.
        """
        where = (*map(id, about), key)
        if where not in self._found:
            self._found[where] = about, find()  # kept, so that no other has its id
        return self._found[where][1]  # type: ignore[return-value]
