"""Two processes that are the whole world: trainers take all there are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def pair() -> Iterator[Ranks]:
    """Two gloo processes, started once."""
    pool = Ranks(2)
    yield pool
    pool.close()
