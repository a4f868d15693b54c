"""Problems found while compiling, each at the rule it is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from tpplan.language import Diagnostic, Plan, PlanError, Position, Rule
from tpplan.planner.match import Matches, fold


class Complaints:
    """Collects diagnostics; all of them are raised at once."""

    def __init__(self, plan: Plan, matches: Matches, wrong: list[Diagnostic]) -> None:
        self.plan, self.matches, self.wrong = plan, matches, wrong

    def stop_if_any(self) -> None:
        """Raise what was collected.

        Raises:
            PlanError: with all of it.
        """
        if self.wrong:
            raise PlanError(self.wrong)

    def say(self, message: str, position: Position | None = None, hint: str | None = None) -> None:
        """Something that is about no module in particular; the same thing is said once."""
        found = Diagnostic(message, position, hint)
        if found not in self.wrong:
            self.wrong.append(found)

    def about(
        self,
        rule: Rule | None,
        paths: Iterable[str],
        message: str,
        hint: str | None = None,
        related: tuple[tuple[str, Position], ...] = (),
        option: str = "",
    ) -> None:
        """Something about modules, at the rule that is to blame, or at an option of it."""
        position = self.position_of("rules:") if rule is None else rule.position
        if rule is not None:
            position = rule.option_positions.get(option, position)
        about = tuple(paths)
        found = Diagnostic(f"{fold(about)}: {message}", position, hint, related, about)
        self.wrong.append(found)

    def position_of(self, key: str) -> Position:
        """Where a top-level key of the plan is: the place for what no rule is to blame for."""
        for number, line in enumerate(self.plan.text.splitlines(), start=1):
            if line.startswith(key):
                return Position(self.plan.path or self.plan.name, number, 1, line, len(key))
        return self.plan.rules[0].position

    def by_rule(self, found: Mapping[str, str], hint: str | None = None, option: str = "") -> None:
        """One diagnostic for each rule and message, over all the modules it speaks of.

        Args:
            option: which of the rule's options it is about; the rule itself where it is none.
        """
        groups: dict[tuple[str, str], list[str]] = {}
        for path, message in found.items():
            rule = self.matches.modules.get(path)
            groups.setdefault(("" if rule is None else rule.pattern.text, message), []).append(path)
        for (_, message), paths in groups.items():
            rule = self.matches.modules.get(paths[0])
            self.about(rule, paths, message, hint, option=option)
