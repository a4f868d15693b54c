"""The search: variants are proposed, and the compiler's proof takes or refuses them.

What seems best is tried for the whole model. Where that is refused, each sharded region is tried by
itself, with all else whole; then all of them together, in plain tensor parallelism and with the
stream sharded along the sequence. What is refused goes to its next variant: the one that the
diagnostic's line is of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from tpplan.language import PlanError
from tpplan.models import RUNNABLE, size_of
from tpplan.observe.mates import LISTS
from tpplan.planner.known import Known
from tpplan.planner.match import folded
from tpplan.styles import named
from tpplan.styles.attention import ATTENTION
from tpplan.suggestion.anatomy import Anatomy
from tpplan.suggestion.draft import WHOLE, Decision, Slot
from tpplan.suggestion.layouts import GATHERED, ON_ROWS
from tpplan.suggestion.patterns import Names, patterns_of
from tpplan.suggestion.text import plan_from, written
from tpplan.suggestion.trial import examine, first_line

_ROUNDS = 60
_AGAIN = 2
_REDUCED = Decision(ATTENTION.name, {"reduce": "here"})
Say = Callable[[str], None]


@dataclass
class Search:
    """The state of one search; ``run`` leaves the slots at what was taken.

    Attributes:
        model: the one that variants are tried on, with few layers; tp: the ranks to share it.
        keys: entries of the plan beside its rules.
        without: why the stream cannot be sharded along the sequence; "" where it can.
        tried: how many plans were compiled; memory: what their regions had in common.
    """

    model: nn.Module
    anatomy: Anatomy
    tp: int
    inputs: Any
    say: Say
    without: str = ""
    tried: int = 0
    keys: dict[str, object] = field(default_factory=dict)
    memory: Known = field(default_factory=Known)

    def __post_init__(self) -> None:
        self.names = Names(self.model)
        self.joined: dict[str, Decision] = {}
        self.summing: list[str] = []
        self.proved: set[tuple[str, bool]] = set()
        self.known = {*self.names.modules.values(), *self.names.tensors}
        self.held = {name: p.numel() for name, p in self.model.named_parameters()}

    def run(self) -> None:
        """Settle all slots.

        Raises:
            PlanError: where even what is left cannot be proved.
        """
        self.say("trying what seems best")
        # what is left whole is held whole where it is tried, for which a model can be too large
        if size_of(self.model) <= RUNNABLE and not self.holds(self.decisions(), False):
            self._settle_regions()
        self._settle(False)
        self._go_back(False)
        self._sum_up()
        before = [slot.at for slot in self.anatomy.slots]
        for keys in self._stacks():
            self.keys = keys
            try:
                self._settle(True)
                self._go_back(True)
            except PlanError as error:
                self.without, self.joined = self.without or first_line(error), {}
                self._put_back(before)
            else:
                self.without = ""
                self._join()
                return
        self.keys = {}

    def _sum_up(self) -> None:
        """Reduce what modules make of the members of a list, as of experts, once and there."""
        lists = {p for p, m in self.model.named_modules() if isinstance(m, LISTS)}
        members: dict[str, set[str]] = {}
        for path, decision in self.decisions().items():
            steps = path.split(".") if named(decision.style).sums else []
            for n in range(1, len(steps)):
                if (held := ".".join(steps[:n])) in lists:
                    members.setdefault(held, set()).add(steps[n])
        owners = dict.fromkeys(p.rpartition(".")[0] for p, few in members.items() if len(few) > 1)
        inside = tuple(f"{path}." for path in self.anatomy.elements)
        self.summing = [owner for owner in owners if owner.startswith(inside)]
        if self.summing and not self.holds(self.decisions(), False):
            self.summing = []

    def _join(self) -> None:
        """Give modules outside of the layers whose own code uses parameters one rule, on rows.

        It stands for the rules of their parts, where that is proved: a part that is whole is given
        all rows, which costs a gather.
        """
        owners = dict.fromkeys(p.rpartition(".")[0] for p in self.decisions() if p in self.held)
        for owner in owners:
            outer = (*self.anatomy.elements, *self.joined)
            inside = any(owner.startswith(f"{other}.") for other in outer)
            if inside or self._holds_elements(owner):
                continue
            self.joined[owner] = ON_ROWS
            if not all(self.holds(self.decisions(), mode) for mode in (True, False)):
                del self.joined[owner]

    def _stacks(self) -> Iterator[dict[str, object]]:
        """Entries of the plan that name the stack, where it is not found without."""
        yield {}
        elements = dict.fromkeys(self.anatomy.elements, WHOLE)
        patterns = patterns_of({p: d for p, d in elements.items() if p in self.known}, self.names)
        if len(patterns) == 1:
            yield {"layers": patterns[0][0]}
        yield from self._rows_called_by(elements)

    def _rows_called_by(self, owners: Iterable[str]) -> Iterator[dict[str, object]]:
        """As the stack what runs on rows in modules whose own code calls projections, too.

        That code needs all rows then. It may be the layers', or that of modules in these.
        """
        styled = [(path, named(d.style)) for path, d in self.decisions().items()]
        calling = {p.rpartition(".")[0] for p, style in styled if style.columns}
        calling.intersection_update(owners)
        rows = {p for p, style in styled if style.rows and p.rpartition(".")[0] in calling}
        patterns = patterns_of({p: WHOLE for p, _ in styled if p in rows & self.known}, self.names)
        if len(patterns) == 1:
            yield {"layers": patterns[0][0]}

    def decisions(self) -> dict[str, Decision]:
        """Path -> its rule, for the whole model, in the order of its modules."""
        slots, found = self.anatomy.slots, dict[str, Decision]()
        for slot in slots:
            found.update(slot.decisions())
        # what is in a module that is left whole is whole with it
        around = tuple(f"{path}." for s in slots if s.left_whole for path in s.decisions())
        inside = {p for s in slots if not s.region for p in s.paths if p.startswith(around)}
        found = {path: decision for path, decision in found.items() if path not in inside}
        found.update(dict.fromkeys(self.summing, _REDUCED))
        for owner, decision in self.joined.items():
            found = {p: d for p, d in found.items() if not p.startswith(f"{owner}.")}
            found[owner] = decision
        return found

    def holds(self, decisions: Mapping[str, Decision], sequence_parallel: bool) -> bool:
        """Whether other decisions are proved as well."""
        return self._refused(decisions, sequence_parallel) is None

    def on(self, model: nn.Module) -> Search:
        """The same on another model of the same slots."""
        return self if model is self.model else replace(self, model=model)

    def prove(self, decisions: Mapping[str, Decision], sequence_parallel: bool) -> None:
        """Compile decisions and run them on simulated ranks, once.

        Raises:
            PlanError: where either refuses them.
        """
        kept = {path: d for path, d in decisions.items() if path in self.known}
        text, self.where = written(kept, self.names, self.keys)
        if (text, sequence_parallel) in self.proved:
            return
        self.tried += 1
        examine(self.model, plan_from(text), self.tp, sequence_parallel, self.inputs, self.memory)
        self.proved.add((text, sequence_parallel))

    def with_little_whole(
        self, share: float, most: int
    ) -> Iterator[tuple[str, dict[str, Decision]]]:
        """The decisions with something whole that has few of the parameters, and its name.

        Args:
            share: of all parameters, how many it has at most; most: how many such there are.
        """
        total = sum(self.held.values())
        small = [
            slot
            for slot in self.anatomy.slots
            if slot.region and not slot.left_whole and self._size(slot) < share * total
        ]
        for slot in small[:most]:
            at, slot.at = slot.at, slot.sharded
            try:
                yield slot.name, self.decisions()
            finally:
                slot.at = at

    def _size(self, slot: Slot) -> int:
        """How many numbers its parameters have."""
        paths = slot.paths
        return sum(n for name, n in self.held.items() if {name, name.rpartition(".")[0]} & paths)

    # --- one region

    def _settle_regions(self) -> None:
        """Each by itself; those that differ by numbers alone, as a list's, together if they can."""
        regions = [slot for slot in self.anatomy.slots if slot.region]
        regions.sort(key=lambda slot: not slot.stacked)  # they are sharded where others are tried
        alike: dict[str, list[Slot]] = {}
        for slot in regions:
            alike.setdefault(folded(slot.name), []).append(slot)
        for slots in alike.values():
            if len(slots) == 1 or not self._hold_alone(slots):
                for slot in slots:
                    self.settle_alone(slot)
        for slot in [s for s in regions if s.left_whole]:
            if not all(other.left_whole for other in regions):
                self._settle_beside(slot)

    def _hold_alone(self, slots: Sequence[Slot]) -> bool:
        """Whether regions are proved where all else is whole."""
        self.say(f"trying {folded(slots[0].name)}")
        decisions = self.others(*slots)
        for slot in slots:
            decisions.update(slot.decisions())
        return self.holds(decisions, False)

    def settle_alone(self, slot: Slot) -> None:
        """Go to the first variant of a region that is proved where all else is whole."""
        self.say(f"trying {slot.name}")
        others = self.others(slot)
        while True:
            error = self._refused({**others, **slot.decisions()}, False)
            if error is None or not slot.advance(first_line(error)):
                return

    def _settle_beside(self, slot: Slot) -> None:
        """The same beside others as they were taken, which may not be right when they are whole."""
        taken, others = slot.at, self.others(slot, settled=True)
        for at in range(min(slot.sharded, _AGAIN)):
            slot.at = at
            if self._refused({**others, **slot.decisions()}, False) is None:
                slot.refused = slot.refused[:at]
                return
        slot.at = taken

    def others(self, *slots: Slot, settled: bool = False) -> dict[str, Decision]:
        """All but some regions, whole.

        Args:
            settled: whether those that were settled are as they were taken.
        """
        found: dict[str, Decision] = {}
        own = frozenset[str]().union(*(slot.paths for slot in slots))
        for other in self.anatomy.slots:
            taken = other.stacked or (settled and other.region and not other.left_whole)
            if other not in slots and taken:
                found.update(other.decisions())  # experts that are whole hang on numbers
            elif other not in slots:
                # of what is around them, which may be around these too, nothing is said
                roles = [r for r, d in other.variants[0].items() if not named(d.style).heads]
                held = {p for role in roles or other.variants[-1] for p in other.members[role]}
                found.update(dict.fromkeys(held - own, WHOLE))
        return found

    # --- all of them

    def _settle(self, sequence_parallel: bool) -> None:
        self.say("all of it, " + ("with" if sequence_parallel else "without") + " the sequence cut")
        before = [slot.at for slot in self.anatomy.slots]
        first: PlanError | None = None
        for _ in range(_ROUNDS):
            error = self._refused(self.decisions(), sequence_parallel)
            if error is None:
                return
            if first is None and sequence_parallel and self._stands_within(error):
                return
            first = first or error
            if self._repair(error, sequence_parallel):
                continue
            if not sequence_parallel or not self._start_over(before, first):
                break
            before = [slot.at for slot in self.anatomy.slots]
        assert first is not None
        raise first

    def _stands_within(self, error: PlanError) -> bool:
        """Whether it is right with the stack in the module in whose code it stopped."""
        before = self.keys
        owners = {path.rpartition(".")[0] for path in error.diagnostics[0].about}
        for keys in self._rows_called_by(owners.difference(self.anatomy.elements)):
            self.keys = keys
            if self.holds(self.decisions(), True):
                return True
        self.keys = before
        return False

    def _go_back(self, sequence_parallel: bool) -> None:
        """Earlier variants of what went on without need; a region was tried by itself."""
        for slot in self.anatomy.slots:
            taken = slot.at
            for at in range(0 if not slot.region else taken, taken):
                slot.at = at
                if self._refused(self.decisions(), sequence_parallel) is None:
                    break
                slot.at = taken

    def _repair(self, error: PlanError, sequence_parallel: bool) -> bool:
        """Another variant for what was complained of.

        Args:
            sequence_parallel: for which no region is left whole that is sharded without.
        """
        for diagnostic in error.diagnostics:
            places = [diagnostic.position, *(place for _, place in diagnostic.related)]
            for place in places:
                paths = self.where.get(place.line, ()) if place is not None else ()
                for slot in self._slots_of(paths):
                    if sequence_parallel and slot.at + 1 == slot.sharded:
                        continue
                    if slot.advance(diagnostic.message):
                        return True
        outside = [s for s in self.anatomy.slots if not s.region and self._is_outside(s)]
        return any(slot.advance(first_line(error)) for slot in reversed(outside))

    def _start_over(self, before: Sequence[int], error: PlanError) -> bool:
        """Once more from where the slots were, with something else for what was wrong first."""
        self._put_back(before)
        return any(self._give_rows(d.about, error) for d in error.diagnostics)

    def _put_back(self, before: Sequence[int]) -> None:
        for slot, at in zip(self.anatomy.slots, before, strict=True):
            slot.at, slot.refused = at, slot.refused[:at]

    def _give_rows(self, paths: Sequence[str], error: PlanError) -> bool:
        """Give modules without a rule all rows: with the region around them, or by themselves."""
        if any(self._holds_elements(path) for path in paths):
            return False
        owners = {path.rpartition(".")[0] for path in paths}
        within = tuple(f"{path}." for path in owners if not self._holds_elements(path))
        around = [slot for slot in self.anatomy.slots if slot.region and slot.within(within)]
        for slot in around:
            taken = slot.at
            while slot.at + 1 < slot.sharded and slot.advance(first_line(error)):
                if self._says_other(error):
                    return True
            slot.at, slot.refused = taken, slot.refused[:taken]
        inside = tuple(f"{path}." for path in paths)
        if any(not s.left_whole and s.within(inside) for s in self.anatomy.slots if s.region):
            return False
        self.joined.update(dict.fromkeys(paths, GATHERED))
        if self._says_other(error):
            return True
        self.joined = {p: d for p, d in self.joined.items() if p not in paths}
        return False

    def _says_other(self, error: PlanError) -> bool:
        """Whether something else is wrong now with the sequence cut, or nothing."""
        now = self._refused(self.decisions(), True)
        return now is None or first_line(now) != first_line(error)

    def _holds_elements(self, path: str) -> bool:
        """Whether a module is an element of the stack, or around some."""
        return not path or any(f"{e}.".startswith(f"{path}.") for e in self.anatomy.elements)

    def _is_outside(self, slot: Slot) -> bool:
        inside = tuple(f"{path}." for path in self.anatomy.elements)
        return not slot.within(inside)

    def _slots_of(self, paths: Iterable[str]) -> list[Slot]:
        wanted = set(paths)
        return [s for s in self.anatomy.slots if not wanted.isdisjoint(s.decisions())]

    def _refused(
        self, decisions: Mapping[str, Decision], sequence_parallel: bool
    ) -> PlanError | None:
        """What is said of a plan; None of one that is proved."""
        try:
            self.prove(decisions, sequence_parallel)
        except PlanError as error:
            return error
        return None
