"""What a model was found to do, for compiling a plan onto it again, for other ranks or modes."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TypeVar

T = TypeVar("T")


class Known:
    """Remembers what hangs on neither tp, ep nor the mode, as traces of the unsharded model do."""

    def __init__(self) -> None:
        self._found: dict[Hashable, tuple[tuple[object, ...], object]] = {}

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
