"""The register tiles of the packed product, as LLVM code: what numba can't be asked for.

A tile computes `rows` x (16 x `panels`) outputs, each as one chain of fused multiply-adds over k.
Few rows take several panels at once: a chain waits for its own last step, so it takes about eight
of them side by side to keep the vector unit busy.
"""

# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import cgutils, types
from numba.extending import intrinsic

from splitserve.model.simd import (
    LANES,
    fma_vectors,
    prefetch_address,
    splat_vector,
    vector_type,
)

PANEL = 16
_VECTORS = PANEL // LANES


def make_tile(rows: int, panels: int = 1, *, int8: bool = False):
    """An intrinsic tile(x, x_at, x_step, packed, packed_at, num_in, out, out_at, out_step, ahead).

    x, packed and out are flat; _at is where the tile begins, _step from row to row. Outputs of
    adjacent panels lie side by side. With int8 the weights are levels, and out lacks their scales.
    ahead: how many weights on from those in use to ask memory for.
    """

    @intrinsic
    def tile(typingctx, x, x_at, x_step, packed, packed_at, num_in, out, out_at, out_step, ahead):
        def codegen(context, builder, signature, args):
            kinds = signature.args

            def pointer(array, offset):
                data = context.make_array(kinds[array])(context, builder, args[array]).data
                return builder.gep(data, [args[offset]])

            def at(base, offset):
                return builder.gep(base, [offset])

            def index(value):
                return ir.Constant(ir.IntType(64), value)

            def weights_at(place):
                if not int8:
                    vector = builder.bitcast(place, vector_type().as_pointer())
                    return builder.load(vector, align=4)
                eight = ir.VectorType(ir.IntType(8), LANES)
                levels = builder.load(builder.bitcast(place, eight.as_pointer()), align=1)
                wide = builder.sext(levels, ir.VectorType(ir.IntType(32), LANES))
                return builder.sitofp(wide, vector_type())

            x_base, packed_base, out_base = pointer(0, 1), pointer(3, 4), pointer(6, 7)
            x_rows = [at(x_base, builder.mul(args[2], index(row))) for row in range(rows)]
            panel_step = builder.mul(args[5], index(PANEL))
            bases = [at(packed_base, builder.mul(panel_step, index(one))) for one in range(panels)]
            byte = ir.IntType(8).as_pointer()
            zero = ir.Constant(vector_type(), [0.0] * LANES)
            sums = [
                [cgutils.alloca_once(builder, vector_type()) for _ in range(panels * _VECTORS)]
                for _ in range(rows)
            ]
            for row in sums:
                for slot in row:
                    builder.store(zero, slot)
            with cgutils.for_range(builder, args[5]) as loop:
                start = builder.mul(loop.index, index(PANEL))
                weights = [
                    weights_at(at(base, builder.add(start, index(v * LANES))))
                    for base in bases
                    for v in range(_VECTORS)
                ]
                for base in bases:
                    later = at(base, builder.add(start, args[9]))
                    prefetch_address(builder, builder.bitcast(later, byte))
                for x_row, row in zip(x_rows, sums, strict=True):
                    one = splat_vector(builder, builder.load(at(x_row, loop.index)))
                    for weight, slot in zip(weights, row, strict=True):
                        builder.store(fma_vectors(builder, one, weight, builder.load(slot)), slot)
            for i, row in enumerate(sums):
                first = builder.mul(args[8], index(i))
                for v, slot in enumerate(row):
                    place = at(out_base, builder.add(first, index(v * LANES)))
                    vector = builder.bitcast(place, vector_type().as_pointer())
                    builder.store(builder.load(slot), vector, align=4)
            return context.get_dummy_value()

        i = types.intp
        return types.void(x, i, i, packed, i, i, out, i, i, i), codegen

    return tile
