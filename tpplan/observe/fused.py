"""Fused kernels that take the place of several modules: found in the trace, proved on numbers.

A gated MLP is recognised by running its own forward with stand-ins for its projections, which
answer with random numbers: what reaches the last one must be the gated product. A GeLU takes over
the bias of the layer before it where it computes a GeLU, and alone reads what that layer makes.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tpplan.kernels.forms import Form, GatedForm, GeluForm, UnbiasedForm
from tpplan.kernels.gated import ACTIVATIONS
from tpplan.observe.likeness import identity
from tpplan.observe.trace import Trace
from tpplan.styles import NONE, Style

_WIDTH = 16

Findings = dict[str, tuple[str, Form | None, str | None]]
"""By path: the kind of kernel, how it computes, and what is in its way."""


@dataclass(frozen=True)
class Seen:
    """What is known of a model when kernels are looked for.

    Attributes:
        styles: of the modules that rules match; columns: the column-parallel projections;
            transposed: of them, those whose weights are stored (in, out).
        traces: in evaluation and in training: what is dropped between two modules keeps them apart.
    """

    model: nn.Module
    styles: Mapping[str, Style]
    columns: Set[str]
    transposed: Set[str]
    traces: Sequence[Trace]


Finder = Callable[[Seen], Findings]
FINDERS: dict[str, Finder] = {}
"""By kind of kernel, who finds the modules that it could stand for."""


def finds(*kinds: str) -> Callable[[Finder], Finder]:
    """A function as the finder of kernels of these kinds."""

    def register(finder: Finder) -> Finder:
        FINDERS.update(dict.fromkeys(kinds, finder))
        return finder

    return register


def fused_modules(
    model: nn.Module,
    styles: Mapping[str, Style],
    columns: Set[str],
    transposed: Set[str],
    traces: Sequence[Trace],
) -> Findings:
    """What fused kernels other than norms could stand for; see ``Seen``."""
    seen = Seen(model, styles, columns, transposed, traces)
    found: Findings = {}
    for finder in dict.fromkeys(FINDERS.values()):
        found.update(finder(seen))
    # what is inside of a gated MLP is computed with it, the biases of its projections as well
    gated = [f"{path}.".lstrip(".") for path, (_, form, _) in found.items() if _is_gated(form)]
    return {p: f for p, f in found.items() if not any(p.startswith(around) for around in gated)}


def _is_gated(form: Form | None) -> bool:
    return isinstance(form, GatedForm)


# --- gated MLPs


class _StandIn(nn.Module):
    """Answers with the same numbers whatever it is asked, and keeps what it was asked."""

    def __init__(self, width: int, seed: int) -> None:
        super().__init__()
        self.answer = _random(width, seed)
        self.asked: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.asked.append(x)
        return self.answer


def _random(width: int, seed: int) -> torch.Tensor:
    return torch.randn((2, 3, width), generator=torch.Generator().manual_seed(seed + 1))


@finds("swiglu", "geglu")
def _gated(seen: Seen) -> Findings:
    styles = seen.styles
    known: dict[Any, GatedForm | None] = {}
    found: Findings = {}
    for path, module in seen.model.named_modules():
        inner = {name: f"{path}.{name}" if path else name for name, _ in module.named_children()}
        first = [name for name, full in inner.items() if full in seen.columns]
        last = [name for name, full in inner.items() if styles.get(full, NONE).sums]
        plain = not styles.get(path, NONE).heads and not any(True for _ in module.parameters(False))
        if not plain or len(last) != 1 or len(first) not in (1, 2) or not _takes_one(module):
            continue
        key = identity(module, path), tuple(first), tuple(last)
        if key not in known:
            known[key] = _gated_form(seen.model, module, first, last[0])
        form = known[key]
        if form is not None:
            found[path] = ("swiglu" if form.activation == "silu" else "geglu", form, None)
        elif len(first) == 2:
            found[path] = ("swiglu", None, "it does more than activation(gate) * up")
    return found


def _takes_one(module: nn.Module) -> bool:
    needed = [
        p for p in inspect.signature(module.forward).parameters.values() if p.default is p.empty
    ]
    return len(needed) == 1 and needed[0].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD


def _gated_form(
    model: nn.Module, module: nn.Module, first: Sequence[str], last: str
) -> GatedForm | None:
    """How ``module`` is a gated MLP of these projections, in evaluation and in training."""
    width = _WIDTH if len(first) == 2 else 2 * _WIDTH
    answers = [_random(width, n) for n in range(len(first))]
    orders: list[tuple[str, str | None, bool]]
    if len(first) == 2:
        (a, b), (one, other) = first, answers
        orders = [(a, b, True), (b, a, True)]
    else:
        one, other = answers[0].chunk(2, -1)
        orders = [(first[0], None, True), (first[0], None, False)]
    reached = [_reaching(model, module, first, last, mode) for mode in (False, True)]
    halves = ((one, other), (other, one))
    for (gate, up, gate_first), (gates, ups) in zip(orders, halves, strict=True):
        for name, activation in ACTIVATIONS.items():
            product = activation(gates) * ups
            if all(_equal(x, product) for x in reached):
                return GatedForm(gate, up, last, name, gate_first)
    return None


def _reaching(
    model: nn.Module, module: nn.Module, first: Sequence[str], last: str, training: bool
) -> torch.Tensor | None:
    """What reaches the last projection, whose answer is the module's; None where it is not."""
    width = _WIDTH if len(first) == 2 else 2 * _WIDTH
    stand_ins = {name: _StandIn(width, n) for n, name in enumerate(first)}
    end = stand_ins[last] = _StandIn(_WIDTH, len(first))
    # what its code writes, at any depth, is the copy's; what is elsewhere in the model stays there
    memo: dict[int, Any] = {id(other): other for other in model.modules()}
    for inner in module.modules():
        del memo[id(inner)]
    memo.update((id(module.get_submodule(name)), stand) for name, stand in stand_ins.items())
    try:
        twin = copy.deepcopy(module, memo)
        for child in twin.children():
            child.float()
        result = twin.train(training)(_random(_WIDTH, -1))
    except Exception:  # code that minds the widths, or does not only multiply
        return None
    return end.asked[0] if result is end.answer and len(end.asked) == 1 else None


# --- GeLU with the bias before it


@finds("gelu")
def _gelus(seen: Seen) -> Findings:
    model, found = seen.model, Findings()
    for call in seen.traces[0].calls:
        if call.path not in seen.columns:
            continue
        bias = model.get_submodule(call.path)._parameters.get("bias")
        readers = [_sole_reader(model, trace, call.path) for trace in seen.traces]
        if bias is None or any(reader is None or reader != readers[0] for reader in readers):
            continue
        reader = readers[0]
        assert reader is not None
        if reader == call.path:
            found[call.path] = ("gelu", None, "its activation is a function, not a module")
            continue
        tanh = _gelu(model.get_submodule(reader))
        if tanh is not None:
            found[call.path] = ("gelu", UnbiasedForm(reader, call.path in seen.transposed), None)
            found[reader] = ("gelu", GeluForm(call.path, tanh), None)
    return found


def _sole_reader(model: nn.Module, trace: Trace, path: str) -> str | None:
    """The module without parameters that alone reads what the one at ``path`` makes.

    ``path`` itself where a function does, which is a GeLU.
    """
    calls = [call for call in trace.calls if call.path == path]
    if len(calls) != 1 or len(calls[0].outputs) != 1:
        return None
    (made,) = calls[0].outputs
    given = [call for call in trace.calls if made in call.arguments]
    outermost = given[0] if given else None
    ops = [n for n, op in enumerate(trace.ops) if made in op.inputs]
    if outermost is None:
        return path if [trace.ops[n].name for n in ops] == ["aten.gelu.default"] else None
    alone = all(outermost.first_op <= n < outermost.last_op for n in ops) and all(
        any(around is outermost for around in trace.ancestors(call.index)) for call in given
    )
    once = sum(call.path == outermost.path for call in trace.calls) == 1
    bare = not any(True for _ in model.get_submodule(outermost.path).parameters())
    escapes = any(made in call.outputs for call in trace.calls if call is not calls[0])
    return outermost.path if alone and once and bare and not escapes else None


def _gelu(module: nn.Module) -> bool | None:
    """Whether ``module`` computes GeLU by tanh, or by erf; None where neither."""
    x = _random(_WIDTH, 0) * 2
    for tanh in (False, True):
        activation = ACTIVATIONS["gelu_tanh" if tanh else "gelu"]
        results = []
        for training in (False, True):
            with contextlib.suppress(Exception):
                results.append(copy.deepcopy(module).train(training)(x))
        if len(results) == 2 and all(_equal(r, activation(x)) for r in results):
            return tanh
    return None


def _equal(a: Any, b: torch.Tensor) -> bool:
    if not isinstance(a, torch.Tensor) or a.shape != b.shape:
        return False
    return (a.dtype, a.device) == (b.dtype, b.device) and torch.allclose(a, b, 1e-5, 1e-6)
