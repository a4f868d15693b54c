"""Fixtures of the whole suite."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four gloo processes, started once."""
    pool = Ranks()
    yield pool
    pool.close()


# tests of many ranks that take most of the suite's time; what they prove in one combination of tp
# and mode rarely fails in another
ROTATED = (
    "test_rows",
    "test_dropout",
    "test_loss",
    "test_multihead",
    "test_training",
    "test_model",
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tp 2 and 4 in both modes, each of those tests takes two: both sizes and both modes.

    Which two goes by the test's name; ``make thorough`` runs all four.
    """
    if os.environ.get("TPPLAN_TESTS") == "all":
        return
    kept, left = [], []
    for item in items:
        params = getattr(getattr(item, "callspec", None), "params", {})
        rotated = item.path.stem in ROTATED and {"tp", "sp"} <= set(params)
        turn = zlib.crc32(item.name.partition("[")[0].encode()) % 2 == 0
        other = rotated and ((params["tp"] == 4) == params["sp"]) != turn
        (left if other else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)
