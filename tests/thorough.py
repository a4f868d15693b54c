"""What a run takes of the tests that cost much: all of them, or a part that rotates.

``make thorough`` (TPPLAN_TESTS=all) runs everything, which takes hours; or the part of all that
TPPLAN_PART says: 3/20 is the third of twenty. Other runs take of tests that cost much a few: others
every day, or those of the turn that TPPLAN_TURN says. After 256 turns all of them have been run.
``make coverage`` (TPPLAN_TESTS=each) takes at least one form of each test as well. Neither a test's
name nor a model's has any part in that.
"""

from __future__ import annotations

import datetime
import os
import random
from collections.abc import Sequence
from typing import TypeVar

_Test = TypeVar("_Test")
_ASKED = os.environ.get("TPPLAN_TESTS")
THOROUGH, EACH = _ASKED == "all", _ASKED == "each"
TURNS = 256
_PART, _PARTS = map(int, os.environ.get("TPPLAN_PART", "1/1").split("/"))

# kept for the processes that this one starts, so that they agree around midnight as well
TURN = int(
    os.environ.setdefault(
        "TPPLAN_TURN", str(datetime.datetime.now(datetime.UTC).toordinal() % TURNS)
    )
)


def turn(position: int, ways: int = 4) -> int:
    """Which of several ways is taken of the test at a position; the next one in the next turn."""
    return (position + TURN) % ways


def in_turn(count: int, ways: int, seed: int) -> list[int]:
    """Which of so many tests are run: one in ``ways``, of an order that is random and stays.

    Neighbours differ by little, and do not go round in step that way. Where there are fewer
    tests than ways, none is run on most days, but where one of each is asked for.
    """
    if EACH:
        ways = min(ways, count)
    order = random.Random(seed)
    first = order.randrange(ways)
    return [
        i
        for place, i in enumerate(order.sample(range(count), count))
        if turn(place + first, ways) == 0
    ]


def part(tests: Sequence[_Test]) -> Sequence[_Test]:
    """Of all tests those of the part that is asked for; neighbours share what they compile."""
    return tests[len(tests) * (_PART - 1) // _PARTS : len(tests) * _PART // _PARTS]


def said() -> str:
    """A line that says what is run."""
    if THOROUGH:
        of = f"part {_PART} of {_PARTS} of " if _PARTS > 1 else ""
        return f"{of}every test, in every way"
    least = ", one of each at least" if EACH else ""
    others = f"TPPLAN_TURN=0..{TURNS - 1}, TPPLAN_TESTS=each or all"
    return f"turn {TURN} of the tests that take turns{least} ({others})"
