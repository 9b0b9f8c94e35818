"""Eight float32 lanes as one value inside numba, so that the order of every sum is ours.

LLVM reorders no float operation unless it is allowed to (fastmath), so code written with these has
the same bits wherever it is inlined, and is as fast as the vector unit permits. A fused
multiply-add is asked for explicitly, never left to the compiler's choice.

Also here: where compiled code is cached. The directory's name holds a digest of the sources,
because numba looks only at the file that defines a function, not at what it inlines.
"""

# mypy: disable-error-code="misc,untyped-decorator,no-untyped-def,no-untyped-call"

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from llvmlite import ir  # type: ignore[import-untyped]
from numba.core import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic, models, register_model

LANES = 8
_SOURCES = ["simd", "kernels", "rows", "weights", "tiles", "gemm", "gemm_parallel"]

_FLOAT = ir.FloatType()
_INT = ir.IntType(32)
_FLOATS = ir.VectorType(_FLOAT, LANES)
_INTS = ir.VectorType(_INT, LANES)

F = TypeVar("F", bound=Callable[..., Any])


def cache_directory() -> Path:
    """Where compiled kernels are kept: $XDG_CACHE_HOME/splitserve/numba/<digest of the sources>."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    digest = hashlib.blake2b(digest_size=6)
    for name in _SOURCES:
        digest.update(Path(__file__).with_name(f"{name}.py").read_bytes())
    return Path(root) / "splitserve" / "numba" / digest.hexdigest()


def kernel(signature: str) -> Callable[[F], F]:
    """Compile a function now for `signature`, without the GIL, from the cache if it is there.

    It can't allocate: with numba's reference counts every array passed on costs two locked
    instructions, which took a third of attention's time.
    """

    def compile_now(function: F) -> F:
        options = {"nogil": True, "cache": _cache_is_usable(), "_nrt": False}
        return cast(F, numba.njit(signature, **options)(function))

    return compile_now


def parallel_kernel(signature: str) -> Callable[[F], F]:
    """The same with prange, on numba's threads."""

    def compile_now(function: F) -> F:
        made = numba.njit(signature, nogil=True, parallel=True, cache=_cache_is_usable())
        return cast(F, made(function))

    return compile_now


def inlined(function: F) -> F:
    """A helper that kernels inline."""
    return cast(F, numba.njit(inline="always")(function))


def _cache_is_usable() -> bool:
    """Point numba at our cache unless NUMBA_CACHE_DIR is set; False where none can be written."""
    if os.environ.get("NUMBA_CACHE_DIR"):
        return True
    directory = cache_directory()
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    numba.config.CACHE_DIR = str(directory)
    return os.access(directory, os.W_OK)


class Vec8Type(types.Type):
    """numba's name for eight float32 lanes."""

    def __init__(self) -> None:
        super().__init__(name="Vec8")


vec8 = Vec8Type()


@register_model(Vec8Type)
class Vec8Model(models.PrimitiveModel):
    """A Vec8 is an LLVM <8 x float>."""

    def __init__(self, dmm, fe_type) -> None:
        super().__init__(dmm, fe_type, _FLOATS)


def _address(context, builder, array_type, array, offset, element):
    data = context.make_array(array_type)(context, builder, array).data
    pointer = builder.gep(data, [offset])
    return builder.bitcast(pointer, element.as_pointer())


def _splat(builder, scalar, vector_type):
    lanes = ir.Constant(vector_type, ir.Undefined)
    first = builder.insert_element(lanes, scalar, ir.Constant(_INT, 0))
    mask = ir.Constant(_INTS, [0] * LANES)
    return builder.shuffle_vector(first, lanes, mask)


def vector_type() -> ir.VectorType:
    """The LLVM type of eight lanes."""
    return _FLOATS


def splat_vector(builder, scalar):
    """For code generators: the scalar in every lane."""
    return _splat(builder, scalar, _FLOATS)


def fma_vectors(builder, a, b, c):
    """For code generators: a * b + c, rounded once."""
    return _fma(builder, a, b, c)


def prefetch_address(builder, pointer):
    """For code generators: ask for the cache line at an i8 pointer; never faults."""
    byte = ir.IntType(8).as_pointer()
    function_type = ir.FunctionType(ir.VoidType(), [byte, _INT, _INT, _INT])
    function = get_or_insert_function(builder.module, function_type, "llvm.prefetch.p0i8")
    read, locality, data = 0, 2, 1
    builder.call(function, [pointer, *(ir.Constant(_INT, one) for one in (read, locality, data))])


def _call(builder, name, args):
    function_type = ir.FunctionType(_FLOATS, [_FLOATS] * len(args))
    return builder.call(get_or_insert_function(builder.module, function_type, name), args)


def _fma(builder, a, b, c):
    return _call(builder, "llvm.fma.v8f32", [a, b, c])


def _shuffle(builder, a, b, indices):
    return builder.shuffle_vector(a, b, ir.Constant(_INTS, indices))


@intrinsic
def load(typingctx, array, offset):
    """Lanes from a 1-D float32 array at `offset`, unaligned."""

    def codegen(context, builder, signature, args):
        pointer = _address(context, builder, signature.args[0], args[0], args[1], _FLOATS)
        return builder.load(pointer, align=4)

    return vec8(array, types.intp), codegen


@intrinsic
def prefetch(typingctx, array, offset):
    """Ask for the cache line that holds array[offset]; any offset is allowed."""

    def codegen(context, builder, signature, args):
        element = ir.IntType(8)
        pointer = _address(context, builder, signature.args[0], args[0], args[1], element)
        prefetch_address(builder, pointer)
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def store(typingctx, array, offset, vector):
    """Write the lanes to a 1-D float32 array at `offset`."""

    def codegen(context, builder, signature, args):
        pointer = _address(context, builder, signature.args[0], args[0], args[1], _FLOATS)
        builder.store(args[2], pointer, align=4)
        return context.get_dummy_value()

    return types.void(array, types.intp, vec8), codegen


@intrinsic
def splat(typingctx, scalar):
    """The scalar in every lane."""

    def codegen(context, builder, signature, args):
        return _splat(builder, args[0], _FLOATS)

    return vec8(types.float32), codegen


@intrinsic
def fma(typingctx, a, b, c):
    """a * b + c, rounded once."""

    def codegen(context, builder, signature, args):
        return _fma(builder, *args)

    return vec8(vec8, vec8, vec8), codegen


@intrinsic
def add(typingctx, a, b):
    """a + b per lane."""

    def codegen(context, builder, signature, args):
        return builder.fadd(*args)

    return vec8(vec8, vec8), codegen


@intrinsic
def sub(typingctx, a, b):
    """a - b per lane."""

    def codegen(context, builder, signature, args):
        return builder.fsub(*args)

    return vec8(vec8, vec8), codegen


@intrinsic
def mul(typingctx, a, b):
    """a * b per lane."""

    def codegen(context, builder, signature, args):
        return builder.fmul(*args)

    return vec8(vec8, vec8), codegen


@intrinsic
def div(typingctx, a, b):
    """a / b per lane."""

    def codegen(context, builder, signature, args):
        return builder.fdiv(*args)

    return vec8(vec8, vec8), codegen


@intrinsic
def at_least_zero(typingctx, vector, yes, no):
    """Per lane `yes` where the vector is >= 0, else `no`."""

    def codegen(context, builder, signature, args):
        zero = ir.Constant(_FLOATS, [0.0] * LANES)
        return builder.select(builder.fcmp_ordered(">=", args[0], zero), args[1], args[2])

    return vec8(vec8, vec8, vec8), codegen


@intrinsic
def keep_below(typingctx, vector, count, other):
    """The first `count` lanes of `vector`, `other` in the rest; count may be <= 0 or >= 8."""

    def codegen(context, builder, signature, args):
        limit = _splat(builder, builder.trunc(args[1], _INT), _INTS)
        lane = ir.Constant(_INTS, list(range(LANES)))
        inside = builder.icmp_signed("<", lane, limit)
        return builder.select(inside, args[0], args[2])

    return vec8(vec8, types.intp, vec8), codegen


def _halves(builder, vector, combine):
    """Fold 8 lanes into lane 0 by halves: (0+4, 1+5, ...), then (0+2, 1+3), then 0+1."""
    for shift in (4, 2, 1):
        other = _shuffle(builder, vector, vector, [(i + shift) % LANES for i in range(LANES)])
        vector = combine(vector, other)
    return builder.extract_element(vector, ir.Constant(_INT, 0))


@intrinsic
def lane_sum(typingctx, vector):
    """The lanes' sum, by halves."""

    def codegen(context, builder, signature, args):
        return _halves(builder, args[0], builder.fadd)

    return types.float32(vec8), codegen


def _larger(builder, a, b):
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


@intrinsic
def larger(typingctx, a, b):
    """The larger per lane; b where either is NaN."""

    def codegen(context, builder, signature, args):
        return _larger(builder, *args)

    return vec8(vec8, vec8), codegen


@intrinsic
def lane_max(typingctx, vector):
    """The largest lane; which one is undefined if any is NaN."""

    def codegen(context, builder, signature, args):
        return _halves(builder, args[0], lambda a, b: _larger(builder, a, b))

    return types.float32(vec8), codegen


@intrinsic
def sums_of_eight(typingctx, a, b, c, d, e, f, g, h):
    """Eight vectors to one: lane i is the sum of the i-th vector's lanes, as a fixed tree."""

    def pairs(builder, x, y):
        even = _shuffle(builder, x, y, [0, 2, 8, 10, 4, 6, 12, 14])
        odd = _shuffle(builder, x, y, [1, 3, 9, 11, 5, 7, 13, 15])
        return builder.fadd(even, odd)

    def codegen(context, builder, signature, args):
        two = [pairs(builder, args[i], args[i + 1]) for i in (0, 2, 4, 6)]
        four = [pairs(builder, two[0], two[1]), pairs(builder, two[2], two[3])]
        low = _shuffle(builder, four[0], four[1], [0, 1, 2, 3, 8, 9, 10, 11])
        high = _shuffle(builder, four[0], four[1], [4, 5, 6, 7, 12, 13, 14, 15])
        return builder.fadd(low, high)

    return vec8(*[vec8] * 8), codegen


# exp(r) on [-ln2/2, ln2/2] as in Cephes expf: 1 + r + r^2 P(r).
_EXP_P = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 0.5)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4


@intrinsic
def exp(typingctx, vector):
    """e to each lane, for lanes <= 0 (below -87 they count as -87); about 1 ulp; exp(0) is 1."""

    def codegen(context, builder, signature, args):
        def constant(value):
            return ir.Constant(_FLOATS, [value] * LANES)

        lowest = constant(-87.0)
        below = builder.fcmp_ordered("<", args[0], lowest)  # false for NaN, which must survive
        x = builder.select(below, lowest, args[0])
        n = _call(builder, "llvm.rint.v8f32", [builder.fmul(x, constant(1.44269504088896341))])
        r = _fma(builder, n, constant(-_LN2_HIGH), x)
        r = _fma(builder, n, constant(-_LN2_LOW), r)
        p = constant(_EXP_P[0])
        for coefficient in _EXP_P[1:]:
            p = _fma(builder, p, r, constant(coefficient))
        p = builder.fadd(_fma(builder, builder.fmul(r, r), p, r), constant(1.0))
        exponent = builder.add(builder.fptosi(n, _INTS), ir.Constant(_INTS, [127] * LANES))
        power = builder.bitcast(builder.shl(exponent, ir.Constant(_INTS, [23] * LANES)), _FLOATS)
        return builder.fmul(p, power)

    return vec8(vec8), codegen
