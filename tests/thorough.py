"""What a run takes of the tests that exist in several ways: all of it, or a part that rotates.

``make thorough`` (TPPLAN_TESTS=all) runs everything. Other runs take of each such test one way out
of several: another one every day, or the one that TPPLAN_TURN says. After 64 days all of them have
had their turn: what is thinned out twice goes by different digits of the turn. Neither a test's
name nor a model's has any part in that.
"""

from __future__ import annotations

import datetime
import os

THOROUGH = os.environ.get("TPPLAN_TESTS") == "all"

# kept for the processes that this one starts, so that they agree around midnight as well
TURN = int(
    os.environ.setdefault("TPPLAN_TURN", str(datetime.datetime.now(datetime.UTC).toordinal() % 64))
)


def turn(position: int, ways: int = 4, days: int = 1) -> int:
    """Which of several ways is taken of the test at a position; the next one after some days."""
    return (position + TURN // days) % ways


def said() -> str:
    """A line that says what is run."""
    if THOROUGH:
        return "every test, in every way"
    return f"turn {TURN} of the tests that take turns (TPPLAN_TURN=0..63, TPPLAN_TESTS=all)"
