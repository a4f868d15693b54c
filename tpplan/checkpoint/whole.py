"""``save_pretrained`` of a sharded transformers model: what the unsharded one writes."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tpplan import compat
from tpplan.checkpoint.together import from_first, is_first, together

_TAUGHT = "_tpplan_save_pretrained"


def teach_saving(kind: type[nn.Module]) -> None:
    """Have ``save_pretrained`` of transformers' class of models write sharded ones.

    Every rank calls it; the first one gets the whole tensors, one after the other, into the memory
    of its CPU, and writes them with transformers' own code and all its options.
    """
    if _TAUGHT in vars(kind):
        return
    save: Any = kind.save_pretrained  # type: ignore[attr-defined]

    @functools.wraps(save)
    def taught(
        self: nn.Module,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Mapping[str, Any] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        if not any(isinstance(p, DTensor) for p in self.parameters()):
            save(self, save_directory, is_main_process, state_dict, *args, **kwargs)
            return
        failure = "the model was not saved"
        whole: dict[str, Any] = {}

        def gather() -> None:
            whole.update(whole_state(self.state_dict() if state_dict is None else state_dict))

        def write() -> None:
            # of which transformers would take that it is to gather, on every rank
            config: Any = self.config
            sizes = vars(config).pop("distributed_config", None)
            try:
                save(self, save_directory, is_main_process, whole, *args, **kwargs)
            finally:
                if sizes is not None:
                    config.distributed_config = sizes

        together(gather, failure)
        together(write, failure, first_only=True)

    setattr(kind, _TAUGHT, save)
    kind.save_pretrained = taught  # type: ignore[attr-defined]


@torch.no_grad()
def whole_state(state: Mapping[str, Any]) -> dict[str, Any]:
    """On the first rank the tensors of ``state``, each whole and on the CPU; on others nothing.

    Every rank calls it with the tensors that it holds; which are wanted is for the first to say.
    What is one tensor under several names stays one.

    Raises:
        ValueError: where one is on the meta device.
        RuntimeError: on the first rank, where its memory does not hold them: after the others are
            through, who would wait for it.
    """
    if (
        name := next((n for n, t in state.items() if getattr(t, "is_meta", False)), None)
    ) is not None:
        raise ValueError(f"{name} is on the meta device: it has no numbers to save")
    failed: Exception | None = None
    whole: dict[Hashable, torch.Tensor] = {}
    found: dict[str, Any] = {}
    for name, place in from_first([(name, _place(name, value)) for name, value in state.items()]):
        value = state.get(name)  # others have none where the first has it whole already
        if isinstance(value, DTensor) and place not in whole:
            gathered = value.full_tensor()
            whole[place] = gathered.new_empty(0)
            if is_first() and failed is None:
                try:
                    whole[place] = _apart(gathered.cpu())
                except RuntimeError as error:
                    failed = error
                    whole = dict.fromkeys(whole, gathered.new_empty(0))
        if is_first():
            found[name] = whole.get(place, value)
    if failed is not None:
        raise failed
    return found


def _apart(tensor: torch.Tensor) -> torch.Tensor:
    """In memory of its own size: writers count that, where it has the padding of a gather too."""
    own = tensor.untyped_storage().nbytes() == tensor.nbytes
    return tensor if own else tensor.clone(memory_format=torch.contiguous_format)


def _place(name: str, value: Any) -> Hashable:
    """Alike for the names of one sharded tensor."""
    if not isinstance(value, DTensor) or not (at := compat.local_of(value).data_ptr()):
        return name
    return at, value.shape, value.dtype
