"""The tensor-parallel plan that a transformers model carries, as a plan for tpplan.

transformers names the sharded layers and leaves the rest out: norms, position embeddings, often
the embedding and the head, routers, experts that every token goes through. What is left out is
found in the module tree, whatever its names. Of transformers itself nothing is imported: a model
carries its plan as an attribute.
"""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import torch
from torch import nn

from tpplan.language import Diagnostic, Pattern, PatternError, Plan, PlanError, parse_mapping
from tpplan.planner.match import fold, folded
from tpplan.shipped import shipped_plans
from tpplan.styles import STYLES
from tpplan.styles.colwise import COLWISE
from tpplan.styles.experts import EXPERTS
from tpplan.styles.replicate import REPLICATE
from tpplan.styles.rowwise import ROWWISE
from tpplan.styles.sequence_parallel import SEQUENCE_PARALLEL
from tpplan.styles.vocab import VOCAB

Style = str | dict[str, object]

# The style in transformers -> the style here. A layer whose output transformers gathers at once
# ("colwise_gather_output") is sharded here only where a layer that splits it again follows: the
# two are a column-parallel and a row-parallel layer, with one collective instead of two.
_GATED: Style = {"style": COLWISE.name, "packed": ["gate", "up"]}
_STYLES: Mapping[str, Style] = {
    **{word: name for name, style in STYLES.items() for word in style.hf},
    "packed_colwise": _GATED,
}
_GATHERING = frozenset({"colwise_gather_output", "colwise_rep"})
_SPLITTING = frozenset({"rowwise_split_input", "rowwise_rep"})
_SILENT = frozenset({"local_params"})  # how transformers runs a module, not how it is sharded
_SHARDED = frozenset({COLWISE.name, ROWWISE.name})
_EXPERTS = ("moe", "ep", "grouped")  # the first word of styles for experts of a mixture
_KNOWN = _GATHERING | _SPLITTING | _SILENT | set(_STYLES)


def from_hf(model: nn.Module) -> Plan:
    """The plan that a transformers model carries, completed for both modes of tpplan.

    It is an ordinary plan: ``print(plan.text)`` shows it, and saved as a file it can be edited and
    loaded again. The model, real or on the meta device, is only looked at.

    Args:
        model: a transformers model, or a module that holds one.

    Raises:
        PlanError: where the model carries no plan, the plan shards no layers of this model, or
            it asks for something that tpplan cannot do.
    """
    return _Reader(model).plan()


@dataclass(frozen=True)
class _Entry:
    """What the plan of transformers says of some of this model's modules or parameters."""

    pattern: str
    style: str
    paths: tuple[str, ...]


class _Reader:
    def __init__(self, model: nn.Module) -> None:
        self.who = type(model).__name__
        self.modules = dict(model.named_modules())
        self.parameters = dict(model.named_parameters())
        self.entries = self.carried()
        self.experts = self.stacked()
        self.ends = self.embedding_and_head()

    def plan(self) -> Plan:
        self.refuse()
        styles = self.translated()
        self.complete_blocks(styles)
        self.complete(styles)
        content = {
            "tpplan": 1,
            "description": f"the transformers plan of {self.who}, completed",
            "models": [self.who],
            "rules": self.rules(styles),
        }
        return parse_mapping(content, f"<{self.who}'s transformers plan>")

    # --- what the model carries

    def carried(self) -> list[_Entry]:
        """The entries that name something in this model; exact paths come last, so that they win.

        The plan is the model's own, or that of the models in it.
        """
        said: dict[str, str] = {}
        for path, module in self.outermost(lambda module: bool(_plan_of(module))):
            prefix = f"{path}." if path else ""
            said |= {prefix + pattern: style for pattern, style in (_plan_of(module) or {}).items()}
        entries = []
        for text, style in sorted(said.items(), key=lambda item: "*" not in item[0]):
            try:
                paths = self.named(Pattern(text))
            except PatternError as error:
                message = f"the transformers plan of {self.who} names '{text}': {error}"
                raise PlanError([Diagnostic(message)]) from error
            if paths:
                entries.append(_Entry(text, style, paths))
        return entries

    def outermost(self, is_meant: Callable[[nn.Module], bool]) -> list[tuple[str, nn.Module]]:
        """The modules that are meant, without those inside others of them."""
        meant = {path: module for path, module in self.modules.items() if is_meant(module)}
        return [(p, m) for p, m in meant.items() if not any(a in meant for a in _ancestors(p))]

    def named(self, pattern: Pattern) -> tuple[str, ...]:
        """The modules that a pattern names, or else the parameters."""
        modules = tuple(path for path in self.modules if pattern.matches(path))
        return modules or tuple(path for path in self.parameters if pattern.matches(path))

    def embedding_and_head(self) -> tuple[str, ...]:
        """Where the token embedding and the head are."""
        found: list[nn.Module] = []
        # the models inside may embed something else than tokens
        for _, module in self.outermost(lambda module: _plan_of(module) is not None):
            for getter in ("get_input_embeddings", "get_output_embeddings"):
                with contextlib.suppress(AttributeError, NotImplementedError):
                    found.append(getattr(module, getter)())
        found = [end for end in found if isinstance(end, nn.Embedding | nn.Linear)]
        return tuple(p for p, m in self.modules.items() if any(m is end for end in found))

    def refuse(self) -> None:
        """Raise where the plan shards no layers of this model, or cannot be followed."""
        if not self.entries:
            message = f"{self.who} carries no tensor-parallel plan of transformers"
            raise PlanError([Diagnostic(message, hint=self.instead())])
        if all(path in self.ends for entry in self.entries for path in entry.paths):
            named = ", ".join(entry.pattern for entry in self.entries)
            message = f"the transformers plan of {self.who} shards no layer, only {named}"
            raise PlanError([Diagnostic(message, hint=self.instead())])
        strange: list[str] = []
        unknown: dict[str, list[str]] = {}
        for entry in self.entries:
            paths = [path for path in entry.paths if not self.of_experts(path)]
            if entry.style.split("_")[0] in _EXPERTS:
                strange += paths
            elif entry.style not in _KNOWN:
                paths = [path for path in paths if path not in self.ends]
                unknown.setdefault(entry.style, []).extend(paths)
        problems = []
        if strange:
            message = f"{fold(strange)}: no experts in parameters (experts, rows, columns)"
            problems.append(Diagnostic(message, hint=self.instead()))
        for style, paths in unknown.items():
            if paths:
                message = f"{fold(paths)}: nothing in tpplan is like transformers' '{style}'"
                problems.append(Diagnostic(message, hint=self.instead()))
        if problems:
            raise PlanError(problems)

    def instead(self) -> str:
        """What to do without the plan of transformers."""
        shipped = [plan.name for plan in shipped_plans({self.who})]
        if shipped:
            return f"tpplan has a plan for it: '{shipped[0]}'"
        return "write a plan for it; 'tpplan list' shows those to start from"

    def stacked(self) -> tuple[str, ...]:
        """The modules with the weights of all experts of a mixture that the plan names."""
        named = {path for entry in self.entries for path in entry.paths}
        named |= {_parent(path) for path in named if path in self.parameters}
        return tuple(p for p, m in self.modules.items() if p in named and _is_stacked(m))

    def of_experts(self, path: str) -> bool:
        """Whether it is a module with the experts of a mixture, or what lies in one."""
        return not {path, *_ancestors(path)}.isdisjoint(self.experts)

    # --- the same in the words of tpplan

    def of_styles(self, styles: Iterable[str]) -> set[str]:
        return {path for entry in self.entries if entry.style in styles for path in entry.paths}

    def translated(self) -> dict[str, Style]:
        """Path -> style, of everything that the plan of transformers names."""
        pairs, gated = self.paired(), self.gated()
        styles: dict[str, Style] = {}
        for entry in self.entries:
            for path in entry.paths:
                if self.of_experts(path):
                    continue
                if entry.style in _STYLES:
                    styles[path] = _STYLES[entry.style]
                elif entry.style in _GATHERING | _SPLITTING:
                    split = entry.style in _SPLITTING
                    sharded = ROWWISE.name if split else _GATED if path in gated else COLWISE.name
                    styles[path] = sharded if _parent(path) in pairs else REPLICATE.name
        styles.update(dict.fromkeys(self.experts, EXPERTS.name))
        styles.update(dict.fromkeys(self.ends, VOCAB.name))
        return styles

    def paired(self) -> set[str]:
        """Modules that gather the output of some layers, and split the input of others."""
        gathering = {_parent(path) for path in self.of_styles(_GATHERING)}
        return gathering & {_parent(path) for path in self.of_styles(_SPLITTING)}

    def gated(self) -> set[str]:
        """Layers whose gathered output is halved before a layer that splits its input takes it."""
        inputs = {_parent(p): width for p, width in self.widths(_SPLITTING, "in").items()}
        outputs = self.widths(_GATHERING, "out")
        return {p for p, width in outputs.items() if 0 < width == 2 * inputs.get(_parent(p), 0)}

    def widths(self, styles: Iterable[str], side: Literal["in", "out"]) -> dict[str, int]:
        """How wide the inputs or the outputs of the layers of these styles are."""
        name = f"{side}_features"
        return {p: getattr(self.modules.get(p), name, 0) for p in self.of_styles(styles)}

    # --- what it leaves out

    def complete_blocks(self, styles: dict[str, Style]) -> None:
        """Add what is in the blocks of experts, or beside them: MLPs are shared out, too.

        All else in a block is whole: routers, the gate of a shared expert.
        """
        layers = {_layer(path) for path in self.experts}
        # in one that is a layer itself there may be anything
        blocks = {_parent(path) for path in self.experts} - layers
        spoken = {other for path in styles for other in (path, *_ancestors(path))}
        width = self.width(styles)
        for path, module in self.modules.items():
            within = not blocks.isdisjoint(_ancestors(path))
            if path not in spoken and (within or _parent(path) in layers):
                styles.update({f"{path}.{name}": s for name, s in _mlp(module, width).items()})
        for path in self.parameters:
            outer = next((b for b in _ancestors(path) if b in blocks), None)
            if outer is not None and not self.has_style(path, styles):
                whole = path if _parent(path) == outer else _parent(path)
                styles[whole] = REPLICATE.name

    def has_style(self, path: str, styles: Mapping[str, Style]) -> bool:
        """Whether there is a style for it, or for a module around it."""
        return not {path, *_ancestors(path)}.isdisjoint(styles)

    def width(self, styles: Mapping[str, Style]) -> int:
        """How wide the stream is: what most row-parallel layers give."""
        rows = [self.modules.get(p) for p, style in styles.items() if _name(style) == ROWWISE.name]
        widths = Counter(getattr(module, "out_features", 0) for module in rows)
        return widths.most_common(1)[0][0] if widths else 0

    def complete(self, styles: dict[str, Style]) -> None:
        """Add norms and position embeddings: those on the stream, and those in sharded regions."""
        sharded = {p: _name(style) for p, style in styles.items() if _name(style) in _SHARDED}
        width = self.width(styles)
        layers = {_layer(path) for path in sharded} - {""} or {""}
        around = {ancestor for layer in layers for ancestor in _ancestors(layer)}
        regions = {_parent(path) for path, style in sharded.items() if style == COLWISE.name}
        regions -= layers | around

        def style_of(path: str, module: nn.Module) -> Style | None:
            region = next((a for a in _ancestors(path) if a in regions), None)
            size = _vector(module)
            if region is not None and size is not None:
                return COLWISE.name if size in self.gathered(region) else REPLICATE.name
            outside = _parent(path) in around
            if region is not None or not (outside or _layer(path) in layers):
                return None
            positions = isinstance(module, nn.Embedding) and module.embedding_dim == width
            on_stream = size == width or (outside and positions) or _normalizes(module, width)
            return SEQUENCE_PARALLEL.name if on_stream else None

        for path, module in self.modules.items():
            if not self.has_style(path, styles) and next(module.children(), None) is None:
                style = style_of(path, module)
                if style is not None:
                    styles[path] = style

    def gathered(self, region: str) -> set[int]:
        """The widths of what is gathered in a module of transformers' and stays sharded here."""
        widths = self.widths(_GATHERING, "out") if region in self.paired() else {}
        return {width for path, width in widths.items() if _parent(path) == region}

    # --- as a plan

    def rules(self, styles: Mapping[str, Style]) -> dict[str, Style]:
        """Styles by pattern, in the order of the model."""
        groups: dict[tuple[str, str], list[str]] = {}
        for path in (*self.modules, *self.parameters):
            if path in styles:
                groups.setdefault((folded(path), str(styles[path])), []).append(path)
        rules: dict[str, Style] = {}
        for (pattern, _), paths in groups.items():
            whole = self.named(Pattern(pattern)) == tuple(paths)
            rules.update(dict.fromkeys([pattern] if whole else paths, styles[paths[0]]))
        return rules


def _plan_of(module: nn.Module) -> Mapping[str, str] | None:
    """What transformers keeps of its plan on each of its models; None on other modules."""
    plan = getattr(module, "_tp_plan", None)
    return plan if isinstance(plan, Mapping) else None


def _is_stacked(module: nn.Module) -> bool:
    """Whether a module has parameters of its own with a matrix for each expert."""
    return any(parameter.dim() > 2 for parameter in module.parameters(recurse=False))


def _holds(module: nn.Module, inside: bool = True) -> bool:
    """Whether a module has parameters."""
    return next(module.parameters(recurse=inside), None) is not None


def _mlp(module: nn.Module, width: int) -> dict[str, Style]:
    """The styles of the layers of an MLP as wide as the stream; none where it is something else."""
    inner = {name: child for name, child in module.named_children() if _holds(child)}
    sizes = {
        name: (child.in_features, child.out_features)
        for name, child in inner.items()
        if isinstance(child, nn.Linear)
    }
    if sizes.keys() != inner.keys() or _holds(module, inside=False):
        return {}
    downs = [name for name, (into, out) in sizes.items() if out == width != into]
    if len(downs) != 1 or len(sizes) not in (2, 3):
        return {}
    (down,) = downs
    columns = sizes[down][0]
    ups: dict[str, Style] = {name: COLWISE.name for name in sizes if name != down}
    if len(ups) == 1 and sizes[next(iter(ups))] == (width, 2 * columns):
        ups = dict.fromkeys(ups, _GATED)
    elif any(sizes[name] != (width, columns) for name in ups):
        return {}
    return {**ups, down: ROWWISE.name}


def _name(style: Style) -> str:
    return style if isinstance(style, str) else str(style["style"])


def _parent(path: str) -> str:
    return path.rpartition(".")[0]


def _ancestors(path: str) -> list[str]:
    """The paths around a path, the innermost first."""
    parts = path.split(".") if path else []
    return [".".join(parts[:i]) for i in reversed(range(len(parts)))]


def _layer(path: str) -> str:
    """The outermost numbered module around ``path``, or the model itself."""
    numbered = (a for a in reversed(_ancestors(path)) if a.rpartition(".")[2].isdigit())
    return next(numbered, "")


def _vector(module: nn.Module) -> int | None:
    """The size of a module's parameters where all of them are vectors of that size."""
    shapes = {tuple(parameter.shape) for parameter in module.parameters(recurse=False)}
    shape = next(iter(shapes)) if len(shapes) == 1 else ()
    return shape[0] if len(shape) == 1 else None


def _normalizes(module: nn.Module, width: int) -> bool:
    """Whether a module without parameters is a norm: it does not care about its input's scale."""
    if not width or next(chain(module.parameters(), module.buffers()), None) is not None:
        return False
    x = torch.linspace(-1.0, 2.0, 2 * width, device="cpu").reshape(1, 2, width)
    try:
        with torch.no_grad():
            once, again = (copy.deepcopy(module).eval()(scale * x) for scale in (1.0, 4.0))
            return once.shape == x.shape and torch.allclose(once, again, atol=1e-3)
    except Exception:  # whatever a module raises that does not take one tensor
        return False
