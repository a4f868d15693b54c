"""The calls a model is run with: those the user gave, or made for what its forward takes."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map_only

from tpplan.language import Diagnostic, PlanError

Call = tuple[tuple[Any, ...], dict[str, Any]]
BATCH, LENGTH = 2, 8
_ROUTED, _LOGITS = "output_router_logits", "router_logits"
_SHORT = 64
_IMAGE, _SAMPLES, _FRAMES = 64, 4000, 64  # where a config has none


def example_inputs(model: nn.Module, batch: int = BATCH, length: int = LENGTH) -> Call:
    """Inputs for a model that takes token ids, or activations where it holds no embedding.

    Returns real CPU tensors as (args, kwargs): ids of shape (batch, length), for a decoder besides
    an encoder as well; the images or sounds that a model of transformers declares as its main
    input, of the sizes in its config; or activations (batch, length, width) with the width of the
    model's first Linear.
    """
    names = inspect.signature(model.forward).parameters
    ids = torch.zeros(batch, length, dtype=torch.long)
    signals = _signals(model, names, batch)
    kwargs = dict(signals)
    if "input_ids" in names and (
        not signals or _has_towers(model) or names["input_ids"].default is inspect.Parameter.empty
    ):
        kwargs["input_ids"] = ids
    if kwargs:
        if "decoder_input_ids" in names and getattr(model.config, "is_encoder_decoder", False):
            kwargs["decoder_input_ids"] = torch.zeros(batch, length, dtype=torch.long)
        return (), kwargs
    if any(isinstance(m, nn.Embedding) for m in model.modules()):
        return (ids,), {}
    width = next((m.in_features for m in model.modules() if isinstance(m, nn.Linear)), 1)
    dtype = next((p.dtype for p in model.parameters()), torch.float32)
    return (torch.zeros(batch, length, width, dtype=dtype),), {}


def _signals(model: nn.Module, names: Container[str], batch: int) -> dict[str, torch.Tensor]:
    """Images or sounds, where a model of transformers declares that it takes such."""
    config = getattr(model, "config", None)
    main = getattr(model, "main_input_name", "")
    name = str("pixel_values" if main == "input_ids" and _has_towers(model) else main)
    if config is None or name not in _SHAPES or name not in names:
        return {}
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    return {name: torch.zeros(batch, *_SHAPES[name](config), dtype=dtype)}


def _has_towers(model: nn.Module) -> bool:
    """Whether it has a tower for images and one for text, each of which is given its own."""
    config = getattr(model, "config", None)
    towers = all(hasattr(config, f"{kind}_config") for kind in ("vision", "text"))
    mixed = any(name.startswith("image_token") for name in getattr(config, "__dict__", {}))
    return towers and not mixed


def _image(config: Any) -> tuple[int, ...]:
    """(channels, height, width), of videos with their frames before it."""
    size = _first(config, "image_size") or _IMAGE
    sides = (size, size) if isinstance(size, int) else tuple(size)[-2:]
    frames = _first(config, "num_frames")
    channels = _first(config, "num_channels", "in_channels", "in_chans") or 3
    return (*((frames,) if frames else ()), channels, *sides)


def _sound(config: Any) -> tuple[int, ...]:
    """(samples,), or (frames, bins) of a spectrogram."""
    bins, frames = _first(config, "num_mel_bins"), _first(config, "max_length")
    return (frames, bins) if bins and frames else (_SAMPLES,)


def _spectrum(config: Any) -> tuple[int, ...]:
    """(bins, frames) as Whisper takes them, or (frames, features)."""
    bins, half = _first(config, "num_mel_bins"), _first(config, "max_source_positions")
    if bins and half and not _first(config, "input_feat_per_channel"):
        return bins, 2 * half
    wide = ("feature_projection_input_dim", "input_feat_per_channel", "num_mel_bins", "input_dim")
    return _FRAMES, _first(config, *wide) or _IMAGE


_SHAPES: Mapping[str, Callable[[Any], tuple[int, ...]]] = {
    "pixel_values": _image,
    "pixel_values_videos": _image,
    "input_values": _sound,
    "input_features": _spectrum,
}


def _first(config: Any, *names: str) -> Any:
    """The first of these that a config has, or one inside of it."""
    found = (getattr(part, name, None) for part in _configs(config) for name in names)
    return next((value for value in found if value is not None), None)


def _configs(config: Any) -> Iterator[Any]:
    yield config
    for value in vars(config).values():
        if hasattr(value, "to_dict"):
            yield from _configs(value)


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


def drawn_ids(model: nn.Module, calls: Sequence[Call], inputs: Any) -> Sequence[Call]:
    """``calls``, with random ids where the user gave none: routers tell these apart."""
    generator = torch.Generator().manual_seed(0)
    return [random_ids(model, c, generator) for c in calls] if inputs is None else calls


def call_for(model: nn.Module, inputs: Any, batch: int = BATCH, length: int = LENGTH) -> Call:
    """The first of them, for what is measured of one call."""
    return calls_for(model, inputs, batch, length)[0]


def shape_of(call: Call) -> tuple[int, int | None]:
    """How many samples are in a call, and how long their sequences are.

    The length is that of the first token ids (a decoder's, beside sounds), else of activations
    (batch, sequence, width); None of what has no positions yet, as images.
    """
    tensors = [t for t in tree_leaves(call) if isinstance(t, torch.Tensor) and t.dim()]
    ids = [t for t in tensors if t.dtype == torch.long and t.dim() > 1]
    wide = [t for t in tensors if t.is_floating_point() and t.dim() == 3]
    length = ids[0].size(-1) if ids else wide[0].size(1) if wide else None
    return (int(tensors[0].size(0)) if tensors else 1), length


def said_of(batch: int, length: int | None) -> str:
    """The shape of a call in words: as ``shape_of`` gives it."""
    return f"batch {batch}" + (f", sequence {length}" if length else "")


def in_float32(call: Any) -> Any:
    """What is called with floating tensors of any precision, for a copy of a model in float32."""

    def single(t: torch.Tensor) -> torch.Tensor:
        return t.float() if t.is_floating_point() else t

    return tree_map_only(torch.Tensor, single, call)


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


def vocabulary_of(model: nn.Module) -> int | None:
    """How many ids a model knows, as its config or else its first table says; None: no table."""
    tables = (m.num_embeddings for m in model.modules() if isinstance(m, nn.Embedding))
    return getattr(getattr(model, "config", None), "vocab_size", None) or next(tables, None)


def random_ids(model: nn.Module, call: Call, generator: torch.Generator) -> Call:
    """``call`` with random numbers, and ids that the model knows, for its zeros."""
    vocab = vocabulary_of(model) or 2

    def drawn(x: torch.Tensor) -> torch.Tensor:
        if x.is_floating_point():
            return torch.randn(x.shape, generator=generator, dtype=x.dtype)
        return torch.randint(min(2, vocab - 1), vocab, x.shape, generator=generator)

    return tree_map_only(torch.Tensor, drawn, call)  # type: ignore[no-any-return]
