"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest

from tests.ranks import Ranks
from tests.thorough import THOROUGH, in_turn, part, said

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
    """Of tests that cost much a run takes one of forty-eight, or of as many as they say.

    Those are the tests on real ranks, those in all combinations of tp and mode, and those marked
    ``turns``: together nearly all of the suite's time, and what one of them proves rarely fails
    alone. What somebody asks for by name is run.
    """
    if config.option.keyword or any("::" in arg for arg in config.args):
        return
    if THOROUGH:
        items[:] = part(items)
        return
    functions: dict[Any, list[pytest.Item]] = {}
    for item in items:
        if _ways(item) > 1:
            # by its line: neighbours have turns of their own, whatever else is collected
            function, line = item.function, item.function.__code__.co_firstlineno
            functions.setdefault((item.path, function, line, _ways(item)), []).append(item)
    left = set()
    for (_, _, line, ways), found in functions.items():
        left |= set(found) - {found[i] for i in in_turn(len(found), ways, line)}
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=list(left))


def _ways(item: Any) -> int:
    """Of how many tests like this one a run takes one."""
    turns = item.get_closest_marker("turns")
    if turns is not None:
        return int(turns.args[0])
    marks = {mark.args[0] for mark in item.iter_markers("parametrize")}
    return 48 if "ranks" in item.fixturenames or {"tp", "sp"} <= marks else 1
