"""Modules whose own code runs as in evaluation, also in training."""

from __future__ import annotations

from typing import Any

from tpplan.roles.lowered import Lowered


class AsInEvaluation(Lowered):
    """Its own code finds ``training`` false; that of the modules inside is left as it is.

    State-space layers have a path for training that hands the weights of all their layers to one
    fused function, which knows of one rank only.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        training = self.training
        self.training = False
        try:
            return super().forward(*args, **kwargs)
        finally:
            self.training = training
