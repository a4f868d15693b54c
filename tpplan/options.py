"""Options that several commands have, and what is read of them."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from tpplan.language.styles import (
    KERNEL_CHOICES,
    OVERLAP_CHOICES,
    RECOMPUTE_CHOICES,
    SAVE_CHOICES,
)

if TYPE_CHECKING:
    import torch

EITHER = argparse.BooleanOptionalAction  # --x and --no-x
_INPUT = re.compile(
    r"(?P<name>[A-Za-z_]\w*):(?P<dtype>[a-z0-9]+)\[(?P<shape>[0-9, ]*)\](:(?P<below>[1-9]\d*))?"
)


def inputs_of(texts: Sequence[str], ids: int | None = None) -> dict[str, torch.Tensor] | None:
    """Tensors by name, of texts as in ``input_ids:int64[2,13]``; None where there are none.

    Args:
        ids: how many the model knows, if any: integers are less than that and 100, or less than
            what the text says at its end (``kinds:int64[2,13]:2``).

    Raises:
        ValueError: where a text is none of these.
    """
    import torch

    found = {}
    for text in texts:
        match = _INPUT.fullmatch(text)
        dtype = None if match is None else getattr(torch, match["dtype"], None)
        if match is None or not isinstance(dtype, torch.dtype):
            raise ValueError(
                f"--input '{text}': write it as in input_ids:int64[2,13], or in "
                "kinds:int64[2,13]:2 where they are to be less than 2"
            )
        shape = [int(n) for n in match["shape"].split(",") if n.strip()]
        generator = torch.Generator().manual_seed(0)
        if dtype.is_floating_point:
            value = torch.randn(shape, generator=generator).to(dtype)
        elif dtype == torch.bool:
            value = torch.ones(shape, dtype=dtype)
        else:
            below = int(match["below"] or min(ids or 100, 100))
            least = 0 if match["below"] else min(1, below - 1)  # which may be padding
            value = torch.randint(least, below, shape, generator=generator).to(dtype)
        found[match["name"]] = value
    return found or None


class Defaults(argparse.HelpFormatter):
    """Says what is taken where an option is left out, where that says something."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        says = isinstance(action.default, str | int | float) and action.default is not False
        told = says and action.option_strings and action.default != argparse.SUPPRESS
        return f"{action.help or ''} (default: %(default)s)".strip() if told else action.help


def plan_and_model(
    sub: argparse.ArgumentParser,
    model_required: bool = True,
    tp: int | None = 2,
    sized: bool = True,
    spread: bool = False,
) -> None:
    sub.add_argument("plan", help="a plan file, or a shipped plan's name")
    takes_model(sub, model_required)
    if sized:
        sub.add_argument("--tp", type=positive, default=tp, required=tp is None, help="ranks")
        if spread:
            sub.add_argument("--ep", type=positive, default=1, help="groups that share experts")
        sub.add_argument("--sequence-parallel", action=EITHER, help="override the plan's")


def takes_model(sub: argparse.ArgumentParser, required: bool = True) -> None:
    kinds = "config.json, a folder with one, or package.module:factory"
    sub.add_argument("--model", required=required, help=kinds)


def weighed_for(sub: argparse.ArgumentParser) -> None:
    sub.add_argument("--seq", type=positive, default=2048, help="sequence length")
    sub.add_argument("--hardware", help="a profile's name, or a YAML file of your own")


def example_inputs(sub: argparse.ArgumentParser) -> None:
    said = "an input of the model, as in input_ids:int64[2,13], or kinds:int64[2,13]:2 of integers"
    said += " less than 2; may be given several times"
    form = "NAME:DTYPE[SHAPE]"
    sub.add_argument("--input", action="append", default=[], metavar=form, help=said)


def how_trained(sub: argparse.ArgumentParser) -> None:
    add, labels = sub.add_argument, "give the token ids as labels too, for the model's loss"
    copies = "float32 copies of 16-bit parameters for the optimizer"
    weighed_for(sub)
    example_inputs(sub)
    add("--loss", action="store_true", help=labels)
    add("--optimizer", default="adamw", help="its name, or none")
    add("--clip", type=float, default=1.0, metavar="NORM", help="of gradients; 0 for not at all")
    add("--master-weights", action=EITHER, default=True, help=copies)
    add("--checkpointing", action="store_true", help="recompute every layer in backward")
    overriding(sub)


def overriding(sub: argparse.ArgumentParser) -> None:
    kinds = "of all kinds: triton, torch, or auto: Triton's where it runs on a GPU"
    words: Any = {"choices": RECOMPUTE_CHOICES, "nargs": "+", "metavar": "KIND"}
    sub.add_argument("--kernels", choices=KERNEL_CHOICES, help=kinds)
    sub.add_argument("--save", choices=SAVE_CHOICES, help="of gathered inputs, for backward")
    sub.add_argument("--overlap", choices=OVERLAP_CHOICES, help="of products and collectives")
    sub.add_argument("--recompute", help="in backward: norms, activations", **words)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value
