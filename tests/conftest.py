"""Fixtures of the whole suite."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four gloo processes, started once."""
    pool = Ranks()
    yield pool
    pool.close()
