"""Real values of ids, positions and masks in a run that is otherwise on fake tensors.

Models look at them: whether a batch is padded, whether positions begin again, which rows an expert
gets. On fake tensors that code either fails or takes a way that no real run takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tpplan.compat import FakeTensor, NeedsValuesError, Uncompiled, without_fakes
from tpplan.simulate.recorder import tensors_in

_LARGEST = 2**20
"""Elements; what is larger (a mask for each pair of tokens) stays fake."""


class RealValues(Uncompiled):
    """Has ops on real tensors alone compute, where their results are small.

    To be entered after the fake mode. Tensors that are made of nothing count as real where they
    are not floating: positions, masks.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        kwargs = kwargs or {}
        if any(isinstance(t, FakeTensor) for t in args):  # most ops
            return func(*args, **kwargs)
        given = tensors_in((args, kwargs))
        random = torch.Tag.nondeterministic_seeded in func.tags
        if func.namespace != "aten" or random or any(isinstance(t, FakeTensor) for t in given):
            return func(*args, **kwargs)
        if not func._schema.is_mutable:
            try:
                out = func(*args, **kwargs)
            except NeedsValuesError:
                out, made = None, []
            else:
                made = tensors_in(out)
                if not given and any(t.is_floating_point() for t in made):
                    return out
            if any(t.numel() > _LARGEST for t in made):
                return out
        with without_fakes():
            return func(*args, **kwargs)
