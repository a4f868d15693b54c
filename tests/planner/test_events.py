"""What a rank has is compared with what is due, whatever numbers there are."""

from __future__ import annotations

import pytest
import torch

from tpplan.planner.events import Departed, compare

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("odd", [INF, -INF, NAN])
def test_beside_numbers_that_are_not_finite(odd: float) -> None:
    due = torch.tensor([1.0, 2.0, odd])
    compare("norm", due, torch.tensor([1.0, 2.0 + 1e-6, odd]), "its input is another")
    with pytest.raises(Departed, match="its input is another"):
        compare("norm", due, torch.tensor([1.0, 3.0, odd]), "its input is another")
    with pytest.raises(Departed, match="its input is another"):
        compare("norm", due, torch.tensor([1.0, 2.0, 3.0]), "its input is another")
