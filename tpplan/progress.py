"""What a long command is doing now, as one line on a terminal that is written over."""

from __future__ import annotations

import shutil
import sys
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any, TextIO

AFTER = 2.0
"""Seconds within which a command says nothing."""
_CLEAR = "\r\033[K"


class Progress:
    """A context that shows what it was told last; nothing where ``stream`` is no terminal.

    Results and errors are written after it: it leaves an empty line.
    """

    def __init__(self, text: str, stream: TextIO | None = None) -> None:
        self._text, self._stream = text, stream or sys.stderr
        self._shown = False
        self._show_warning: Callable[..., None] | None = None
        self._lock = threading.Lock()
        self._timer = threading.Timer(AFTER, self._show)
        self._timer.daemon = True

    def __enter__(self) -> Progress:
        if self._stream.isatty():
            self._show_warning = warnings.showwarning
            warnings.showwarning = self._warned
            self._timer.start()
        return self

    def say(self, text: str) -> None:
        """Show this from now on."""
        with self._lock:
            self._text = text
            if self._shown:
                self._write()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self._timer.cancel()
        if self._show_warning is not None:
            warnings.showwarning = self._show_warning
        with self._lock:
            # a timer that has already gone off waits for the lock
            self._text = ""
            if self._shown:
                self._write()

    def _warned(self, *args: Any, **kwargs: Any) -> None:
        """A warning has a line of its own, not the rest of the one that is shown."""
        assert self._show_warning is not None
        with self._lock:
            if self._shown:
                self._stream.write(_CLEAR)
                self._stream.flush()
            self._show_warning(*args, **kwargs)
            if self._shown:
                self._write()

    def _show(self) -> None:
        with self._lock:
            if self._text:
                self._shown = True
                self._write()

    def _write(self) -> None:
        # a line that wraps could not be written over
        width = shutil.get_terminal_size().columns - 1
        self._stream.write(_CLEAR + self._text[:width])
        self._stream.flush()
