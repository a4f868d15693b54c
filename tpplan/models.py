"""Models as the command line names them: a config, a folder that holds one, or a factory."""

from __future__ import annotations

import contextlib
import copy
import importlib
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

RUNNABLE = 50_000_000
"""How many parameters a model may have to be computed with here."""
_VOCABULARY = 1024
_LAYERS = frozenset(
    {"num_hidden_layers", "n_layer", "num_layers", "n_layers", "encoder_layers", "decoder_layers"}
)
_WIDTHS = frozenset(
    {
        "hidden_size", "n_embd", "d_model", "dim", "intermediate_size", "n_inner", "ffn_dim",
        "d_ff", "encoder_ffn_dim", "decoder_ffn_dim", "head_dim", "d_kv", "word_embed_proj_dim",
        "moe_intermediate_size",
    }
)  # fmt: skip


class ModelError(ValueError):
    """The model that was named cannot be built."""


def build(source: str, dtype: torch.dtype | None = None) -> nn.Module:
    """A model on the meta device.

    Args:
        source: a transformers ``config.json``, a folder with one, or ``package.module:factory``,
            a function without arguments that returns an ``nn.Module``.
        dtype: of a config that states none; None for torch's default.

    Raises:
        ModelError: saying what is missing.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or path.is_file():
        return _from_config(path, dtype)
    if ":" in source:
        return _from_factory(source)
    raise ModelError(
        f"no model at '{source}': give a config.json, a folder with one, or package.module:factory"
    )


def _from_factory(source: str) -> nn.Module:
    module_name, _, name = source.partition(":")
    sys.path.insert(0, "")
    try:
        factory = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError) as error:
        raise ModelError(f"cannot import '{source}': {error}") from error
    finally:
        sys.path.remove("")
    try:
        with torch.device("meta"):
            model = factory()
    except Exception as on_meta:
        # code that computes with numbers while it builds
        try:
            model = factory()
        except Exception as error:
            raise ModelError(f"'{source}' failed: {type(error).__name__}: {error}") from on_meta
    if not isinstance(model, nn.Module):
        raise ModelError(f"'{source}' returned a {type(model).__name__}, not an nn.Module")
    return model


def _from_config(path: Path, dtype: torch.dtype | None) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ModelError("a config.json needs transformers: pip install 'tpplan[hf]'") from error
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read '{path}': {error}") from error
    if not isinstance(content, dict) or "model_type" not in content:
        raise ModelError(f"'{path}' is not a transformers config: it has no model_type")
    kind = content.pop("model_type")
    if not content.get("dtype") and not content.get("torch_dtype"):
        content["dtype"] = dtype
    try:
        config: Any = transformers.AutoConfig.for_model(kind, **content)
        architectures = content.get("architectures") or []
        found = next((getattr(transformers, a, None) for a in architectures), None)
        with torch.device("meta"), _default_dtype(config.dtype):
            if found is not None:
                return found(config)  # type: ignore[no-any-return]
            return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]
    except Exception as error:
        raise ModelError(f"cannot build '{path}': {type(error).__name__}: {error}") from error


def size_of(model: nn.Module) -> int:
    """How many numbers the parameters of a model have."""
    return sum(p.numel() for p in model.parameters())


def made_runnable(model: nn.Module) -> tuple[nn.Module, str | None]:
    """A model that can be computed with here, from one on the meta device; and what was changed.

    A large transformers model is built again with few layers and narrow ones: the same code, the
    same ratios of heads. Weights are drawn: norms around one, the rest around zero.

    Raises:
        ModelError: where a large model has no config to shrink.
    """
    size = size_of(model)
    note = None
    if size > RUNNABLE:
        config = getattr(model, "config", None)
        if config is None:
            raise ModelError(
                f"the model has {size:,} parameters, too many to compute with here, and no config "
                "by which to build a smaller one: give a factory that makes a small one"
            )
        config = copy.deepcopy(config)  # the model's own stays as it is
        changed = shrink(config)
        with torch.device("meta"):
            model = type(model)(config)
        left = size_of(model)
        if left > RUNNABLE:
            raise ModelError(f"even shrunk by its config ({changed}) it has {left:,} parameters")
        note = f"shrunk by its config, from {size:,} to {left:,} parameters: {changed}"
    if any(p.is_meta for p in model.parameters()):
        model = _drawn(model)
    return model, note


def _drawn(model: nn.Module) -> nn.Module:
    """The same class built on the CPU where a config allows it (buffers get their values then)."""
    config = getattr(model, "config", None)
    if config is not None:
        model = type(model)(config)
    else:
        model = model.to_empty(device="cpu")
        for buffer in model.buffers():
            buffer.zero_()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            mean = 1.0 if parameter.dim() == 1 and name.endswith("weight") else 0.0
            parameter.normal_(mean, 0.05, generator=generator)
    return model.float()


def shrink(config: Any) -> str:
    """Make a transformers config small, in place, and say what was changed.

    Layers become two; widths shrink by one power of two for all, heads keep their number unless
    there are very many.
    """
    changes = []
    for part in {id(c): c for c in (config, getattr(config, "text_config", None)) if c}.values():
        values = dict(vars(part))
        heads = _first(values, ("num_attention_heads", "n_head", "num_heads", "n_heads"))
        hidden = _first(values, ("hidden_size", "n_embd", "d_model", "dim"))
        if heads is None or hidden is None:
            continue
        factor = 1
        while hidden[1] // factor > max(16 * heads[1], 256) and hidden[1] % (2 * factor) == 0:
            factor *= 2
        for name, value in values.items():
            new = _smaller(name, value, factor)
            if new is not None and new != value:
                setattr(part, name, new)
                changes.append(f"{name} {value} -> {new}")
    return ", ".join(changes)


def _first(values: dict[str, Any], names: Sequence[str]) -> tuple[str, int] | None:
    return next(((n, values[n]) for n in names if isinstance(values.get(n), int)), None)


def _smaller(name: str, value: Any, factor: int) -> Any:
    if name == "layer_types" and isinstance(value, list):
        return value[:2] if len(set(value[:2])) > 1 else [value[0], value[-1]]
    if not isinstance(value, int) or isinstance(value, bool):
        return None
    if name in _LAYERS:
        return min(value, 2)
    if name in _WIDTHS and value % factor == 0:
        return value // factor
    if name == "vocab_size":
        return min(value, _VOCABULARY)
    if name.endswith("token_id") and value >= _VOCABULARY:
        return 1
    return None


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    outer = torch.get_default_dtype()
    torch.set_default_dtype(dtype or outer)
    try:
        yield
    finally:
        torch.set_default_dtype(outer)
