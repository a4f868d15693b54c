"""What torch's distributed checkpoints ask of a DTensor placed by ``Rows``."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tpplan import compat
from tpplan.comm.placements import block, ranges_of, tp_rank
from tpplan.layout import Rows, placed


class Chunked(DTensor):
    """A DTensor placed by ``Rows``: each rank saves and loads the ranges that it holds."""

    @property
    def rows(self) -> Rows:
        """The placement over the tensor-parallel ranks."""
        return ranges_of(compat.spec_of(self))  # type: ignore[return-value]

    def __create_write_items__(self, fqn: str, object: Any) -> list[Any]:
        from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
        from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

        properties = TensorProperties.create_from_tensor(compat.local_of(self))
        return [
            WriteItem(
                index=MetadataIndex(fqn, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk=chunk, properties=properties, size=self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

        # ranks that share rows must name the same chunks: a checkpoint's may not overlap
        return [
            ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
            for offsets, sizes, _ in chunks(self)
        ]

    def __get_tensor_shard__(self, index: Any) -> torch.Tensor:
        dim = self.rows.dim
        for offsets, sizes, at in chunks(self):
            if index.offset is None or tuple(index.offset) == tuple(offsets):
                return compat.local_of(self).narrow(dim, at, sizes[dim])
        raise ValueError(f"no rows of this rank begin at {index.offset}")


def chunks(t: Chunked) -> list[tuple[list[int], list[int], int]]:
    """What this rank holds under ``Rows``: offsets and sizes within the whole tensor, and the
    first local row."""
    rows = t.rows
    ranges, found = block(t), []
    if any(start == stop for start, stop in ranges):
        return []
    first, last = ranges[rows.dim]
    for at, (start, stop) in placed(rows.cells[tp_rank(t)]):
        begin, end = max(at, first), min(at + stop - start, last)
        if begin < end:
            offsets = [start for start, _ in ranges]
            sizes = [stop - start for start, stop in ranges]
            offsets[rows.dim], sizes[rows.dim] = start + begin - at, end - begin
            found.append((offsets, sizes, begin - first))
    return found
