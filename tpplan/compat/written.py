"""How a model's code runs while it is looked at: as it was written, on one thread."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator

import torch

from tpplan.compat.threads import one_thread


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Within it code runs on one thread, and makes what it makes where nothing else was set.

    Of float32, as the copies are that it runs on, where it says nothing of a dtype; and what was
    compiled as it was written: no graph could be made of it on fake tensors.
    """
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with one_thread(), uncompiled():
            yield
    finally:
        torch.set_default_dtype(before)


def uncompiled() -> contextlib.AbstractContextManager[object]:
    """Within it what was compiled runs as it was written."""
    if "torch._dynamo" not in sys.modules:  # it takes long to import, and nothing is compiled yet
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return stance
