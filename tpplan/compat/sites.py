"""Where in a model's code something runs."""

from __future__ import annotations

import itertools
import sys
from types import CodeType, FrameType
from typing import NamedTuple

from torch import nn

# lines and columns in a module, the innermost first
Site = tuple[tuple[str | int | None, ...], ...]

# the frame in which a module's forward is called
_CALL = nn.Module._call_impl.__code__
_CHECKPOINT = "torch.utils.checkpoint"


class Running(NamedTuple):
    """What runs of a model's code.

    Attributes:
        site: the place in the code. It is that of the module called last or, where that has none
            of its own, as torch's own modules, of the one around it.
        module: the one called last.
        checkpointed: whether a part of its forward that is recomputed in backward led there.
    """

    site: Site
    module: nn.Module | None
    checkpointed: bool


def running(forward: CodeType = _CALL) -> Running:
    """What runs of a model's code now.

    Args:
        forward: code of a method as which modules may be called besides.
    """
    lines: list[tuple[str | int | None, ...]] = []
    module, checkpointed, whole = None, False, False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not (whole and module is not None):
        name = frame.f_globals.get("__name__", "")
        if name.partition(".")[0] in ("torch", "tpplan"):
            whole = bool(lines)
            if module is None and frame.f_code in (_CALL, forward):
                module = frame.f_locals["self"]
            checkpointed |= module is None and name == _CHECKPOINT
        elif not whole:
            lines.append((name, *_position(frame)))
        frame = frame.f_back
    return Running(tuple(lines), module, checkpointed)


def _position(frame: FrameType) -> tuple[int | None, ...]:
    """Where a frame is in its file, as the code that Dynamo makes of it says as well."""
    positions = frame.f_code.co_positions()
    here = next(itertools.islice(positions, frame.f_lasti // 2, None), (None,))
    # Python may be told to leave columns out
    return here if None not in here else (frame.f_lineno, frame.f_lasti)
