"""What the model is given, beside the stream, that meets what the ranks share out."""

from __future__ import annotations

from typing import Any

import torch

from tpplan.comm import Site, Transition, copy_in
from tpplan.places import taken
from tpplan.roles.lowered import Lowered
from tpplan.roles.sequence import replaced


class Given(Lowered):
    """Masks, angles, coordinates: of the gradient of each, a rank makes a part.

    They are summed where somebody asks for them; else nothing is sent.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        for argument in state.plan.given:
            x = taken(argument, args, kwargs)
            if isinstance(x, torch.Tensor) and x.requires_grad and torch.is_grad_enabled():
                site = Site(state.plan.path, f"gradient of '{argument}'")
                whole = copy_in(x, Transition(state.stream.group, site, site))
                args, kwargs = replaced(argument, whole, args, kwargs)
        return super().forward(*args, **kwargs)
