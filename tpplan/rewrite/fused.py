"""Modules for which a fused kernel stands, in a sharded model and in a whole one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from tpplan.kernels.gated import gated, gated_packed
from tpplan.kernels.gelu import gelu
from tpplan.kernels.norm import norm
from tpplan.planner import GatedForm, GeluForm, KernelChoice, NormForm, UnbiasedForm
from tpplan.rewrite.lowered import State


@dataclass
class Swapped:
    """What a module of a model that is not sharded knows.

    Attributes:
        kernel: that stands for it; partner: the module whose bias it adds, if any.
    """

    kernel: KernelChoice
    partner: nn.Module | None = None


class Fused(nn.Module):
    """Base of the classes that modules with a fused kernel take on."""

    _tpplan: State | Swapped

    @property
    def _form(self) -> Any:
        state = self._tpplan
        choice = state.kernel if isinstance(state, Swapped) else state.plan.kernel
        assert choice is not None
        return choice.form


def _own(module: nn.Module) -> Mapping[str, torch.Tensor | None]:
    """The parameters of a module with a fused kernel, as local tensors."""
    state = module._tpplan
    if isinstance(state, State):
        return dict(zip(state.own.names, state.own.read(module, state.stream), strict=True))
    return module._parameters


class FusedNorm(Fused):
    """LayerNorm or RMSNorm of local rows by the kernel that was proved to equal the module."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, which runs where it is given more, in float64, and under autocast.

        The module may compute in float32 whatever it is given; PyTorch's autocast wants it to.
        """
        if len(args) != 1 or kwargs:
            return super().forward(*args, **kwargs)
        x: torch.Tensor = args[0]
        if x.dtype == torch.float64 or torch.is_autocast_enabled(x.device.type):
            return super().forward(x)
        form: NormForm = self._form
        own = _own(self)
        weight, bias = (None if name is None else own[name] for name in form.names)
        return norm(
            x,
            weight,
            bias,
            eps=form.eps,
            centred=form.centred,
            offset=form.offset,
            early=form.early,
        )


class Unbiased(Fused):
    """A column-parallel layer without its bias, which the activation after it adds."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The columns of ``input``, biases left out."""
        form: UnbiasedForm = self._form
        weight = _own(self)["weight"]
        assert weight is not None
        return F.linear(input, weight.t() if form.transposed else weight)


class FusedGelu(Fused):
    """GeLU of what the layer before it made without its bias."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """GeLU of ``x`` and the other layer's bias."""
        form: GeluForm = self._form
        partner = self._tpplan.partner
        assert partner is not None
        return gelu(x, _own(partner)["bias"], tanh=form.tanh)


class FusedGated(Fused):
    """A gated MLP whose activation and product are one kernel."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """As the module's own, which runs where it is called with more than the stream."""
        if len(args) != 1 or kwargs:
            return super().forward(*args, **kwargs)
        form: GatedForm = self._form
        first = self._modules[form.gate](*args)  # type: ignore[misc]
        if form.up is None:
            product = gated_packed(first, kind=form.activation, gate_first=form.gate_first)
        else:
            product = gated(first, self._modules[form.up](*args), kind=form.activation)  # type: ignore[misc]
        return self._modules[form.down](product)  # type: ignore[misc]


ROLES: Mapping[type, type[Fused]] = {
    NormForm: FusedNorm,
    UnbiasedForm: Unbiased,
    GeluForm: FusedGelu,
    GatedForm: FusedGated,
}
"""The class that a module takes on, by the form of its kernel."""
