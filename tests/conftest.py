"""Fixtures of the whole suite."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    # before any kernel is defined: they run on the CPU then
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.ranks import Ranks
from tests.thorough import THOROUGH, said, turn

# nothing in the suite is timed
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four gloo processes, started once."""
    pool = Ranks()
    yield pool
    pool.close()


def pytest_sessionstart(session: pytest.Session) -> None:
    """Say which part of the suite is run; a quiet run prints no header to put it in."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(said())


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tp 2 and 4 in both modes, a test that has all four takes one, or rests.

    Such tests take most of the suite's time, and what they prove in one combination rarely fails
    in another. Each goes through all four in four days (see tests/thorough.py), while the others
    of a group of four rest; of a matrix of such tests fifteen of sixteen rest. Tests on ranks in
    both modes go likewise, and of those that are slow by themselves one of four is run.
    """
    if THOROUGH:
        return
    left = _resting(items) | _slow_ones_resting(items)
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=list(left))


def _slow_ones_resting(items: list[pytest.Item]) -> set[pytest.Item]:
    files: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("slow") and not _count(item):
            files.setdefault(item.path, []).append(item)
    if sum(map(len, files.values())) < 2:
        return set()  # someone asks for it by name
    # what other files hold on a day must not move those of this one
    return {item for slow in files.values() for i, item in enumerate(slow) if turn(i) != 0}


def _resting(items: list[pytest.Item]) -> set[pytest.Item]:
    tests: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if _count(item):
            tests.setdefault(_without_combination(item), []).append(item)
    # neighbours do not go round in step: of a matrix, each row and column has all combinations
    offsets = random.Random(0)
    left = set()
    for ways in tests.values():
        count = _count(ways[0])
        taken, offset = turn(offsets.randrange(4), count), offsets.randrange(16)
        if len(ways) < count:
            continue  # someone asks for them by name
        groups = 16 if ways[0].get_closest_marker("matrix") is not None else 4
        rests = len(tests) > 1 and turn(offset, groups, days=4) != 0
        left |= {item for item in ways if rests or _combination(item) != taken}
    return left


def _count(item: Any) -> int:
    """In how many ways there is a test of which a run takes one; 0 where it takes all."""
    # a list of chosen combinations is one mark, and not to be thinned out
    marks = {mark.args[0] for mark in item.iter_markers("parametrize")}
    if "sp" not in marks:
        return 0
    return 4 if "tp" in marks else 2 if "ranks" in item.fixturenames else 0


def _without_combination(item: Any) -> Any:
    params = item.callspec.params.items()  # all combinations are given the same objects
    others = (id(value) for name, value in params if name not in ("tp", "sp"))
    return item.path, item.cls, item.originalname, *others


def _combination(item: Any) -> int:
    params = item.callspec.params
    return 2 * (params.get("tp") == 4) + params["sp"]
