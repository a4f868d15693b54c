"""How fused kernels stand for modules: what a plan's kernels compute, and with which parameters."""

from __future__ import annotations

from dataclasses import dataclass

from tpplan.kernels.gated import Kind


class Form:
    """How exactly a module computes what a kernel does; data, of which each kernel has its own."""


@dataclass(frozen=True)
class NormForm(Form):
    """How exactly a norm computes; see ``tpplan.kernels.norm``.

    Attributes:
        weight, bias: the names of the module's own parameters, None where it has none.
    """

    centred: bool
    eps: float
    offset: float
    early: bool
    weight: str | None
    bias: str | None

    @property
    def names(self) -> tuple[str | None, str | None]:
        """Weight and bias."""
        return self.weight, self.bias


@dataclass(frozen=True)
class GeluForm(Form):
    """A GeLU that adds the bias of the layer before it; see ``tpplan.kernels.gelu``.

    Attributes:
        linear: path of the layer, which leaves its bias out.
    """

    linear: str
    tanh: bool


@dataclass(frozen=True)
class UnbiasedForm(Form):
    """A layer that leaves its bias to the activation at path ``activation``.

    Attributes:
        transposed: whether its weight is stored (in, out).
    """

    activation: str
    transposed: bool


@dataclass(frozen=True)
class GatedForm(Form):
    """An MLP that is down(activation(gate(x)) * up(x)); see ``tpplan.kernels.gated``.

    Attributes:
        gate, up, down: names of the module's own children; ``up`` None where one layer makes
            both halves.
        activation: silu, gelu or gelu_tanh.
        gate_first: whether the gate is the first half of what one layer makes.
    """

    gate: str
    up: str | None
    down: str
    activation: Kind
    gate_first: bool = True
