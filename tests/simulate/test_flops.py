"""FLOPs of ops of which torch's counter knows nothing."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from tpplan.kernels.experts import of_sizes
from tpplan.simulate import flops

TOKENS, CHOSEN, EXPERTS, WIDTH, INNER = 6, 2, 4, 8, 5


def test_experts() -> None:
    """Each token is multiplied by the matrices of the experts that it chose, not of all."""
    assert flops.experts.of_sizes is of_sizes
    x = torch.randn(TOKENS, WIDTH, requires_grad=True)
    chosen = torch.zeros(TOKENS, CHOSEN, dtype=torch.long)
    factors = torch.rand(TOKENS, CHOSEN, requires_grad=True)
    wide = torch.randn(EXPERTS, 2 * INNER, WIDTH, requires_grad=True)
    narrow = torch.randn(EXPERTS, WIDTH, INNER, requires_grad=True)
    once = 2 * TOKENS * CHOSEN * 3 * INNER * WIDTH
    for among in (1, 2):
        with FlopCounterMode(display=False) as counter:
            out = of_sizes(((x, chosen, factors), {}), [wide, narrow], among)
            assert counter.get_total_flops() == once // among
            out.sum().backward()
        assert counter.get_total_flops() == 3 * once // among
    assert out.shape == x.shape
    assert all(t.grad is not None for t in (x, factors, wide, narrow))
