"""What a terminal shows of a command that takes long."""

from __future__ import annotations

import io
import json
import os
import pty
import select
import subprocess
import sys
import threading
import time
import warnings

import pytest

from tpplan import progress
from tpplan.cli import main
from tpplan.progress import Progress

CLEAR = "\r\033[K"


class Terminal(io.StringIO):
    """One that is there, and says when it is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.written = threading.Event()

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> int:
        size = super().write(text)
        self.written.set()
        return size


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "AFTER", 0.0)


def test_the_line_is_written_over_and_taken_away(at_once: None) -> None:
    terminal = Terminal()
    with Progress("building", terminal) as line:
        assert terminal.written.wait(60)
        line.say("proving")
        line.say("x" * 1000)
    shown = terminal.getvalue().split(CLEAR)
    assert shown[:3] == ["", "building", "proving"]
    assert set(shown[3]) == {"x"}
    assert len(shown[3]) < 1000
    assert shown[4:] == [""]


def test_a_warning_has_its_own_line(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(warnings, "showwarning", lambda *_, **__: terminal.write("told\n"))
    before = warnings.showwarning
    with Progress("building", terminal):
        assert terminal.written.wait(60)
        warnings.showwarning("told", UserWarning, "here", 1)
    assert terminal.getvalue() == f"{CLEAR}building{CLEAR}told\n{CLEAR}building{CLEAR}"
    assert warnings.showwarning is before


def test_what_is_quick_shows_nothing() -> None:
    terminal = Terminal()
    with Progress("building", terminal) as line:
        line.say("proving")
    assert terminal.getvalue() == ""


def test_a_file_is_told_nothing(at_once: None) -> None:
    file = io.StringIO()
    with Progress("building", file):
        time.sleep(0.05)
    assert file.getvalue() == ""


def test_an_error_comes_after_it(at_once: None) -> None:
    terminal = Terminal()
    with pytest.raises(ValueError), Progress("building", terminal):
        assert terminal.written.wait(60)
        raise ValueError
    assert terminal.getvalue() == f"{CLEAR}building{CLEAR}"


def test_json_is_alone_on_stdout(
    at_once: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    line = "dry-run gpt.yaml --model tests.gpt:GPT --tp 2 --seq 16 --json -"
    assert main(line.split()) == 0
    assert json.loads(capsys.readouterr().out)["version"] == 1
    shown = terminal.getvalue().split(CLEAR)
    assert "executing a step of it at tp 2" in shown
    assert shown[-1] == ""


SLOW = """
import sys
from tpplan import progress
from tpplan.cli import main
progress.AFTER = 0.0
sys.exit(main("check gpt.yaml --model tests.gpt:GPT --tp 2".split()))
"""


def test_on_a_terminal() -> None:
    """A real one, as stderr of a process of its own."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", SLOW], stdout=subprocess.PIPE, stderr=theirs, text=True
    )
    os.close(theirs)
    out, _ = process.communicate(timeout=300)
    shown = b""
    while select.select([ours], [], [], 0)[0]:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # its other end is closed, and all is read
            break
    os.close(ours)
    assert (process.returncode, out) == (0, "gpt.yaml: fits this model at tp 2, TP+SP\n")
    lines = shown.decode().split(CLEAR)
    assert "building tests.gpt:GPT" in lines
    assert "proving gpt.yaml on it at tp 2" in lines
    assert lines[-1] == ""
