"""What lies between a decoder layer's products, as one pass each over the rows of a step.

A row's bits depend on that row alone (design 3.10): sums run over eight lanes in one order.
Llama's RMSNorm (Zhang & Sennrich 2019), rotary embedding by halves (Su et al. 2021, as in
GPT-NeoX), and SwiGLU (Shazeer 2020).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from splitserve.model import simd
from splitserve.model.simd import LANES, inlined, kernel

Floats = npt.NDArray[np.float32]


@inlined
def _norm_factor(x: Any, at: int, width: int, eps: float) -> Any:
    """1 / sqrt(mean of squares + eps) of x[at:at+width]."""
    total = simd.splat(np.float32(0))
    for i in range(0, width, LANES):
        some = simd.load(x, at + i)
        total = simd.fma(some, some, total)
    mean = simd.lane_sum(total) / np.float32(width)
    return np.float32(1) / np.sqrt(mean + np.float32(eps))


@kernel("void(float32[::1], float32[::1], float32[::1], float32[::1], int64, float32)")
def add_and_norm(
    x: Floats, delta: Floats, weight: Floats, normed: Floats, num_rows: int, eps: float
) -> None:
    """x += delta, row by row, and normed = RMSNorm(x) x weight; all flat, of weight's width.

    delta may be empty: then x stays.
    """
    width = weight.shape[0]
    for row in range(num_rows):
        at = row * width
        if delta.shape[0] > 0:
            for i in range(at, at + width, LANES):
                simd.store(x, i, simd.add(simd.load(x, i), simd.load(delta, i)))
        factor = simd.splat(_norm_factor(x, at, width, eps))
        for i in range(0, width, LANES):
            scaled = simd.mul(simd.load(x, at + i), factor)
            simd.store(normed, at + i, simd.mul(scaled, simd.load(weight, i)))


@inlined
def _rotated_head(
    source: Any, at: int, norm: Any, eps: float, cos: Any, sin: Any, angle: int, out: Any, to: int
) -> None:
    """One head's vector, normed if norm has weights, and turned by its position's angles."""
    width = cos.shape[1]
    half = width // 2
    if norm.shape[0] > 0:
        factor = simd.splat(_norm_factor(source, at, width, eps))
        for i in range(0, width, LANES):
            scaled = simd.mul(simd.load(source, at + i), factor)
            simd.store(source, at + i, simd.mul(scaled, simd.load(norm, i)))
    none = simd.splat(np.float32(0))
    flat_cos, flat_sin = cos.reshape(-1), sin.reshape(-1)
    for i in range(0, half, LANES):
        low, high = simd.load(source, at + i), simd.load(source, at + half + i)
        place = angle * width + i
        turned = simd.mul(simd.load(flat_cos, place), low)
        minus = simd.sub(none, high)
        simd.store(out, to + i, simd.fma(minus, simd.load(flat_sin, place), turned))
        turned = simd.mul(simd.load(flat_cos, place + half), high)
        simd.store(out, to + half + i, simd.fma(low, simd.load(flat_sin, place + half), turned))


@kernel(
    "void(float32[::1], float32[:,::1], float32[:,::1], float32[::1], float32[::1], float32,"
    " float32[:,:,::1], float32[:,:,::1], float32[:,:,::1])"
)
def split_heads(
    qkv: Floats,
    cos: Floats,
    sin: Floats,
    query_norm: Floats,
    key_norm: Floats,
    eps: float,
    query: Floats,
    key: Floats,
    value: Floats,
) -> None:
    """Rows of Q, K and V, side by side in the flat qkv, into arrays of heads; Q and K turned.

    cos, sin: [T, D]. query_norm, key_norm: [D] of an RMSNorm per head, or empty. query: [T, heads,
    D]; key and value: [T, kv heads, D].
    """
    num_rows, heads, dim = query.shape
    kv_heads = key.shape[1]
    flat_query, flat_key, flat_value = query.reshape(-1), key.reshape(-1), value.reshape(-1)
    step = (heads + 2 * kv_heads) * dim
    for row in range(num_rows):
        at = row * step
        for head in range(heads):
            to = (row * heads + head) * dim
            _rotated_head(qkv, at, query_norm, eps, cos, sin, row, flat_query, to)
            at += dim
        for head in range(kv_heads):
            to = (row * kv_heads + head) * dim
            _rotated_head(qkv, at, key_norm, eps, cos, sin, row, flat_key, to)
            at += dim
        to = row * kv_heads * dim
        for i in range(0, kv_heads * dim, LANES):
            simd.store(flat_value, to + i, simd.load(qkv, at + i))


@kernel("void(float32[::1], float32[::1], int64, int64)")
def gate(both: Floats, out: Floats, num_rows: int, width: int) -> None:
    """out = silu(gate) x up, with rows of gate and up side by side in the flat `both`."""
    none, one = simd.splat(np.float32(0)), simd.splat(np.float32(1))
    for row in range(num_rows):
        at, to = row * 2 * width, row * width
        for i in range(0, width, LANES):
            x = simd.load(both, at + i)
            small = simd.exp(simd.sub(none, simd.larger(x, simd.sub(none, x))))
            share = simd.div(simd.at_least_zero(x, one, small), simd.add(one, small))
            gated = simd.mul(simd.mul(x, share), simd.load(both, at + width + i))
            simd.store(out, to + i, gated)
