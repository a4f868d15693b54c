"""Models as the command line names them: a config, a folder that holds one, or a factory."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn


class ModelError(ValueError):
    """The model that was named cannot be built."""


def build(source: str) -> nn.Module:
    """A model on the meta device.

    Args:
        source: a transformers ``config.json``, a folder with one, or ``package.module:factory``,
            a function without arguments that returns an ``nn.Module``.

    Raises:
        ModelError: saying what is missing.
    """
    path = Path(source)
    if path.is_dir():
        path = path / "config.json"
    if path.suffix == ".json" or path.is_file():
        return _from_config(path)
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
    except Exception as error:
        raise ModelError(f"'{source}' failed: {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ModelError(f"'{source}' returned a {type(model).__name__}, not an nn.Module")
    return model


def _from_config(path: Path) -> nn.Module:
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


@contextlib.contextmanager
def _default_dtype(dtype: torch.dtype | None) -> Iterator[None]:
    outer = torch.get_default_dtype()
    torch.set_default_dtype(dtype or outer)
    try:
        yield
    finally:
        torch.set_default_dtype(outer)
