"""How many FLOPs ops take of which torch's own counter knows nothing; imported for that."""

from __future__ import annotations

import math
from typing import Any

from torch.utils.flop_counter import register_flop_formula

from tpplan.kernels import experts


def _rows_times(x: Any, parameters: Any, slots: int, among: int) -> int:
    rows = math.prod(x[:-1]) * slots / among
    each = sum(math.prod(p[1:]) for p in parameters if len(p) == 3)
    return int(2 * rows * each)


@register_flop_formula(experts.OP)
def _flops(x: Any, others: Any, parameters: Any, slots: int, among: int, **_: Any) -> int:
    return _rows_times(x, parameters, slots, among)


@register_flop_formula(experts.BACKWARD)
def _flops_backward(
    grad: Any, kept: Any, x: Any, others: Any, parameters: Any, slots: int, among: int, **_: Any
) -> int:
    return 2 * _rows_times(x, parameters, slots, among)
