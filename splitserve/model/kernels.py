"""CPU kernels on the paged KV pool: writing KV, and attention over block tables.

The pool is float32 [block, layer, K|V, kv head, slot, dim]. Every (token, query head) is reduced in
an order that depends only on its own position: granules of 16 positions from 0 upwards, within
a granule as written in `_granule`. What else is in the batch, how the prompt was chunked, how large
blocks are and how many threads there are does not change a bit of it (design 3.10).

The softmax is the online one (Milakov & Gimelshein 2018, as in FlashAttention): with each granule
the running maximum may rise, and what was summed is then rescaled. Up to _TILE consecutive queries
of a sequence and all query heads of a kv head share a granule's K and V while it is in L1 cache.

A sliding window skips the granules before it; a soft cap c turns each score s into c tanh(s / c)
(Gemma 2, arXiv 2408.00118, section 2); a sink is one more score per query head, whose value is zero
(gpt-oss; Xiao et al. 2023, arXiv 2309.17453). None of them changes the order of the sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from splitserve.model import simd
from splitserve.model.simd import inlined, kernel

GRANULE = 16
_TILE = 8
_LINE = 16  # floats in a cache line
_NEGATIVE_INFINITY = np.float32(-np.inf)
_NO_WINDOW = int(np.iinfo(np.int32).max)

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@kernel("void(float32[:,:,::1], float32[:,:,::1], float32[:,:,:,:,:,::1], int64, int64[::1])")
def write_kv(
    key: Floats, value: Floats, pool: Floats, layer: int, slots: npt.NDArray[np.int64]
) -> None:
    """Put each token's key and value into its slot of one layer.

    key, value: [T, kv heads, D]. pool: [blocks, layers, 2, kv heads, block size, D].
    slots: [T], block x block size + slot within it; a negative one is padding and is not written.
    """
    block_size = pool.shape[4]
    for t in range(key.shape[0]):
        if slots[t] < 0:
            continue
        block, slot = slots[t] // block_size, slots[t] % block_size
        for head in range(key.shape[1]):
            for d in range(key.shape[2]):
                pool[block, layer, 0, head, slot, d] = key[t, head, d]
                pool[block, layer, 1, head, slot, d] = value[t, head, d]


@inlined
def _scores_of_eight(query: Any, q: int, pool: Any, k: int, dim: int) -> Any:
    """Lane i: the query row at offset q times the i-th of eight key rows from offset k."""
    a = b = c = d = e = f = g = h = simd.splat(np.float32(0))
    for i in range(0, dim, 8):
        x = simd.load(query, q + i)
        a = simd.fma(x, simd.load(pool, k + i), a)
        b = simd.fma(x, simd.load(pool, k + i + dim), b)
        c = simd.fma(x, simd.load(pool, k + i + 2 * dim), c)
        d = simd.fma(x, simd.load(pool, k + i + 3 * dim), d)
        e = simd.fma(x, simd.load(pool, k + i + 4 * dim), e)
        f = simd.fma(x, simd.load(pool, k + i + 5 * dim), f)
        g = simd.fma(x, simd.load(pool, k + i + 6 * dim), g)
        h = simd.fma(x, simd.load(pool, k + i + 7 * dim), h)
    return simd.sums_of_eight(a, b, c, d, e, f, g, h)


@inlined
def _add_values(
    weights: Any, rescale: Any, pool: Any, v: int, total: Any, o: int, count: int, dim: int
) -> None:
    """total[o:o+dim] = total x rescale + sum over `count` value rows of weight x row, in order."""
    i = 0
    while i + 64 <= dim:
        a = simd.mul(rescale, simd.load(total, o + i))
        b = simd.mul(rescale, simd.load(total, o + i + 8))
        c = simd.mul(rescale, simd.load(total, o + i + 16))
        d = simd.mul(rescale, simd.load(total, o + i + 24))
        e = simd.mul(rescale, simd.load(total, o + i + 32))
        f = simd.mul(rescale, simd.load(total, o + i + 40))
        g = simd.mul(rescale, simd.load(total, o + i + 48))
        h = simd.mul(rescale, simd.load(total, o + i + 56))
        for s in range(count):
            weight = simd.splat(weights[s])
            row = v + s * dim + i
            a = simd.fma(weight, simd.load(pool, row), a)
            b = simd.fma(weight, simd.load(pool, row + 8), b)
            c = simd.fma(weight, simd.load(pool, row + 16), c)
            d = simd.fma(weight, simd.load(pool, row + 24), d)
            e = simd.fma(weight, simd.load(pool, row + 32), e)
            f = simd.fma(weight, simd.load(pool, row + 40), f)
            g = simd.fma(weight, simd.load(pool, row + 48), g)
            h = simd.fma(weight, simd.load(pool, row + 56), h)
        simd.store(total, o + i, a)
        simd.store(total, o + i + 8, b)
        simd.store(total, o + i + 16, c)
        simd.store(total, o + i + 24, d)
        simd.store(total, o + i + 32, e)
        simd.store(total, o + i + 40, f)
        simd.store(total, o + i + 48, g)
        simd.store(total, o + i + 56, h)
        i += 64
    while i < dim:
        a = simd.mul(rescale, simd.load(total, o + i))
        for s in range(count):
            a = simd.fma(simd.splat(weights[s]), simd.load(pool, v + s * dim + i), a)
        simd.store(total, o + i, a)
        i += 8


@inlined
def _capped(scores: Any, softcap: Any, scratch: Any) -> Any:
    """softcap x tanh(score / softcap) per lane; tanh |x| is (1 - e) / (1 + e), e = exp(-2|x|)."""
    x = simd.mul(scores, simd.splat(np.float32(-2) / softcap))
    none = simd.splat(np.float32(0))
    negative = simd.sub(none, simd.larger(x, simd.sub(none, x)))
    simd.store(scratch, 0, simd.exp(negative))
    simd.store(scratch, 8, x)
    for i in range(8):
        e = scratch[i]
        capped = softcap * ((np.float32(1) - e) / (np.float32(1) + e))
        scratch[i] = -capped if scratch[8 + i] > 0 else capped
    return simd.load(scratch, 0)


@inlined
def _granule(
    row: int,
    dim: int,
    skip: int,
    count: int,
    softcap: Any,
    pool: Any,
    k: int,
    v: int,
    query: Any,
    total: Any,
    maximum: Any,
    weight_sum: Any,
    weights: Any,
) -> None:
    """Add positions [skip, count) of a granule, K at k and V at v, to a (token, head)'s state.

    The state of row r: total[r*dim:], maximum[r], weight_sum[r*8:] (eight partial sums).
    """
    hidden = simd.splat(_NEGATIVE_INFINITY)
    low = _scores_of_eight(query, row * dim, pool, k, dim)
    if softcap > 0:
        low = _capped(low, softcap, weights)
    low = simd.keep_below(low, count, hidden)
    high = hidden
    if count > 8:
        high = _scores_of_eight(query, row * dim, pool, k + 8 * dim, dim)
        if softcap > 0:
            high = _capped(high, softcap, weights)
        high = simd.keep_below(high, count - 8, hidden)
    if skip > 0:
        low = simd.keep_below(hidden, skip, low)
        high = simd.keep_below(hidden, skip - 8, high)
    before = maximum[row]
    largest = max(before, simd.lane_max(simd.larger(low, high)))
    subtracted = simd.splat(largest)
    none = simd.splat(np.float32(0))
    low = simd.keep_below(simd.exp(simd.sub(low, subtracted)), count, none)
    high = simd.keep_below(simd.exp(simd.sub(high, subtracted)), count - 8, none)
    if skip > 0:
        low = simd.keep_below(none, skip, low)
        high = simd.keep_below(none, skip - 8, high)
    simd.store(weights, 0, low)
    simd.store(weights, 8, high)
    rescale = simd.exp(simd.sub(simd.splat(before), subtracted))
    partial = simd.mul(rescale, simd.load(weight_sum, row * 8))
    simd.store(weight_sum, row * 8, simd.add(simd.add(partial, low), high))
    maximum[row] = largest
    _add_values(weights, rescale, pool, v, total, row * dim, count, dim)


@kernel(
    "void(float32[:,:,::1], float32[:,:,:,:,:,::1], float32[::1], int64, int32[:,::1], int32[::1],"
    " int32[::1], float32, int64, float32, float32[::1], int64, int64, float32[:,:,::1],"
    " float32[::1], float32[::1], float32[::1], float32[::1], float32[::1])"
)
def _attend(
    query: Floats,
    pool: Floats,
    flat_pool: Floats,
    layer: int,
    block_tables: Ints,
    sequence: Ints,
    position: Ints,
    scale: float,
    window: int,
    softcap: float,
    sinks: Floats,
    first: int,
    last: int,
    out: Floats,
    rows: Floats,
    total: Floats,
    maximum: Floats,
    weight_sum: Floats,
    weights: Floats,
) -> None:
    """`attend_range` with room to work in."""
    heads, dim = query.shape[1], query.shape[2]
    num_layers, kv_heads, block_size = pool.shape[1], pool.shape[3], pool.shape[4]
    group = heads // kv_heads
    plane = block_size * dim
    t = first
    while t < last:
        if sequence[t] < 0:
            out[t] = 0
            t += 1
            continue
        tile = 1
        while (
            tile < _TILE
            and t + tile < last
            and sequence[t + tile] == sequence[t]
            and position[t + tile] == position[t] + tile
        ):
            tile += 1
        end = position[t] + tile
        begin = max(0, position[t] - window + 1) // GRANULE * GRANULE
        for kv_head in range(kv_heads):
            for i in range(tile):
                for g in range(group):
                    row = i * group + g
                    maximum[row] = _NEGATIVE_INFINITY
                    for lane in range(8):
                        weight_sum[row * 8 + lane] = 0
                    for d in range(dim):
                        total[row * dim + d] = 0
                        rows[row * dim + d] = query[t + i, kv_head * group + g, d] * scale
                    if len(sinks) > 0:
                        maximum[row] = sinks[kv_head * group + g]
                        weight_sum[row * 8] = 1
            for start in range(begin, end, GRANULE):
                block = np.int64(block_tables[sequence[t], start // block_size])
                k = ((block * num_layers + layer) * 2 * kv_heads + kv_head) * plane
                k += (start % block_size) * dim
                v = k + kv_heads * plane
                if start + GRANULE < end:
                    following = start + GRANULE
                    block = np.int64(block_tables[sequence[t], following // block_size])
                    later = ((block * num_layers + layer) * 2 * kv_heads + kv_head) * plane
                    later += (following % block_size) * dim
                    for line in range(0, GRANULE * dim, _LINE):
                        simd.prefetch(flat_pool, later + line)
                        simd.prefetch(flat_pool, later + kv_heads * plane + line)
                for i in range(tile):
                    count = min(GRANULE, position[t] + i + 1 - start)
                    skip = position[t] + i - window + 1 - start
                    if count <= 0 or skip >= GRANULE:
                        continue
                    for g in range(group):
                        _granule(
                            i * group + g,
                            dim,
                            skip,
                            count,
                            softcap,
                            flat_pool,
                            k,
                            v,
                            rows,
                            total,
                            maximum,
                            weight_sum,
                            weights,
                        )
            for i in range(tile):
                for g in range(group):
                    row = i * group + g
                    divisor = simd.lane_sum(simd.load(weight_sum, row * 8))
                    for d in range(dim):
                        out[t + i, kv_head * group + g, d] = total[row * dim + d] / divisor
        t += tile


def attend_range(
    query: Floats,
    pool: Floats,
    layer: int,
    block_tables: Ints,
    sequence: Ints,
    position: Ints,
    scale: float,
    window: int,
    softcap: float,
    sinks: Floats,
    first: int,
    last: int,
    out: Floats,
) -> None:
    """`paged_attention` for the tokens [first, last), into rows of `out`.

    window, softcap, sinks: as `variant_arguments` makes them.
    """
    num_rows = _TILE * (query.shape[1] // pool.shape[3])
    width = query.shape[2]
    _attend(
        query,
        pool,
        pool.reshape(-1),
        layer,
        block_tables,
        sequence,
        position,
        scale,
        window,
        softcap,
        sinks,
        first,
        last,
        out,
        np.empty(num_rows * width, np.float32),
        np.empty(num_rows * width, np.float32),
        np.empty(num_rows, np.float32),
        np.empty(num_rows * 8, np.float32),
        np.empty(GRANULE, np.float32),
    )


def variant_arguments(
    window: int | None = None, softcap: float | None = None, sinks: Floats | None = None
) -> tuple[int, float, Floats]:
    """What `attend_range` takes where the three may be missing."""
    return (
        window or _NO_WINDOW,
        softcap or 0.0,
        np.empty(0, np.float32) if sinks is None else np.ascontiguousarray(sinks, np.float32),
    )


def paged_attention(
    query: Floats,
    pool: Floats,
    layer: int,
    block_tables: Ints,
    sequence: Ints,
    position: Ints,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Floats | None = None,
) -> Floats:
    """Causal attention of packed tokens over their sequences' KV in one layer of the pool.

    query: [T, heads, D]; heads a multiple of the pool's kv heads, D a multiple of 8.
    pool: float32 [blocks, layers, 2, kv heads, block size, D]; block size a multiple of 16.
    block_tables: [S, max blocks]. sequence: [T], the row of block_tables, or negative for padding.
    position: [T]; a token attends to positions 0..position inclusive, which must be in the pool, or
    to the last `window` of them. sinks: [heads], a score that takes weight and gives nothing.
    Returns [T, heads, D]; padding gives zeros.
    """
    out = np.empty_like(query)
    where = query, pool, layer, block_tables, sequence, position, scale
    attend_range(*where, *variant_arguments(window, softcap, sinks), 0, query.shape[0], out)
    return out
