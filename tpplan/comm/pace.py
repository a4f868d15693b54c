"""Into how many pieces a product and its collective are cut, so that most of the one is hidden.

With pieces, the first is sent (or made) alone, and then each is made beside the one that is sent:
n pieces take c + (n - 1) max(c, g) + g, where one takes c to send and g to multiply. More of them
hide more, and cost a latency and another look at the weights each.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from tpplan.compat import constant_in_graphs

MOST = 8


@constant_in_graphs
def left_to_compiler(symmetric: bool) -> int:
    """One piece, as whoever compiles a model is told that asks for more."""
    message = (
        "overlap: in a compiled graph it is inductor that fuses a product with what is sent, "
        "where it is told to: torch.compile(model, options={'_micro_pipeline_tp': True})"
        if symmetric
        else "overlap: in a compiled graph nothing is cut into pieces, its compiler schedules it; "
        "compile the model's parts that send nothing, or leave 'overlap' out"
    )
    warnings.warn(message, stacklevel=2)
    return 1


@dataclass(frozen=True)
class Pace:
    """What is reached of a GPU and its links, as the count of pieces needs it.

    Attributes:
        flops: FLOP/s of matmuls, by dtype; memory: bytes/s.
        links: by kind of collective: seconds that it takes at least, and a byte of all its data.
    """

    flops: Mapping[str, float]
    memory: float
    links: Mapping[str, tuple[float, float]]

    def seconds(self, kind: str, rows: int, inner: int, outer: int, dtype: str, n: int) -> float:
        """Of a product (rows, inner) x (inner, outer) and its collective, in ``n`` pieces."""
        size: int = getattr(torch, dtype).itemsize
        least, each = self.links[kind]
        sent = rows * (inner if kind == "all_gather" else outer) * size
        send = least + sent / n * each
        moved = inner * outer + rows * (inner + outer) / n
        # pieces are put into their places once more
        moved += 2 * rows * (inner + outer) / n if n > 1 else 0
        speed = self.flops.get(dtype, self.flops["float32"])
        multiply = max(2 * rows * inner * outer / n / speed, moved * size / self.memory)
        return send + (n - 1) * max(send, multiply) + multiply


class Pieces:
    """How many there are of each product.

    Args:
        least: one or two.
        pace: None: as many as ``least``.
        symmetric: whether what is gathered or scattered is left to torch's fused ops.
    """

    def __init__(self, least: int, pace: Pace | None = None, symmetric: bool = False) -> None:
        self.least, self.pace, self.symmetric = least, pace, symmetric

    def of(self, kind: str, rows: int, inner: int, outer: int, dtype: torch.dtype) -> int:
        """Of a product (rows, inner) x (inner, outer), ``rows`` of all ranks; 0: an op's own."""
        if self.symmetric and kind != "all_reduce":
            return 0
        if self.pace is None:
            return self.least
        named = str(dtype).removeprefix("torch.")
        return _fastest(self.least, self.pace, kind, rows, inner, outer, named)


@functools.lru_cache(maxsize=4096)
def _fastest(
    least: int, pace: Pace, kind: str, rows: int, inner: int, outer: int, dtype: str
) -> int:
    counts = [n for n in (1, 2, 4, MOST) if least <= n <= max(least, rows)]
    return min(counts, key=lambda n: pace.seconds(kind, rows, inner, outer, dtype, n))
