"""What the code of a sharded region is shown, where it computes with the width of its input.

``B, T, C = x.size()`` and then ``.view(B, T, heads, C // heads)``: with a rank's heads that is
right where C is the rank's share of the width. Such code is given a view of the whole tensor that
is so wide; the projections, which alone read its numbers, take the whole.
"""

from __future__ import annotations

from typing import Any

import torch

from tpplan.roles.lowered import Lowered

_WHOLE = "_tpplan_whole"


def narrowed(x: torch.Tensor, ranks: int) -> torch.Tensor:
    """A view of (..., width) of the size (..., width // ranks), which knows ``x``."""
    share = x.narrow(-1, 0, x.size(-1) // ranks)
    setattr(share, _WHOLE, x)
    return share


def whole_of(x: torch.Tensor) -> torch.Tensor:
    """What ``x`` was narrowed from; itself where it was not."""
    whole: torch.Tensor = getattr(x, _WHOLE, x)
    return whole


class Widened(Lowered):
    """A projection of a tensor of which the code around it is shown a share; hooks see it whole."""

    def __call__(self, input: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        whole = whole_of(input)
        state = self._tpplan
        if whole is input and not state.alone:
            raise RuntimeError(
                f"{state.plan.path}: it is not given the very tensor that its region was given, of "
                "which the region's code is shown a part; checkpoint whole layers, and change "
                "inputs outside the region"
            )
        return super().__call__(whole, *args, **kwargs)
