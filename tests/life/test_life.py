"""One small model for every role × every event of its life, on real gloo ranks.

A run of the suite takes one of 256 of all pairs, sizes and modes, in turn; ``make thorough`` takes
them all (see tests/thorough.py). What is sent whole and what in pieces, what is kept of it:
neighbours do it in other ways, and of another turn in another one.
"""

from __future__ import annotations

import pytest

from tests.life.blocks import BLOCKS
from tests.life.events import EVENTS, WORLD_EVENTS, lived
from tests.life.life import WAYS, compiled
from tests.life.refusals import refusal
from tests.ranks import Ranks
from tests.rewrite import MODES, SIZES
from tests.thorough import turn

# the tests of a role are run by one worker, which compiles its plans once
EVERY = (*EVENTS, *WORLD_EVENTS)
ROLES = [pytest.param(role, marks=pytest.mark.xdist_group(role)) for role in BLOCKS]


@pytest.mark.turns(256)
@SIZES
@MODES
@pytest.mark.parametrize("event", EVERY)
@pytest.mark.parametrize("role", ROLES)
def test_life(ranks: Ranks, role: str, event: str, tp: int, sp: bool) -> None:
    everyone = {2: "2x2", 4: "1x4"}
    shape = everyone[tp] if event in WORLD_EVENTS else tp
    expected = refusal(role, event, sp)
    plan = compiled(role, tp, sp)
    way = [*WAYS][turn([*BLOCKS].index(role) + EVERY.index(event))]
    for found in ranks.run(shape, lived, plan, role, event, way, sp):
        if expected is None:
            assert not found, found
        else:
            assert isinstance(found, str), f"'{expected}' was expected, and nothing was raised"
            assert expected in found.splitlines()[-1]
