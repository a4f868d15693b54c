"""What peft is taught of a model that is sharded already.

It adds adapters of the size of the whole layer, saves what each rank holds of them, and takes
layers out of a model without knowing what stands at their inputs. peft is not imported: where a
model has adapters, it is there.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan.checkpoint.together import together
from tpplan.checkpoint.whole import whole_state
from tpplan.comm.distribute import loaded
from tpplan.roles.lowered import Lowered
from tpplan.roles.streams import Entering

_TAUGHT = "_tpplan_taught"
_LOADING, _TUNERS = "peft.utils.save_and_load", "peft.tuners.tuners_utils"
_FIRST = 2**40
"""Of the numbers of tensors: what else is computed from some is none of them."""


def introduce() -> None:
    """Teach peft, where it was imported, what to do with sharded models."""
    peft: Any = sys.modules.get("peft")
    if peft is None or hasattr(peft, _TAUGHT):
        return
    setattr(peft, _TAUGHT, True)
    _teach_saving(peft.PeftModel, peft.get_peft_model_state_dict)
    _teach_loading(sys.modules[_LOADING])
    _teach_tuners(sys.modules[_TUNERS])
    _teach_prompts(peft.PeftModel)


def _teach_saving(kind: Any, chosen: Any) -> None:
    """Have every rank call it, and the first one write the adapters, whole."""
    save = kind.save_pretrained

    @functools.wraps(save)
    def taught(
        self: Any,
        save_directory: Any,
        safe_serialization: bool = True,
        selected_adapters: list[str] | None = None,
        save_embedding_layers: Any = "auto",
        *args: Any,
        **kwargs: Any,
    ) -> None:
        how = save_directory, safe_serialization, selected_adapters, save_embedding_layers, *args
        if not any(isinstance(p, DTensor) for p in self.parameters()):
            save(self, *how, **kwargs)
            return
        state = kwargs.pop("state_dict", None) or self.state_dict()
        asked = functools.partial(chosen, self, save_embedding_layers=save_embedding_layers)
        whole = whole_state(_needed(state, asked, selected_adapters or list(self.peft_config)))
        together(
            lambda: save(self, *how, state_dict=whole, **kwargs),
            "the adapters were not saved",
            first_only=True,
        )

    kind.save_pretrained = taught


def _needed(state: Mapping[str, Any], chosen: Any, adapters: Iterable[str]) -> dict[str, Any]:
    """What peft would save of a state; it is asked with a number for each tensor, which it copies.

    To ask with the tensors would gather all of them, the base model's too.
    """
    numbers = {_FIRST + i: name for i, name in enumerate(state)}
    stand_ins = {name: torch.tensor(number) for number, name in numbers.items()}
    needed: dict[str, Any] = {}
    for adapter in adapters:
        for value in chosen(state_dict=dict(stand_ins), adapter_name=adapter).values():
            name = numbers.get(int(value)) if value.dim() == 0 else None
            if name is None:
                return dict(state)  # computed from several: peft may need any of them
            needed[name] = state[name]
    return needed


def _teach_loading(module: Any) -> None:
    """Have whole tensors cut as this model's are, packed and shared rows too.

    Versions of peft that do not cut them leave them to ``load_state_dict``.
    """
    place = getattr(module, "_reshard_dtensor_values_for_load", None)
    if place is None:
        return

    @functools.wraps(place)
    def taught(model: nn.Module, state: dict[str, Any]) -> Any:
        if not _is_sharded(model):
            return place(model, state)
        for name, held in model.named_parameters():
            value = state.get(name)
            if value is None or isinstance(value, DTensor) or not isinstance(held, DTensor):
                continue
            if value.shape == held.shape:
                state[name] = loaded(value, held)
        return state

    module._reshard_dtensor_values_for_load = taught


def _teach_tuners(module: Any) -> None:
    kind, layer = module.BaseTuner, module.BaseTunerLayer
    inject, unload = kind.inject_adapter, kind._unload_and_optionally_merge

    @functools.wraps(inject)
    def first(self: Any, model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if _is_sharded(model):
            raise ValueError(
                "the model was parallelized before, and an adapter would be of the size of whole "
                "layers: call get_peft_model, or add_adapter, before tpplan.parallelize; or in "
                "tpplan.from_pretrained(path, adapt=...), where no rank holds the whole model"
            )
        return inject(self, model, *args, **kwargs)

    @functools.wraps(unload)
    def unloaded(self: Any, *args: Any, **kwargs: Any) -> Any:
        for name, inner in self.model.named_modules():
            if isinstance(inner, layer) and isinstance(inner, Entering):
                raise ValueError(
                    f"{name}: its input is gathered for the layer with its adapter, so the layer "
                    "cannot be taken out of it; use merge_adapter, which merges in place"
                )
        return unload(self, *args, **kwargs)

    kind.inject_adapter, kind._unload_and_optionally_merge = first, unloaded


def _teach_prompts(kind: Any) -> None:
    get = kind.get_prompt

    @functools.wraps(get)
    def taught(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = get(self, *args, **kwargs)
        if not isinstance(made, torch.Tensor) and _is_sharded(self):
            raise ValueError(
                "prefix tuning gives the layers keys and values of all heads, and each rank "
                "computes with some: use prompt tuning, whose tokens are part of the sequence, or "
                "LoRA, before tpplan.parallelize"
            )
        return made

    kind.get_prompt = taught


def _is_sharded(model: nn.Module) -> bool:
    return any(isinstance(module, Lowered) for module in model.modules())
