"""What a chain of complaints follows from: the one rule that is likely to be wrong.

A projection that is left whole makes the row-parallel layer after it complain; a row-parallel layer
that is left whole makes every layer after it. What is named here is the layer where columns, or
their sum, are missing; what the rest of the compiler says of others is put under it.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterable, Mapping
from dataclasses import replace

from torch import nn

from tpplan.language import Diagnostic, Rule
from tpplan.observe.trace import Call, Trace
from tpplan.planner.flow import Flow
from tpplan.planner.infer import nearest, sources
from tpplan.planner.match import fold
from tpplan.styles import NONE, Style
from tpplan.styles.colwise import COLWISE
from tpplan.styles.replicate import REPLICATE
from tpplan.styles.rowwise import ROWWISE

_SHOWN = 2


class Causes:
    """Looks for it in the flow of tensors."""

    def __init__(
        self,
        model: nn.Module,
        trace: Trace,
        rules: Mapping[str, Rule],
        styles: Mapping[str, Style],
        elements: Container[str],
    ) -> None:
        self.elements = elements
        self.trace, self.rules, self.styles = trace, rules, styles
        self.calls = {call.path: call for call in reversed(trace.calls)}
        self.products = {
            path
            for path in self.calls
            if not isinstance(module := model.get_submodule(path), nn.Embedding)
            and any(p is not None and p.dim() > 1 for p in module._parameters.values())
        }

    def of(self, flow: Flow) -> Diagnostic | None:
        """The first one there is; None where each complaint stands for itself."""
        found = itertools.chain(
            (self._whole(path) for path in flow.unsharded),
            (
                self._unreduced(self.calls[path], ()) or self._spread(path, flow.twice)
                for path in flow.twice
            ),
            (self._unreduced(self.calls[p], self.calls[p].outputs) for p in flow.unreduced),
            (self._left(self.calls[path]) for path in flow.unreduced),
        )
        return next((cause for cause in found if cause is not None), None)

    def _whole(self, path: str) -> Diagnostic | None:
        """Projections that make the whole of what a row-parallel layer takes by columns."""
        made = [
            other
            for other in self._before(self.calls[path], ())
            if not (self._style(other).columns or self._style(other).sums)
        ]
        hint = f"make it {COLWISE.name}, or {fold([path])} {REPLICATE.name}"
        message = f"makes the whole of what {fold([path])} ({ROWWISE.name}) takes by columns"
        return self._about(made, message, hint)

    def _unreduced(self, call: Call, outputs: Iterable[int]) -> Diagnostic | None:
        """Layers that mix columns which other ranks have the rest of."""
        before = self._before(call, outputs)
        scattered = [
            p for p in before if p in self.rules and self._style(p).scatters(self.rules[p].options)
        ]
        if scattered:
            return self._columns(scattered, [call.path])
        made = [
            other
            for other in before
            if not (self._style(other).columns or self._style(other).sums)
            and sources(self.trace, self.calls[other], self.styles)
        ]
        if not made:
            return None
        columns = fold(sources(self.trace, self.calls[made[0]], self.styles))
        hint = f"make it {ROWWISE.name}, or {columns} {REPLICATE.name}"
        return self._about(made, f"takes the columns of {columns}, and nothing sums it", hint)

    def _spread(self, path: str, twice: Mapping[str, object]) -> Diagnostic | None:
        """One rule whose columns reach layers of several others, which take what is whole."""
        makers = sources(self.trace, self.calls[path], self.styles)
        reached = {
            self.rules[other].pattern.text: other
            for other in twice
            if set(makers) & set(sources(self.trace, self.calls[other], self.styles))
        }
        heads = all(
            self._style(other).vocabulary and not self._in_stack(other)
            for other in reached.values()
        )
        one = len({self.rules[maker].pattern.text for maker in makers}) == 1
        if not one or (len(reached) < 2 and not heads):
            return None
        return self._columns(makers, reached.values())

    def _left(self, call: Call) -> Diagnostic | None:
        """Column-parallel layers whose columns leave the stack, or the model."""
        return self._columns(sources(self.trace, call, self.styles, given_out=True), [])

    def _columns(self, makers: list[str], reached: Iterable[str]) -> Diagnostic | None:
        where = fold(reached) or "the end of the model"
        message = f"its columns reach {where}, and nothing sums them"
        return self._about(makers, message, f"end its region with a {ROWWISE.name} layer")

    def _in_stack(self, path: str) -> bool:
        around = self.trace.ancestors(self.calls[path].index)
        return any(call.path in self.elements for call in around)

    def _style(self, path: str) -> Style:
        return self.styles.get(path, NONE)

    def _before(self, call: Call, outputs: Iterable[int]) -> list[str]:
        """The nearest products before a call, or before what it gave."""
        given = set(outputs)
        upto = call.last_op if given else call.first_op
        given = given or {n for n in call.arguments if n in self.trace.floating}
        ends = {
            n: other.path
            for other in self.trace.calls
            if other.index != call.index
            and (other.path in self.products or self._style(other.path).vocabulary)
            for n in other.outputs
        }
        return [p for p in nearest(self.trace, given, upto, ends) if p in self.products]

    def _about(self, paths: list[str], message: str, hint: str) -> Diagnostic | None:
        """At the rule of the first of them, of all that it speaks of."""
        rule = self.rules.get(paths[0]) if paths else None
        if rule is None:
            return None
        alike = [path for path in self.rules if self.rules[path] is rule]
        message = f"{fold(alike)}: {rule.style}: {message}"
        return Diagnostic(message, rule.position, hint, about=tuple(alike))


def led(cause: Diagnostic, rest: Iterable[Diagnostic]) -> Diagnostic:
    """A cause, with the first of what follows from it under it."""
    follows = [(f"so {d.message}", d.position) for d in rest if d.position is not None]
    more = len(follows) - _SHOWN
    hint = f"{cause.hint}; {more} more complaints follow from it" if more > 0 else cause.hint
    return replace(cause, related=tuple(follows[:_SHOWN]), hint=hint)
