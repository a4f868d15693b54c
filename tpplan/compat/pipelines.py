"""Pipelines: for what torch calls the stage that runs now."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from types import FrameType, ModuleType
from typing import Any

import torch


def _loaded(name: str) -> ModuleType | None:
    """A module of torch's pipelines, which takes long to import, if anybody did."""
    if torch.compiler.is_compiling():
        return None  # the code that is traced runs for whoever calls it later
    return sys.modules.get(f"torch.distributed.pipelining.{name}")


def _callers() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def only_sizes_count() -> bool:
    """Whether a pipeline learns the sizes of its stages' outputs.

    It does so on memory that nobody has written to: the values are no inputs of anybody's.
    """
    stage = _loaded("stage")
    if stage is None:
        return False
    infer = vars(stage.PipelineStage).get("_forward_metadata_inference")
    if infer is None:  # a torch from before there was one, which ran stages on zeros
        return False
    code = inspect.unwrap(infer).__code__
    return any(frame.f_code is code for frame in _callers())


def backward_is_split() -> bool:
    """Whether a pipeline runs the backward of this forward in two: inputs first, weights later."""
    schedules = _loaded("schedules")
    if schedules is None:
        return False
    for frame in _callers():
        if frame.f_globals is vars(schedules):
            schedule = frame.f_locals.get("self")
            if isinstance(schedule, schedules.PipelineScheduleMulti):
                return _splits(schedule, schedules)
    return False


def _splits(schedule: Any, schedules: ModuleType) -> bool:
    # as it was written down, and as it is run: one of them may be missing
    tables = (getattr(schedule, n, None) for n in ("pipeline_order", "pipeline_order_with_comms"))
    return any(
        action is not None and action.computation_type is schedules.BACKWARD_WEIGHT
        for table in tables
        for action in (table or {}).get(schedule.rank, ())
    )
