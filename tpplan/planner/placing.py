"""Which rule governs each parameter, and where it goes."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.placement_types import Placement

from tpplan.language import Diagnostic, Position, Rule
from tpplan.planner.complaints import Complaints
from tpplan.planner.match import fold
from tpplan.planner.sizes import Sizes
from tpplan.styles import named
from tpplan.styles.style import made_weight


class Placing:
    """Parameters by their names.

    Attributes:
        names: all names of each parameter, by its id.
        lists: lists with a module for each head.
    """

    def __init__(
        self,
        model: nn.Module,
        lists: set[str],
        multihead: set[str],
        sizes: Sizes,
        complaints: Complaints,
    ) -> None:
        self.model, self.lists, self.multihead = model, lists, multihead
        self.sizes, self.complaints, self.matches = sizes, complaints, complaints.matches
        self.styles = {path: rule.style for path, rule in self.matches.modules.items()}
        self.names = _names(model)
        places: dict[int, str] = {}
        self.first_path = {
            path: places.setdefault(id(module), path)
            for path, module in model.named_modules(remove_duplicate=False)
        }

    def check_ties(self) -> None:
        for names in self.names.values():
            places = {str(self.placement(name)): name for name in names}
            if len(places) > 1:
                # a table is a vocabulary's: what is tied to one and is not is to blame
                first, *others = sorted(places.values(), key=self._of_vocabulary)
                message = (
                    f"is tied to {', '.join(others)}, but the plan places them differently "
                    f"({', '.join(places)})"
                )
                hint = "give both the same style: they are one parameter"
                self.complaints.about(self.rule_of(first), [first], message, hint)

    def _of_vocabulary(self, name: str) -> bool:
        return named(self.style_of(self.owner(name))).vocabulary

    def check_contradictions(self) -> None:
        """A parameter's own rule against that of the module, whose style computes with it."""
        found: dict[tuple[Position, Position], tuple[str, list[str]]] = {}
        for name, own in self.matches.parameters.items():
            owner, leaf = self.owner(name), name.rpartition(".")[2]
            module, style = self.matches.modules.get(owner), self.style_of(owner)
            if module is None or named(style).heads:
                continue
            if self.placement_by(style, owner, leaf) != self.placement(name):
                message = f"'{own.style}' contradicts '{style}', the rule of its module"
                key = own.position, module.position
                found.setdefault(key, (message, []))[1].append(name)
        for (own_, module_), (message, names) in found.items():
            hint, also = "leave one of them out", (("the rule of the module", module_),)
            self.complaints.wrong.append(Diagnostic(f"{fold(names)}: {message}", own_, hint, also))

    def rule_of(self, parameter: str) -> Rule | None:
        """The rule that governs a parameter: its own, or its module's."""
        own = self.matches.parameters.get(parameter)
        owner = self.owner(parameter)
        around = owner.rpartition(".")[0]
        rule = self.matches.modules.get(around if self._inner(owner) else owner)
        states = rule is not None and named(rule.style).heads
        if own is None and states and not {around, owner} & self.multihead:
            return None
        if own is None and rule is None:
            heads = self.list_of(parameter)
            return None if heads is None else self.matches.modules[heads]
        return own or rule

    def mentions(self, parameter: str) -> bool:
        """Whether a rule speaks of a parameter, or of a module around that is whole or uses it."""
        parts = self.owner(parameter).split(".")
        around = (".".join(parts[:n]) for n in range(len(parts)))
        return self.rule_of(parameter) is not None or any(
            named(self.styles.get(path)).apart
            or (path in self.styles and made_weight(self.model.get_submodule(path)))
            for path in around
        )

    @property
    def mentioned(self) -> set[str]:
        """The parameters, by their first names, of which a rule speaks."""
        return {
            names[0] for names in self.names.values() if any(self.mentions(name) for name in names)
        }

    def list_of(self, parameter: str) -> str | None:
        """The list with a module for each head that a parameter is in."""
        return next((path for path in self.lists if parameter.startswith(f"{path}.")), None)

    def placement(self, parameter: str) -> Placement:
        """Where a parameter goes, by any of its names."""
        own = self.matches.parameters.get(parameter)
        if own is not None:
            if parameter in self.sizes.parameters:
                return self.sizes.parameters[parameter]
            held = self.model.get_parameter(parameter)
            return named(own.style).place(held, own, self.sizes.tp)
        owner, leaf = self.owner(parameter), parameter.rpartition(".")[2]
        return self.placement_by(self.style_of(owner), owner, leaf)

    def placement_by(self, style: str | None, owner: str, leaf: str) -> Placement:
        """Where a module's style puts one of its parameters."""
        if named(style).stacked:
            shared = self.sizes.stacked.get(owner)
            return Replicate() if shared is None else shared.cut.get(leaf, Replicate())
        module, transposed = self.model.get_submodule(owner), owner in self.sizes.transposed
        return named(style).placement(leaf, module, transposed, self.sizes.layouts.get(owner))

    def style_of(self, path: str) -> str | None:
        """The style of a module: its rule's, or what it has in a region that is one module."""
        return self._inner(path) or self.styles.get(path)

    def _inner(self, path: str) -> str | None:
        around, _, leaf = path.rpartition(".")
        return named(self.styles[around]).inner.get(leaf) if around in self.multihead else None

    def owner(self, parameter: str) -> str:
        """The path of the module that holds a parameter: its first, where it has several."""
        return self.first_path[parameter.rpartition(".")[0]]


def _names(model: nn.Module) -> dict[int, tuple[str, ...]]:
    names: dict[int, tuple[str, ...]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names[id(parameter)] = (*names.get(id(parameter), ()), name)
    return names
