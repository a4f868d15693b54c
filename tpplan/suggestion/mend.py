"""What would be right in the place of rules that were refused: searched, and proved with the rest.

The regions that are complained of are searched as for a plan that nobody wrote; what is found is
put into the user's plan, and what need not change is put back. Only what the compiler and the
proof take together with the rest of the plan is said.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from tpplan.language import Diagnostic, Plan, PlanError, Rule, as_written
from tpplan.models import RUNNABLE, size_of
from tpplan.planner import compile_plan
from tpplan.planner.match import match
from tpplan.suggestion.draft import Decision, Slot
from tpplan.suggestion.patterns import Names, patterns_of
from tpplan.suggestion.search import Say, Search
from tpplan.suggestion.short import shortened, stand_in
from tpplan.suggestion.text import rule_text, rules_from
from tpplan.suggestion.trial import examine, first_line

_ROUNDS = 24
_SECONDS = 60.0
"""How long is searched: an error need not wait for more."""


@dataclass(frozen=True)
class Edit:
    """What becomes of one rule of a plan.

    Attributes:
        rule: None where one is to be added.
        lines: the rules in its place, as a plan has them; none where it is to be left out.
    """

    rule: Rule | None
    lines: tuple[tuple[str, Decision], ...]

    def __str__(self) -> str:
        if not self.lines:
            return "to leave this rule out"
        told = " and ".join(f"`{rule_text(text, decision)}`" for text, decision in self.lines)
        return told if self.rule is not None else f"to add {told}"


def mended(
    model: nn.Module,
    plan: Plan,
    error: PlanError,
    tp: int,
    sequence_parallel: bool | None = None,
    inputs: Any = None,
    told: Say = lambda _: None,
) -> PlanError:
    """The error by which a plan was refused, with rules that would be right, if any are found.

    Args:
        told: is told what is being done.
    """
    matches, wrong = match(plan, model)
    if wrong or matches.adapted or tp < 2:
        return error
    rules = {**matches.modules, **matches.parameters, **matches.buffers}
    try:
        edits = _Mending(model, plan, rules, tp, sequence_parallel, inputs, told).run(error)
    except PlanError:  # nothing can be said of the model
        return error
    return PlanError(_with(error.diagnostics, edits)) if edits else error


class _Mending:
    """The state of one search for what is wrong with a plan.

    Attributes:
        rules: the plan's, by the path that each speaks of.
        faulty: the slots whose rules are exchanged; fine: those that need not be;
            loose: what has rules that are left out, as they say nothing.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        rules: Mapping[str, Rule],
        tp: int,
        sequence_parallel: bool | None,
        inputs: Any,
        told: Say,
    ) -> None:
        self.model, self.plan, self.rules = model, plan, rules
        self.tp, self.inputs, self.told = tp, inputs, told
        self.rows = plan.sequence_parallel if sequence_parallel is None else sequence_parallel
        self.until = time.monotonic() + _SECONDS
        self.names = Names(model)
        told("looking for what would be right")
        _, short, anatomy = shortened(model, inputs, tp)
        self.slots = anatomy.slots
        self.small = stand_in(model, short, anatomy, inputs, tp)
        self.search = Search(self.small, anatomy, tp, inputs, told)
        self.faulty: list[Slot] = []
        self.fine: list[Slot] = []
        self.loose: set[str] = set()

    def run(self, error: PlanError) -> list[Edit]:
        """The edits with which the plan holds; none where none were found."""
        for _ in range(_ROUNDS):
            if not self._another(error):
                return []
            changes = self._changes()
            refused = self._refused(self._edited(changes), self.rows)
            if refused is None:
                return self._needed(changes)
            error = refused
        return []

    # --- what is at fault

    def _another(self, refused: PlanError) -> bool:
        """Exchange something more, or once more; whether there was anything."""
        why = first_line(refused)
        blamed = [slot for d in refused.diagnostics for slot in self._about(d)]
        regions = [slot for slot in self.slots if slot.region]
        known = [slot for slot in blamed if slot in self.faulty]
        new = [slot for slot in (*blamed, *regions) if slot not in self.faulty]
        # what is missing may be so for several
        single = [slot for slot in dict.fromkeys(new) if not slot.region]
        exchanged = [self._exchange(slot, why) for slot in single]
        if any(exchanged):
            return True
        if any(self._exchange(slot, why) for slot in dict.fromkeys((*new, *known))):
            return True
        held = frozenset[str]().union(*(slot.paths for slot in self.slots))
        told = {path for d in refused.diagnostics for path in d.about if path in self.rules}
        loose = told - held - self.loose
        self.loose |= loose
        return bool(loose)

    def _about(self, diagnostic: Diagnostic) -> list[Slot]:
        """The slots that a diagnostic speaks of, else those inside of what it speaks of."""
        places = [diagnostic.position, *(place for _, place in diagnostic.related)]
        lines = {(place.file, place.line) for place in places if place is not None}
        paths = {*diagnostic.about}
        paths.update(path for path, rule in self.rules.items() if lines & _lines(rule))
        paths.update(path.rpartition(".")[0] for path in [*paths] if path in self.names.tensors)
        found = [slot for slot in self.slots if slot.paths & paths]
        within = tuple(f"{path}." for path in diagnostic.about if path)
        return found or [s for s in self.slots if s.within(within)]

    def _exchange(self, slot: Slot, why: str) -> bool:
        """Whether there is something else for a slot; the rules that it has, or had, are wrong."""
        if slot in self.fine or time.monotonic() > self.until:
            return False
        if slot in self.faulty:
            return slot.advance(why) and not slot.left_whole
        if slot.region and size_of(self.small) <= RUNNABLE:
            if self._own_holds(slot):
                self.fine.append(slot)
                return False
            self.search.settle_alone(slot)
        self.faulty.append(slot)
        return not slot.left_whole and (bool(self._changes()) or slot.advance(why))

    def _own_holds(self, slot: Slot) -> bool:
        """Whether the plan's own rules for a region are right where all else is whole."""
        own = {path: _decision(self.rules[path]) for path in slot.paths if path in self.rules}
        lines = {**self.search.others(slot), **own}
        kept = [(path, lines[path]) for path in lines if path in self.search.known]
        return self._refused(replace(self.plan, rules=rules_from(kept)), False) is None

    # --- what it may be exchanged for

    def _changes(self) -> dict[str, Decision | None]:
        """Path -> its other rule; None for none at all."""
        found: dict[str, Decision | None] = dict.fromkeys(sorted(self.loose))
        for slot in self.faulty:
            chosen = slot.decisions()
            for path in sorted(slot.paths, key=self.names.places.__getitem__):
                wanted = chosen[path].because("") if path in chosen else None
                rule = self.rules.get(path)
                own = None if rule is None else _decision(rule)
                if _normal(own) != _normal(wanted):
                    found[path] = wanted
        return found

    def _edits(self, changes: Mapping[str, Decision | None]) -> list[Edit]:
        """The rules of the plan that change, and those to be added."""
        edits = []
        for rule in self.plan.rules:
            of = [path for path, own in self.rules.items() if own is rule]
            if changes.keys().isdisjoint(of):
                continue
            wanted = {path: changes.get(path, _decision(rule)) for path in of}
            edits.append(Edit(rule, self._lines(wanted, rule.pattern.text)))
        added = {path: d for path, d in changes.items() if path not in self.rules}
        return [*edits, *([Edit(None, self._lines(added))] if added else [])]

    def _lines(
        self, wanted: Mapping[str, Decision | None], pattern: str = ""
    ) -> tuple[tuple[str, Decision], ...]:
        """Rules for paths: of one pattern, where all of them are to have the same."""
        kept = {path: d for path, d in wanted.items() if d is not None}
        first = next(iter(kept.values()), None)
        if pattern and first is not None and all(wanted[p] == first for p in wanted):
            return ((pattern, first),)
        return tuple((text, d) for text, d, _ in patterns_of(kept, self.names))

    def _edited(self, changes: Mapping[str, Decision | None]) -> Plan:
        edits = self._edits(changes)
        gone = {id(edit.rule) for edit in edits}
        kept = tuple(rule for rule in self.plan.rules if id(rule) not in gone)
        new = rules_from(line for edit in edits for line in edit.lines)
        return replace(self.plan, rules=kept + new)

    def _refused(self, plan: Plan, rows: bool) -> PlanError | None:
        """What is said of a plan on the model that plans are tried on."""
        # which has few of the layers
        rules = tuple(replace(rule, optional=True) for rule in plan.rules)
        try:
            plan = replace(plan, rules=rules)
            examine(self.small, plan, self.tp, rows, self.inputs, self.search.memory)
        except PlanError as error:
            return error
        return None

    def _needed(self, changes: dict[str, Decision | None]) -> list[Edit]:
        """The edits, without those that the plan holds without."""
        groups: dict[object, list[str]] = {}
        for path, decision in changes.items():
            groups.setdefault((id(self.rules.get(path)), repr(decision)), []).append(path)
        for paths in groups.values():
            less = {path: d for path, d in changes.items() if path not in paths}
            in_time = time.monotonic() < self.until
            if less and in_time and self._refused(self._edited(less), self.rows) is None:
                changes = less
        if self.small is not self.model:
            compile_plan(self.model, self._edited(changes), self.tp, self.rows, inputs=self.inputs)
        return self._edits(changes)


def _decision(rule: Rule) -> Decision:
    return Decision(rule.style, as_written(rule.options))


def _normal(decision: Decision | None) -> object:
    """Equal for what means the same, however it is written."""
    if decision is None:
        return None
    (rule,) = rules_from([("x", decision)])
    return rule.style, rule.options


def _lines(rule: Rule) -> set[tuple[str, int]]:
    """The file and line of a rule, and of its options."""
    places = (rule.position, *rule.option_positions.values())
    return {(place.file, place.line) for place in places}


def _with(diagnostics: Sequence[Diagnostic], edits: Sequence[Edit]) -> list[Diagnostic]:
    """The diagnostics, with each edit as the help of that at its rule, or a note of the first."""
    found = list(diagnostics)
    told: dict[int, list[str]] = {}
    notes = []
    for edit in edits:
        lines = set() if edit.rule is None else _lines(edit.rule)
        at = next((i for i, d in enumerate(found) if _place(d) in lines), None)
        if at is not None and not edit.lines and found[at].hint:
            at = None  # who keeps the rule needs that help
        if edit.rule is not None and at is None:
            notes.append((f"did you mean {edit}?", edit.rule.position))
        else:
            told.setdefault(at or 0, []).append(str(edit))
    for at, texts in told.items():
        hint = f"did you mean {', and '.join(texts)}? With that the plan holds"
        found[at] = replace(found[at], hint=hint)
    if not told:
        text, place = notes[-1]
        notes[-1] = (f"{text} With that the plan holds", place)
    found[0] = replace(found[0], related=(*found[0].related, *notes))
    return found


def _place(diagnostic: Diagnostic) -> tuple[str, int] | None:
    place = diagnostic.position
    return None if place is None else (place.file, place.line)
