"""The Triton bodies of ``norm.py``, and which of them runs for rows of which width.

Short rows are held whole, one program each; long ones are read in chunks. Backward, sums over the
rows of long ones (for weight and bias) do not fit the registers beside the rows, and would be read
and written for each row from the cache: so one kernel finds the two sums of each row, and another
goes down the rows, some columns to a program.
"""

from __future__ import annotations

from typing import Any

from tpplan.kernels.launch import jit, power, tl

# bytes of the longest rows that are held whole; longer ones are read in chunks, and again for
# each pass
_WHOLE_FORWARD, _WHOLE_BACKWARD = 65536, 16384
CHUNK = 2048


@jit
def forward_whole(
    x, residual, weight, bias, y, total, means, rstds, x_row, r_row, h, eps,
    OFFSET: tl.constexpr, CENTRED: tl.constexpr, EARLY: tl.constexpr, ADDS: tl.constexpr,
    SCALES: tl.constexpr, SHIFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < h
    values = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
    if ADDS:
        values += tl.load(residual + row * r_row + columns, mask=inside, other=0.0).to(tl.float32)
        values = values.to(total.dtype.element_ty).to(tl.float32)
        tl.store(total + row * h + columns, values, mask=inside)
    centred = values
    if CENTRED:
        mean = tl.sum(values, 0) / h
        centred = tl.where(inside, values - mean, 0.0)
        rest = tl.sum(centred, 0) / h
        centred = tl.where(inside, centred - rest, 0.0)
        tl.store(means + 2 * row, mean)
        tl.store(means + 2 * row + 1, rest)
    rstd = 1.0 / tl.sqrt(tl.sum(centred * centred, 0) / h + eps)
    tl.store(rstds + row, rstd)
    unit = centred * rstd
    if EARLY:
        unit = unit.to(x.dtype.element_ty).to(tl.float32)
    if SCALES:
        unit *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + OFFSET
    if SHIFTS:
        unit += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + row * h + columns, unit, mask=inside)


@jit
def forward_chunks(
    x, residual, weight, bias, y, total, means, rstds, x_row, r_row, h, eps,
    OFFSET: tl.constexpr, CENTRED: tl.constexpr, EARLY: tl.constexpr, ADDS: tl.constexpr,
    SCALES: tl.constexpr, SHIFTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    mean = 0.0
    rest = 0.0
    given = x + row * x_row
    if CENTRED or ADDS:
        sums = tl.zeros((BLOCK,), tl.float32)
        for start in range(0, h, BLOCK):
            columns = start + lanes
            inside = columns < h
            values = tl.load(given + columns, mask=inside, other=0.0).to(tl.float32)
            if ADDS:
                more = tl.load(residual + row * r_row + columns, mask=inside, other=0.0)
                values += more.to(tl.float32)
                values = values.to(total.dtype.element_ty).to(tl.float32)
                tl.store(total + row * h + columns, values, mask=inside)
            sums += values
        if CENTRED:
            mean = tl.sum(sums, 0) / h
    summed = given
    if ADDS:
        summed = total + row * h
    squares = tl.zeros((BLOCK,), tl.float32)
    left = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, h, BLOCK):
        columns = start + lanes
        inside = columns < h
        values = tl.load(summed + columns, mask=inside, other=0.0).to(tl.float32)
        centred = tl.where(inside, values - mean, 0.0)
        squares += centred * centred
        left += centred
    variance = tl.sum(squares, 0) / h
    if CENTRED:
        rest = tl.sum(left, 0) / h
        variance -= rest * rest
        tl.store(means + 2 * row, mean)
        tl.store(means + 2 * row + 1, rest)
    rstd = 1.0 / tl.sqrt(variance + eps)
    tl.store(rstds + row, rstd)
    for start in range(0, h, BLOCK):
        columns = start + lanes
        inside = columns < h
        values = tl.load(summed + columns, mask=inside, other=0.0).to(tl.float32)
        unit = (values - mean - rest) * rstd
        if EARLY:
            unit = unit.to(x.dtype.element_ty).to(tl.float32)
        if SCALES:
            unit *= tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + OFFSET
        if SHIFTS:
            unit += tl.load(bias + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(y + row * h + columns, unit, mask=inside)


@jit
def backward_whole(
    dy, x, weight, means, rstds, dtotal, dx, dws, dbs, dy_row, x_row, d_row, rows, h,
    OFFSET: tl.constexpr, CENTRED: tl.constexpr, EARLY: tl.constexpr, ADDS: tl.constexpr,
    SCALES: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < h
    scale = tl.full((BLOCK,), 1.0, tl.float32)
    if SCALES:
        scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32) + OFFSET
    dw = tl.zeros((BLOCK,), tl.float32)
    db = tl.zeros((BLOCK,), tl.float32)
    for step in range(tl.cdiv(rows - tl.program_id(0), tl.num_programs(0))):
        row = program + step * tl.num_programs(0)
        grad = tl.load(dy + row * dy_row + columns, mask=inside, other=0.0).to(tl.float32)
        unit = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + row)
        if CENTRED:
            unit = unit - tl.load(means + 2 * row) - tl.load(means + 2 * row + 1)
        unit = tl.where(inside, unit * rstd, 0.0)
        scaled = grad * scale
        result = scaled - unit * (tl.sum(scaled * unit, 0) / h)
        if CENTRED:
            result -= tl.sum(scaled, 0) / h
        result *= rstd
        if ADDS:
            more = tl.load(dtotal + row * d_row + columns, mask=inside, other=0.0)
            result += more.to(tl.float32)
        tl.store(dx + row * h + columns, result, mask=inside)
        if DW:
            if EARLY:
                unit = unit.to(x.dtype.element_ty).to(tl.float32)
            dw += grad * unit
        if DB:
            db += grad
    place = program * h + columns
    if DW:
        tl.store(dws + place, dw, mask=inside)
    if DB:
        tl.store(dbs + place, db, mask=inside)


@jit
def backward_sums(
    dy, x, weight, means, rstds, sums, dy_row, x_row, h,
    OFFSET: tl.constexpr, CENTRED: tl.constexpr, SCALES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    # mean(g) and mean(g * u) of each row
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    mean = 0.0
    rest = 0.0
    if CENTRED:
        mean = tl.load(means + 2 * row)
        rest = tl.load(means + 2 * row + 1)
    total = tl.zeros((BLOCK,), tl.float32)
    products = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, h, BLOCK):
        columns = start + lanes
        inside = columns < h
        scaled = tl.load(dy + row * dy_row + columns, mask=inside, other=0.0).to(tl.float32)
        values = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
        if SCALES:
            scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
            scaled *= scale + OFFSET
        products += scaled * (values - mean - rest)
        total += scaled
    tl.store(sums + 2 * row, tl.sum(total, 0) / h)
    tl.store(sums + 2 * row + 1, tl.sum(products, 0) * tl.load(rstds + row) / h)


@jit
def backward_columns(
    dy, x, weight, means, rstds, sums, dtotal, dx, dws, dbs, dy_row, x_row, d_row, rows, h,
    OFFSET: tl.constexpr, CENTRED: tl.constexpr, EARLY: tl.constexpr, ADDS: tl.constexpr,
    SCALES: tl.constexpr, DW: tl.constexpr, DB: tl.constexpr, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(h, COLUMNS)
    group = tl.program_id(0) // across
    stride = tl.num_programs(0) // across * ROWS
    lanes = (tl.program_id(0) % across) * COLUMNS + tl.arange(0, COLUMNS)
    columns = lanes[None, :]
    if SCALES:
        scale = tl.load(weight + columns, mask=columns < h, other=0.0).to(tl.float32) + OFFSET
    # summed over its rows once, at the end: they are in several warps
    dw = tl.zeros((ROWS, COLUMNS), tl.float32)
    db = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(tl.cdiv(rows - group * ROWS, stride)):
        row = (group * ROWS + step * stride).to(tl.int64) + tl.arange(0, ROWS)[:, None]
        inside = (row < rows) & (columns < h)
        grad = tl.load(dy + row * dy_row + columns, mask=inside, other=0.0).to(tl.float32)
        unit = tl.load(x + row * x_row + columns, mask=inside, other=0.0).to(tl.float32)
        rstd = tl.load(rstds + row, mask=row < rows, other=0.0)
        if CENTRED:
            unit -= tl.load(means + 2 * row, mask=row < rows, other=0.0)
            unit -= tl.load(means + 2 * row + 1, mask=row < rows, other=0.0)
        unit *= rstd
        result = grad
        if SCALES:
            result = grad * scale
        result -= unit * tl.load(sums + 2 * row + 1, mask=row < rows, other=0.0)
        if CENTRED:
            result -= tl.load(sums + 2 * row, mask=row < rows, other=0.0)
        result *= rstd
        if ADDS:
            result += tl.load(dtotal + row * d_row + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx + row * h + columns, result, mask=inside)
        if DW:
            if EARLY:
                unit = unit.to(x.dtype.element_ty).to(tl.float32)
            dw += grad * unit
        if DB:
            db += grad
    place = group.to(tl.int64) * h + lanes
    if DW:
        tl.store(dws + place, tl.sum(dw, 0), mask=lanes < h)
    if DB:
        tl.store(dbs + place, tl.sum(db, 0), mask=lanes < h)


def _fits(h: int, itemsize: int, most: int) -> bool:
    # rows that are not aligned need an address for each element, which take half the registers
    return h * itemsize <= (most if h % 16 == 0 else most // 2)


def plan_forward(h: int, itemsize: int) -> tuple[Any, int, int]:
    """The kernel for rows of ``h`` columns, its block, and how many warps run it."""
    if not _fits(h, itemsize, _WHOLE_FORWARD):
        return forward_chunks, CHUNK, 4
    block = power(h)
    return forward_whole, block, min(max(block // 1024, 1), 16)


def plan_backward(h: int, itemsize: int) -> tuple[int, int, int] | None:
    """Block and warps of ``backward_whole``, and its programs for each processor.

    None for rows that are too long for it.
    """
    if not _fits(h, itemsize, _WHOLE_BACKWARD):
        return None
    block = power(h)
    return block, min(max(block // 512, 1), 16), max(1, min(8, 8192 // block))
