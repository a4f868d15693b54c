"""Fixtures of the whole suite."""

from __future__ import annotations

import os
import re
import zlib
from collections.abc import Iterator

import pytest
import torch

if not torch.cuda.is_available():
    # before any kernel is defined: they run on the CPU then
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.ranks import Ranks
from tests.thorough import THOROUGH


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four gloo processes, started once."""
    pool = Ranks()
    yield pool
    pool.close()


# how tests.rewrite names the two sizes and the two modes in a test's name
COMBINATION = re.compile(r"(?<=[\[-])(tp|tp\+sp|\d ranks)(?=[]-])")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of tp 2 and 4 in both modes, a test that has all four takes one.

    Such tests take most of the suite's time, and what they prove in one combination rarely fails
    in another. Which one goes by the test's name; ``make thorough`` runs all four.
    """
    if THOROUGH:
        return
    kept, left = [], []
    for item in items:
        # a list of chosen combinations is one mark, and not to be thinned out
        apart = {"tp", "sp"} <= {mark.args[0] for mark in item.iter_markers("parametrize")}
        (left if apart and _other(item) else kept).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=left)


def _other(item: pytest.Item) -> bool:
    params = item.callspec.params  # type: ignore[attr-defined]
    turn = zlib.crc32(COMBINATION.sub("", item.name).encode()) % 4
    return 2 * (params["tp"] == 4) + params["sp"] != turn
