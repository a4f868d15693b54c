"""A model's shadow: the same modules with fake parameters, to run at no cost and touch nothing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tpplan.compat import FakeTensorMode
from tpplan.language import Diagnostic, PlanError
from tpplan.observe.twins import held_by, twin_of, without_hooks

Call = tuple[tuple[Any, ...], dict[str, Any]]
BATCH, LENGTH = 2, 8
_ROUTED, _LOGITS = "output_router_logits", "router_logits"
_SHORT, _COMPUTED = 64, 2**28


def shadow_of(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of ``model`` whose tensors are fake CPU tensors of the same shapes and ties.

    Raises:
        PlanError: where the model's own state cannot be copied.
    """
    memo: dict[int, Any] = {}
    with mode:
        for tensor in (t for module in model.modules() for t in held_by(module)):
            if id(tensor) not in memo:
                memo[id(tensor)] = _fake(tensor)
        try:
            shadow = copy.deepcopy(model, memo)
        except Exception as error:
            raise not_copied(model, error) from error
    without_hooks(shadow)
    return shadow


def not_copied(model: nn.Module, error: Exception) -> PlanError:
    """What is said of a model that ``copy.deepcopy`` refused."""
    message = f"cannot copy the structure of {type(model).__name__}: {error}"
    hint = "a model must survive copy.deepcopy to be examined without being touched"
    return PlanError([Diagnostic(message, hint=hint)])


def computing_shadow_of(model: nn.Module) -> nn.Module | None:
    """A shadow with random numbers in float32; None of a model too large to compute with."""
    if sum(p.numel() for p in model.parameters()) > _COMPUTED:
        return None
    return twin_of(model, torch.float32)


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    fake = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(fake, requires_grad=tensor.requires_grad)
    return fake


def example_inputs(model: nn.Module, batch: int = BATCH, length: int = LENGTH) -> Call:
    """Inputs for a model that takes token ids, or activations where it holds no embedding.

    Returns real CPU tensors as (args, kwargs): ids of shape (batch, length), or activations
    (batch, length, width) with the width of the model's first Linear.
    """
    names = list(inspect.signature(model.forward).parameters)
    embeds = any(isinstance(m, nn.Embedding) for m in model.modules())
    if "input_ids" in names:
        return (), {"input_ids": torch.zeros(batch, length, dtype=torch.long)}
    if embeds:
        return (torch.zeros(batch, length, dtype=torch.long),), {}
    width = next((m.in_features for m in model.modules() if isinstance(m, nn.Linear)), 1)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return (torch.zeros(batch, length, width, dtype=dtype),), {}


def calls_for(
    model: nn.Module, inputs: Any, batch: int = BATCH, length: int = LENGTH
) -> tuple[Call, ...]:
    """The calls a model is run with, as (args, kwargs): what the user gave as ``inputs=``, or ids.

    Args:
        inputs: a mapping of keyword arguments, a tuple or one tensor; a list of these for several
            calls; None for token ids of shape (batch, length).
    """
    if inputs is None:
        return (example_inputs(model, batch, length),)
    if isinstance(inputs, list) and not inputs:
        raise PlanError([Diagnostic("inputs: an empty list holds no call", hint="leave it out")])
    given = inputs if isinstance(inputs, list) else [inputs]
    return tuple(
        ((), dict(one))
        if isinstance(one, Mapping)
        else (one if isinstance(one, tuple) else (one,), {})
        for one in given
    )


def call_for(model: nn.Module, inputs: Any, batch: int = BATCH, length: int = LENGTH) -> Call:
    """The first of them, for what is measured of one call."""
    return calls_for(model, inputs, batch, length)[0]


def padded(model: nn.Module, call: Call) -> list[Call]:
    """The call with an attention mask that hides a token, where the model takes one and has none.

    Attention by a mask may be other code than attention without, which repeats key-value heads.
    """
    args, kwargs = call
    ids = kwargs.get("input_ids")
    accepted = inspect.signature(model.forward).parameters
    if ids is None or "attention_mask" not in accepted or "attention_mask" in kwargs:
        return []
    mask = torch.ones_like(ids)
    mask[:1, :1] = 0
    return [(args, {**kwargs, "attention_mask": mask})]


def routed(model: nn.Module, call: Call) -> list[Call]:
    """The call that also asks for what routers gave, where the model takes one and has not.

    Losses that balance experts are computed of it, outside of the layers.
    """
    args, kwargs = call
    accepted = inspect.signature(model.forward).parameters
    # transformers hands it on to the models inside that say what they can give
    recorded = (getattr(module, "_can_record_outputs", None) or () for module in model.modules())
    passed = any(p.kind is p.VAR_KEYWORD for p in accepted.values())
    known = _ROUTED in accepted or (passed and any(_LOGITS in names for names in recorded))
    if not known or kwargs.get(_ROUTED) is not None:
        return []
    return [(args, {**kwargs, _ROUTED: True})]


def shortened(call: Call) -> Call:
    """The call on the first tokens of long sequences: every dimension as long as they are is cut.

    For runs that compute with real numbers, of which a few tokens tell as much as many.
    """
    tensors = [t for t in tree_leaves(call) if isinstance(t, torch.Tensor) and t.dim() >= 2]
    length = max((int(t.size(1)) for t in tensors), default=0)
    if length <= _SHORT or sum(t.numel() for t in tensors) < 2**12:
        return call

    def cut(t: torch.Tensor) -> torch.Tensor:
        for dim, size in enumerate(t.shape):
            if size == length:
                t = t.narrow(dim, 0, _SHORT)
        return t

    return tree_map_only(torch.Tensor, cut, call)  # type: ignore[no-any-return]
