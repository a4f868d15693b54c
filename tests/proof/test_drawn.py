"""Random numbers as the proof notes them: how many, and from which sequence."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.rewrite.test_noise import Reading
from tpplan.proof.drawn import noting
from tpplan.proof.exact import exact

DROPOUTS: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "dropout": (F.dropout, (2, 3, 4)),
    "alpha_dropout": (F.alpha_dropout, (2, 3, 4)),
    "dropout1d": (F.dropout1d, (2, 3, 4)),
    "dropout1d, no batch": (F.dropout1d, (3, 4)),
    "dropout2d": (F.dropout2d, (2, 3, 4, 5)),
    "dropout2d of one dimension": (F.dropout2d, (2, 3, 4)),
    "dropout3d": (F.dropout3d, (2, 3, 4, 5, 6)),
    "dropout3d, no batch": (F.dropout3d, (3, 4, 5, 6)),
    "feature_alpha_dropout": (F.feature_alpha_dropout, (2, 3, 4)),
    "torch.feature_dropout": (torch.feature_dropout, (2, 3, 4, 5)),
    "torch.feature_alpha_dropout": (torch.feature_alpha_dropout, (2, 3, 4, 5)),
}


@pytest.mark.parametrize("name", DROPOUTS)
@pytest.mark.filterwarnings("ignore:dropout2d")
def test_what_dropouts_draw(name: str) -> None:
    function, shape = DROPOUTS[name]
    x = torch.ones(shape)
    with Reading() as reading:
        function(x, 0.5, True)
    with exact(), noting() as found:
        function(x, 0.5, True)
        function(x, 0.5, False)
    assert [math.prod(drawn.shape) for drawn in found] == [t.numel() for t in reading.drawn]
    (drawn,) = found
    assert [n for n in drawn.shape if n != 1] == [n for n in reading.drawn[0].shape if n != 1]
