"""docs/troubleshooting.md has what may be said, and nothing that is not."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Mapping

import pytest
from torch._functorch import partitioners
from torch.distributed.tensor import _dispatch

from tests.docs.pages import page
from tests.docs.said import ROOMS, constants, messages, plain

PAGE = " ".join(page("troubleshooting.md").replace("`", "").split())
HEADINGS = [line for line in page("troubleshooting.md").splitlines() if line.startswith("### ")]
# beside those whose messages must be on the page, those whose messages may be
OTHERS = ("observe", "compat", "comm", "simulate", "suggestion", "language", "api.py", "kernels")

# strings that are no messages, by what they are for
EXEMPT: Mapping[str, tuple[str, ...]] = {
    "reports and tpplan explain": (
        "by its own forward",
        "the kernel's numbers are not the module's",
        "its width is sharded",
        "input gradient of",
    ),
    "what collectives are for, in reports": (
        "experts that the ranks chose, compared",
        "inputs of the ranks",
        "gradients of what it is given",
        "what ranks hold alike",
        "gradients of what it gives",
        "gradients of parameters added since",
        "how many tokens chose each expert",
        "sum of the gradients of replicated parameters",
        "gradient of what is given for all heads",
        "largest logit of each token",
        "sum of the exponentials",
        "logit of the target",
        "input of the table, as a head",
        "input of the table, again",
        "gradient of the logits",
    ),
    "a part of any message: the model or one of its tensors by name": (
        "the model itself",
        "the input of",
        "the gradient of",
    ),
}
DEMANDED = {
    said.words: said
    for said in messages()
    if said.is_prose and not any(said.words in group for group in EXEMPT.values())
}


@pytest.mark.parametrize("words", DEMANDED)
def test_every_message_is_on_the_page(words: str) -> None:
    """By its longest constant part; what is no message is to be added to EXEMPT."""
    said = DEMANDED[words]
    assert words in PAGE, f"tpplan/{said.file}:{said.line}"


def test_there_are_many() -> None:
    """The source is read as it is meant."""
    assert len(DEMANDED) > 80
    assert {file.partition("/")[0] for file in (s.file for s in DEMANDED.values())} == set(ROOMS)


@functools.cache
def source() -> set[str]:
    """All that may be said, by DTensor and by AOTAutograd as well."""
    said = {part for said in messages(ROOMS + OTHERS) for part in said.parts}
    return {*said, *constants(), *map(inspect.getsource, (_dispatch, partitioners))}


@pytest.mark.turns(32)
@pytest.mark.parametrize("heading", HEADINGS)
def test_every_entry_is_said(heading: str) -> None:
    """The longest constant part of each of its messages is in the source, or torch says it."""
    for message in re.findall(r"`([^`]+)`", heading):
        words = max((plain(part) for part in message.split("…")), key=len)
        assert any(words in part for part in source()), words
