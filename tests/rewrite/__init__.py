"""Sharded models against unsharded ones, on real gloo ranks."""

import pytest

MODES = pytest.mark.parametrize("sp", [False, True], ids=["tp", "tp+sp"])
SIZES = pytest.mark.parametrize("tp", [2, 4], ids=["2 ranks", "4 ranks"])
