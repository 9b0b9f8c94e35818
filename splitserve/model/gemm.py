"""y = x W^T for packed float32 weights, from one row to thousands, with one order of summation.

Every element is a chain of fused multiply-adds over k = 0, 1, ..., K - 1, whatever the number of
rows and threads: so a row's bits depend on that row alone (design 3.10), which no BLAS promises.
The register tile (rows x 16 columns, up to 6 x 2 vectors of 8 lanes) is that of BLIS's AVX2
micro-kernel (Van Zee & van de Geijn 2015); panels of 16 columns stay in L2 while all rows pass.

At few rows a BLAS is far from memory bandwidth here: see docs/decisions/0007-packed-linears.md.
"""

# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from splitserve.model.simd import kernel
from splitserve.model.tiles import PANEL, make_tile

_ROWS = 6
EDGE = _ROWS * PANEL  # floats that a kernel needs to work in
_MIN_WORK_FOR_THREADS = 8_000_000  # multiply-adds; below, waking threads costs more than they do

Floats = npt.NDArray[np.float32]


def pack(weight: Floats) -> Floats:
    """W [N, K] as panels [ceil(N / 16), K, 16], the last one filled up with zeros."""
    num_out, num_in = weight.shape
    num_panels = -(-num_out // PANEL)
    padded = np.zeros((num_panels * PANEL, num_in), np.float32)
    padded[:num_out] = weight
    return np.ascontiguousarray(padded.reshape(num_panels, PANEL, num_in).transpose(0, 2, 1))


def unpack_rows(packed: Floats, rows: npt.NDArray[np.int64]) -> Floats:
    """Rows of W, [len(rows), K], out of its panels."""
    picked: Floats = packed[rows // PANEL, :, rows % PANEL]
    return np.ascontiguousarray(picked)


def quantize_panels(panels: Floats) -> tuple[npt.NDArray[np.int8], Floats]:
    """Panels of W as int8 levels and one scale per output, [16 x number of panels]: W = scale x
    level.

    Symmetric, per output channel, to the nearest of 255 levels: weight-only quantization, the
    row-wise form of LLM.int8() (Dettmers et al. 2022) without its outliers.
    """
    scales = np.abs(panels).max(axis=1) / np.float32(127)
    scales[scales == 0] = 1
    levels = np.rint(panels / scales[:, None, :]).astype(np.int8)
    return levels, np.ascontiguousarray(scales.reshape(-1))


_tile1, _tile2, _tile3, _tile4, _tile5, _tile6 = (make_tile(rows) for rows in range(1, _ROWS + 1))
_tile1x4, _tile2x2 = make_tile(1, 4), make_tile(2, 2)
_int1x4, _int2x2, _int1, _int2, _int4 = (
    make_tile(rows, panels, int8=True) for rows, panels in ((1, 4), (2, 2), (1, 1), (2, 1), (4, 1))
)


@kernel(
    "void(float32[::1], float32[::1], float32[::1], float32[::1], int64, int64, int64, int64,"
    " int64)"
)
def multiply_panels(
    x: Floats,
    packed: Floats,
    out: Floats,
    edge: Floats,
    num_rows: int,
    num_in: int,
    num_out: int,
    first: int,
    last: int,
) -> None:
    """Columns of the panels [first, last) of out [num_rows, num_out]; all arrays flat.

    edge: [EDGE] to work in.
    """
    ahead = num_in * PANEL  # the next panel, while rows pass over this one
    panel = first
    while panel < last:
        column = panel * PANEL
        weights = panel * num_in * PANEL
        if num_rows == 1 and panel + 4 <= last and column + 4 * PANEL <= num_out:
            _tile1x4(x, 0, num_in, packed, weights, num_in, out, column, num_out, 0)
            panel += 4
            continue
        if num_rows == 2 and panel + 2 <= last and column + 2 * PANEL <= num_out:
            _tile2x2(x, 0, num_in, packed, weights, num_in, out, column, num_out, 0)
            panel += 2
            continue
        panel += 1
        whole = column + PANEL <= num_out
        row = 0
        while row < num_rows:
            count = min(_ROWS, num_rows - row)
            target, at, step = (out, row * num_out + column, num_out) if whole else (edge, 0, PANEL)
            at_x = row * num_in
            if count == 6:
                _tile6(x, at_x, num_in, packed, weights, num_in, target, at, step, ahead)
            elif count == 5:
                _tile5(x, at_x, num_in, packed, weights, num_in, target, at, step, ahead)
            elif count == 4:
                _tile4(x, at_x, num_in, packed, weights, num_in, target, at, step, ahead)
            elif count == 3:
                _tile3(x, at_x, num_in, packed, weights, num_in, target, at, step, ahead)
            elif count == 2:
                _tile2(x, at_x, num_in, packed, weights, num_in, target, at, step, ahead)
            else:
                _tile1(x, at_x, num_in, packed, weights, num_in, target, at, step, ahead)
            if not whole:
                for i in range(count):
                    for j in range(num_out - column):
                        out[(row + i) * num_out + column + j] = edge[i * PANEL + j]
            row += count


@kernel(
    "void(float32[::1], int8[::1], float32[::1], float32[::1], float32[::1], int64, int64, int64,"
    " int64, int64)"
)
def multiply_int8_panels(
    x: Floats,
    levels: npt.NDArray[np.int8],
    scales: Floats,
    out: Floats,
    tile: Floats,
    num_rows: int,
    num_in: int,
    num_out: int,
    first: int,
    last: int,
) -> None:
    """The same with int8 weights; each output is scaled once, after its sum. tile: [EDGE]."""
    ahead = num_in * PANEL  # the next panel, while rows pass over this one
    panel = first
    while panel < last:
        column = panel * PANEL
        weights = panel * num_in * PANEL
        wide = 4 if num_rows == 1 else 2 if num_rows == 2 else 1
        if panel + wide > last:
            wide = 1
        width = min(wide * PANEL, num_out - column)
        row = 0
        while row < num_rows:
            left = num_rows - row
            count = 4 if left >= 4 else 2 if left >= 2 else 1
            at = row * num_in
            if wide == 4:
                _int1x4(x, at, num_in, levels, weights, num_in, tile, 0, 4 * PANEL, wide * ahead)
            elif wide == 2:
                _int2x2(x, at, num_in, levels, weights, num_in, tile, 0, 2 * PANEL, ahead)
            elif count == 4:
                _int4(x, at, num_in, levels, weights, num_in, tile, 0, PANEL, ahead)
            elif count == 2:
                _int2(x, at, num_in, levels, weights, num_in, tile, 0, PANEL, ahead)
            else:
                _int1(x, at, num_in, levels, weights, num_in, tile, 0, PANEL, ahead)
            for i in range(count):
                for j in range(width):
                    value = tile[i * wide * PANEL + j] * scales[column + j]
                    out[(row + i) * num_out + column + j] = value
            row += count
        panel += wide


def matmul_int8(x: Floats, levels: npt.NDArray[np.int8], scales: Floats, num_out: int) -> Floats:
    """x [M, K] times quantized W [N, K], transposed: [M, N]."""
    num_rows, num_in = x.shape
    out = np.empty((num_rows, num_out), np.float32)
    multiply_int8_panels(
        x.reshape(-1),
        levels.reshape(-1),
        scales,
        out.reshape(-1),
        np.empty(EDGE, np.float32),
        num_rows,
        num_in,
        num_out,
        0,
        len(levels),
    )
    return out


def matmul(
    x: Floats, packed: Floats, num_out: int, parallel: Callable[..., None] | None = None
) -> Floats:
    """x [M, K] times the packed W [N, K], transposed: [M, N].

    parallel: `gemm_parallel.multiply_parallel` bound to a number of threads, or None for one.
    """
    num_rows, num_in = x.shape
    out = np.empty((num_rows, num_out), np.float32)
    flat = (x.reshape(-1), packed.reshape(-1), out.reshape(-1))
    shape = (num_rows, num_in, num_out)
    if parallel is not None and num_rows * num_in * num_out >= _MIN_WORK_FOR_THREADS:
        parallel(*flat, *shape)
    else:
        multiply_panels(*flat, np.empty(EDGE, np.float32), *shape, 0, len(packed))
    return out
