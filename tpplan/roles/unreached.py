"""Modules that no call reached with which the plan was compiled: cut by their rules, never run."""

from __future__ import annotations

from typing import Any

from tpplan.roles.lowered import Lowered


class Unreached(Lowered):
    """Holds its part of the parameters; how it would be run was not seen, nor proved."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = self._tpplan
        if state.stream.shared is None and state.alone:
            with self._tpplan_whole():
                return super().forward(*args, **kwargs)
        raise RuntimeError(
            f"{state.plan.path}: no call came to it when the plan was compiled, so what it does "
            "with a rank's part is not known; add a call that does to the list of inputs="
        )
