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
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from splitserve.model.simd import fma_vectors, kernel, splat_vector, vector_type

PANEL = 16
_LANES = 8
_VECTORS = PANEL // _LANES
_ROWS = 6
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


def _tile(rows: int):
    """The intrinsic that computes `rows` x 16 outputs: x and out by offset and row stride."""

    @intrinsic
    def tile(typingctx, x, x_at, x_step, packed, packed_at, num_in, out, out_at, out_step):
        def codegen(context, builder, signature, args):
            kinds = signature.args

            def pointer(array, offset):
                data = context.make_array(kinds[array])(context, builder, args[array]).data
                return builder.gep(data, [args[offset]])

            def vector_at(base, offset):
                return builder.bitcast(builder.gep(base, [offset]), vector_type().as_pointer())

            def index(value):
                return ir.Constant(ir.IntType(64), value)

            x_base, packed_base, out_base = pointer(0, 1), pointer(3, 4), pointer(6, 7)
            zero = ir.Constant(vector_type(), [0.0] * _LANES)
            x_rows = [
                builder.gep(x_base, [builder.mul(args[2], index(row))]) for row in range(rows)
            ]
            sums = [
                [cgutils.alloca_once(builder, vector_type()) for _ in range(_VECTORS)]
                for _ in range(rows)
            ]
            for row in sums:
                for slot in row:
                    builder.store(zero, slot)
            with cgutils.for_range(builder, args[5]) as loop:
                base = builder.mul(loop.index, index(PANEL))
                weights = [
                    builder.load(
                        vector_at(packed_base, builder.add(base, index(v * _LANES))), align=4
                    )
                    for v in range(_VECTORS)
                ]
                for x_row, row in zip(x_rows, sums, strict=True):
                    one = splat_vector(builder, builder.load(builder.gep(x_row, [loop.index])))
                    for weight, slot in zip(weights, row, strict=True):
                        builder.store(fma_vectors(builder, one, weight, builder.load(slot)), slot)
            for i, row in enumerate(sums):
                start = builder.mul(args[8], index(i))
                for v, slot in enumerate(row):
                    target = vector_at(out_base, builder.add(start, index(v * _LANES)))
                    builder.store(builder.load(slot), target, align=4)
            return context.get_dummy_value()

        i = types.intp
        return types.void(x, i, i, packed, i, i, out, i, i), codegen

    return tile


_tile1, _tile2, _tile3, _tile4, _tile5, _tile6 = (_tile(rows) for rows in range(1, _ROWS + 1))


@kernel("void(float32[::1], float32[::1], float32[::1], int64, int64, int64, int64, int64)")
def multiply_panels(
    x: Floats,
    packed: Floats,
    out: Floats,
    num_rows: int,
    num_in: int,
    num_out: int,
    first: int,
    last: int,
) -> None:
    """Columns of the panels [first, last) of out [num_rows, num_out]; all arrays flat."""
    edge = np.empty(_ROWS * PANEL, np.float32)
    for panel in range(first, last):
        column = panel * PANEL
        weights = panel * num_in * PANEL
        whole = column + PANEL <= num_out
        row = 0
        while row < num_rows:
            count = min(_ROWS, num_rows - row)
            target, at, step = (out, row * num_out + column, num_out) if whole else (edge, 0, PANEL)
            at_x = row * num_in
            if count == 6:
                _tile6(x, at_x, num_in, packed, weights, num_in, target, at, step)
            elif count == 5:
                _tile5(x, at_x, num_in, packed, weights, num_in, target, at, step)
            elif count == 4:
                _tile4(x, at_x, num_in, packed, weights, num_in, target, at, step)
            elif count == 3:
                _tile3(x, at_x, num_in, packed, weights, num_in, target, at, step)
            elif count == 2:
                _tile2(x, at_x, num_in, packed, weights, num_in, target, at, step)
            else:
                _tile1(x, at_x, num_in, packed, weights, num_in, target, at, step)
            if not whole:
                for i in range(count):
                    for j in range(num_out - column):
                        out[(row + i) * num_out + column + j] = edge[i * PANEL + j]
            row += count


def matmul(
    x: Floats, packed: Floats, num_out: int, parallel: Callable[..., None] | None = None
) -> Floats:
    """x [M, K] times the packed W [N, K], transposed: [M, N].

    parallel: `gemm_parallel.multiply_parallel` bound to a number of threads, or None for one.
    """
    num_rows, num_in = x.shape
    out = np.empty((num_rows, num_out), np.float32)
    flat = (x.reshape(-1), packed.reshape(-1), out.reshape(-1), num_rows, num_in, num_out)
    if parallel is not None and num_rows * num_in * num_out >= _MIN_WORK_FOR_THREADS:
        parallel(*flat)
    else:
        multiply_panels(*flat, 0, len(packed))
    return out
