"""How ranks share the experts of a mixture: each expert's columns, whole experts, or both at once.

Tensor-parallel ranks have the same tokens, ranks of ``ep`` others: these have whole experts, of
which the former have their part as the plan says.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from tpplan.observe.experts import shared_experts
from tpplan.observe.thin_experts import NotStackedError, Stacked
from tpplan.observe.trace import Call, Trace
from tpplan.planner.attributes import assign, integers, named_in_code
from tpplan.planner.known import Known
from tpplan.styles import divisors


class NotOverEpError(NotStackedError):
    """The ranks of ep cannot share the experts; ``hint``: what to do."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class Sharing:
    """The experts of one module, and the ranks that are to share them."""

    def __init__(
        self, module: nn.Module, call: Call, trace: Trace, tp: int, ep: int, known: Known
    ) -> None:
        self.module, self.call, self.trace, self.tp, self.ep = module, call, trace, tp, ep
        self.known = known
        # what runs the experts may not be code of their class
        self.numbers = {**integers(vars(module)), **named_in_code(module)}

    def found(self, whole: bool) -> Stacked:
        """What each rank has.

        Args:
            whole: whether tensor-parallel ranks have whole experts.

        Raises:
            NotStackedError: where they cannot share them; ``NotOverEpError`` where it is those of
                ep that cannot.
        """
        if self.ep == 1:
            return self._shared(self.tp, whole)
        if self.tp == 1:
            apart = self._apart(self.ep)
            few = None if apart.thin is None else replace(apart.thin, cut={})
            return replace(apart, cut={}, thin=few)
        if whole:
            return self._apart(self.ep * self.tp)
        return _both(self._shared(self.tp, False), self._apart(self.ep))

    def _shared(self, ranks: int, whole: bool) -> Stacked:
        module, call, trace = about = self.module, self.call, self.trace
        how = self.numbers, ranks, assign, whole
        return self.known.once(
            about,
            ("shared", ranks, whole),
            lambda: shared_experts(module, call, trace, *how),
        )

    def _apart(self, ranks: int) -> Stacked:
        """Whole experts for each of so many ranks."""
        held = (p for p in self.module._parameters.values() if p is not None and p.dim() >= 3)
        count = max(p.shape[0] for p in held)
        if count % ranks:
            sizes, fit = f"ep {self.ep}", "ep"
            if ranks != self.ep:
                sizes, fit = f"ep {self.ep} times tp {self.tp}", "ep times tp"
            message = f"{sizes} does not divide the {count} experts there are"
            raise NotOverEpError(message, f"{fit} may be {divisors(count)}")
        try:
            return self._shared(ranks, True)
        except NotStackedError as error:
            hint = "use the ranks of 'ep' for data parallelism, or for tp, which shares each expert"
            raise NotOverEpError(f"ep {self.ep}: {error}", hint) from error


def _both(inner: Stacked, apart: Stacked) -> Stacked:
    """Of whole experts, the columns that a tensor-parallel rank has."""
    few = inner.thin
    if few is not None and apart.thin is not None:
        own = [name for name in apart.attributes if name not in inner.attributes]
        counts = {name: apart.thin.attributes[name] for name in own}
        few = replace(few, attributes={**few.attributes, **counts})
    return replace(inner, attributes={**apart.attributes, **inner.attributes}, thin=few)
