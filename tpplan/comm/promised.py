"""Copies of sharded tensors that are made when somebody reads them, and else never.

Model code makes float32 copies of 16-bit logits for a loss that does not read them (of
``roles.logits``): twice the bytes of the largest tensor there is.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, ClassVar

import torch

from tpplan import compat
from tpplan.comm.placements import dim_of
from tpplan.comm.sharded import Sharded, computed, on_rows
from tpplan.comm.stream import version_of
from tpplan.compat import local_of, spec_of

LOW = (torch.bfloat16, torch.float16)
"""What losses of are in float32."""
_VIEWS = frozenset(
    {
        torch.ops.aten._unsafe_view.default, torch.ops.aten.alias.default,
        torch.ops.aten.detach.default, torch.ops.aten.permute.default,
        torch.ops.aten.select.int, torch.ops.aten.slice.Tensor, torch.ops.aten.squeeze.dim,
        torch.ops.aten.transpose.int, torch.ops.aten.unsqueeze.default, torch.ops.aten.view.default,
    }
)  # fmt: skip
_MAKING = threading.RLock()


class Promised(Sharded):
    """A tensor of whose rows nothing is there yet but how to make them.

    When they are read they are made, and the tensor's class is then that of any other.
    """

    kept: ClassVar[type[Sharded]]
    """The class of those that are there."""
    _tpplan_later: _Later
    _tpplan_size: torch.Tensor
    """Rows without numbers."""

    @property
    def _local_tensor(self) -> torch.Tensor:
        with _MAKING:
            if isinstance(self, Promised):  # and no other thread has made them
                compat.put_local(self, self._tpplan_later.made())
                self.__class__ = self.kept  # type: ignore[assignment]
                del self._tpplan_later, self._tpplan_size
        return self._local_tensor

    @_local_tensor.setter
    def _local_tensor(self, rows: torch.Tensor) -> None:
        self._tpplan_size = rows

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        local_of(self)
        return self.__deepcopy__(memo)  # of the class it has now


class _Later:
    """An op on a sharded tensor, to be run as it would have been at once."""

    __slots__ = ("call", "queue", "version")

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.call = func, args, kwargs
        x = args[0]
        self.version = None if isinstance(x, Promised) else version_of(local_of(x))
        self.queue = torch.cuda.current_stream(x.device) if x.is_cuda else None

    def made(self) -> torch.Tensor:
        """The rows."""
        func, args, kwargs = self.call
        x, queue = args[0], self.queue
        if self.version not in (None, version_of(local_of(x))):
            raise RuntimeError(
                "a copy of sharded logits is made when it is read first, and the rows it is a copy "
                "of were changed before that, past the tensor that holds them: read it earlier "
                "(copy.to_local()), or change the logits themselves"
            )
        other = None if queue is None else torch.cuda.current_stream(x.device)
        if queue is None or other is None or other == queue:
            return _rows(func, args, kwargs)
        other.wait_stream(queue)
        rows = _rows(func, args, kwargs)
        other.synchronize()  # for streams that wait for the first one only
        return rows


def _rows(func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    with torch.inference_mode(False), torch.no_grad():
        return local_of(computed(func, args, kwargs))


def promised(func: Any, args: Any, kwargs: Any, kind: type[Promised]) -> Promised | None:
    """What an op makes, to be made later; None where it is to be run at once.

    Later are float32 copies of 16-bit tensors, and views and copies of those that are not there.
    """
    x = args[0] if args else None
    if not isinstance(x, Sharded) or compat.is_traced() or torch.compiler.is_compiling():
        return None
    missing = isinstance(x, Promised)
    if missing and func in _VIEWS:
        return _view(func, args, kind)
    if not _is_cast(func, x, kwargs) and not (missing and _is_copy(func, x, kwargs)):
        return None
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # it would not be in the graph
    return _copy(func, args, kwargs, kind)


def _is_cast(func: Any, x: Sharded, kwargs: Any) -> bool:
    if func is not torch.ops.aten._to_copy.default or x.dtype not in LOW:
        return False
    others = (value for name, value in kwargs.items() if name != "dtype")
    alone = all(value in (None, False, torch.preserve_format) for value in others)
    return alone and kwargs.get("dtype") is torch.float32 and x.is_contiguous()


def _is_copy(func: Any, x: Sharded, kwargs: Any) -> bool:
    return func is torch.ops.aten.clone.default and (
        x.is_contiguous() or kwargs.get("memory_format") is torch.contiguous_format
    )


def _copy(func: Any, args: Any, kwargs: Any, kind: type[Promised]) -> Promised:
    """To be made before what it is a copy of is changed."""
    x, dim = args[0], dim_of(args[0])
    like = x._tpplan_size if isinstance(x, Promised) else local_of(x)
    # numbers that nobody takes for others, should anybody read them
    rows = like.new_full((), torch.nan, dtype=torch.float32).expand(like.shape)
    spec = x._tpplan_source.spec(rows, x.size(dim), dim)
    made = _promise(rows, spec, kind, _Later(func, args, kwargs))
    x._tpplan_writable().copies.append(weakref.ref(made))
    return made


def _view(func: Any, args: Any, kind: type[Promised]) -> Promised | None:
    """To be made of what is there then: what was written to one is in the other."""
    x, *rest = args
    like: Any = compat.dtensor(x._tpplan_size, spec_of(x), x.kept)
    like._tpplan_source, like._tpplan_writes = x._tpplan_source, x._tpplan_writable()
    found = on_rows(func, like, *rest)
    if found is None:
        return None
    made = _promise(local_of(found), spec_of(found), kind, _Later(func, args, {}))
    made._tpplan_writes = found._tpplan_writes
    return made


def _promise(rows: torch.Tensor, spec: Any, kind: type[Promised], later: _Later) -> Promised:
    made: Any = compat.dtensor(rows, spec, kind)
    made._tpplan_source = later.call[1][0]._tpplan_source
    made._tpplan_size, made._tpplan_later = rows, later
    return made  # type: ignore[no-any-return]
