"""The kernels against float64 arithmetic, and their invariance against themselves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from splitserve.model.kernels import attend_range, paged_attention, variant_arguments, write_kv

Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int32]


@dataclass
class Case:
    """Sequences in a shuffled pool; what was not written is NaN."""

    keys: list[Floats]  # per sequence [kv heads, length, D]
    values: list[Floats]
    pool: Floats
    tables: Ints
    rng: np.random.Generator

    def queries(self, sequence: Ints, heads: int) -> Floats:
        shape = (len(sequence), heads, self.pool.shape[-1])
        return self.rng.standard_normal(shape).astype(np.float32)


def make(lengths: list[int], kv_heads: int, dim: int, block_size: int = 16, seed: int = 0) -> Case:
    rng = np.random.default_rng(seed)
    per_sequence = max(-(-length // block_size) for length in lengths)
    num_blocks = per_sequence * len(lengths) + 3
    pool = np.full((num_blocks, 2, 2, kv_heads, block_size, dim), np.nan, np.float32)
    order = rng.permutation(num_blocks).astype(np.int32)
    tables = order[: per_sequence * len(lengths)].reshape(len(lengths), per_sequence)
    case = Case([], [], pool, tables.copy(), rng)
    for table, length in zip(tables, lengths, strict=True):
        kv = rng.standard_normal((2, length, kv_heads, dim)).astype(np.float32)
        where = np.arange(length)
        slots = table[where // block_size].astype(np.int64) * block_size + where % block_size
        write_kv(kv[0], kv[1], pool, 1, slots)
        case.keys.append(kv[0].transpose(1, 0, 2))
        case.values.append(kv[1].transpose(1, 0, 2))
    return case


def by_numpy(
    case: Case,
    query: Floats,
    sequence: Ints,
    position: Ints,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Floats | None = None,
) -> Floats:
    """The same in float64, token by token and head by head."""
    out = np.zeros(query.shape)
    for t, (row, where) in enumerate(zip(sequence, position, strict=True)):
        group = query.shape[1] // case.keys[row].shape[0]
        low = 0 if window is None else max(0, where - window + 1)
        for head in range(query.shape[1]):
            keys, values = (
                one[row][head // group, low : where + 1].astype(np.float64)
                for one in (case.keys, case.values)
            )
            scores = keys @ query[t, head].astype(np.float64) * scale
            if softcap is not None:
                scores = softcap * np.tanh(scores / softcap)
            weights = np.exp(scores - scores.max())
            sink = 0.0 if sinks is None else np.exp(float(sinks[head]) - scores.max())
            out[t, head] = weights @ values / (weights.sum() + sink)
    return out.astype(np.float32)


def by_torch(case: Case, query: Floats, sequence: Ints, position: Ints, scale: float) -> Floats:
    """The same by torch in float64, token by token."""
    out = np.zeros(query.shape)
    for t, (row, where) in enumerate(zip(sequence, position, strict=True)):
        if row < 0:
            continue
        group = query.shape[1] // case.keys[row].shape[0]
        key, value = (
            torch.from_numpy(one[row][:, : where + 1].astype(np.float64)).repeat_interleave(
                group, 0
            )
            for one in (case.keys, case.values)
        )
        q = torch.from_numpy(query[t].astype(np.float64))[:, None]
        attended = torch.nn.functional.scaled_dot_product_attention(q, key, value, scale=scale)
        out[t] = attended[:, 0].numpy()
    return out.astype(np.float32)


@pytest.mark.parametrize(
    ("kv_heads", "heads", "dim"), [(3, 9, 64), (2, 4, 16), (1, 8, 128), (4, 4, 80), (2, 2, 8)]
)
def test_attention_is_right(kv_heads: int, heads: int, dim: int) -> None:
    case = make([1, 16, 17, 150], kv_heads, dim)
    sequence = np.array([0] + [1] * 16 + [-1] + [2] + [3] * 150 + [2], np.int32)
    position = np.concatenate([[0], range(16), [0], [16], range(150), [4]]).astype(np.int32)
    query = case.queries(sequence, heads)
    scale = dim**-0.5
    out = paged_attention(query, case.pool, 1, case.tables, sequence, position, scale)
    expected = by_torch(case, query, sequence, position, scale)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=3e-6)
    assert not out[17].any()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0, 50.0])
@pytest.mark.parametrize("window", [None, 1, 2, 15, 16, 17, 40, 64, 1000])
def test_windows_caps_and_sinks(window: int | None, softcap: float | None, sinks: bool) -> None:
    case = make([70, 20], 2, 16)
    sequence = np.repeat(np.arange(2, dtype=np.int32), [70, 20])
    position = np.concatenate([np.arange(70), np.arange(20)]).astype(np.int32)
    query = case.queries(sequence, 6)
    drains = case.rng.standard_normal(6).astype(np.float32) * 3 if sinks else None
    out = paged_attention(
        query, case.pool, 1, case.tables, sequence, position, 0.5, window, softcap, drains
    )
    expected = by_numpy(case, query, sequence, position, 0.5, window, softcap, drains)
    np.testing.assert_allclose(out, expected, rtol=2e-5, atol=3e-6)


def test_what_is_far_before_the_window_is_not_read() -> None:
    """Whole granules before it; within the first granule hidden positions weigh nothing."""
    case = make([100], 2, 16)
    last, zero = np.array([99], np.int32), np.zeros(1, np.int32)
    query = case.queries(zero, 4)
    arguments = query, case.pool, 1, case.tables, zero, last, 0.25, 30
    before = paged_attention(*arguments)
    case.pool[case.tables[0, :4]] = np.nan  # positions 0..63; the window begins at 70
    np.testing.assert_array_equal(paged_attention(*arguments), before)


@pytest.mark.parametrize("scale", [1e-4, 1.0, 30.0])
def test_flat_and_steep_scores(scale: float) -> None:
    case = make([100], 2, 32)
    sequence, position = np.zeros(100, np.int32), np.arange(100, dtype=np.int32)
    query = case.queries(sequence, 4)
    out = paged_attention(query, case.pool, 1, case.tables, sequence, position, scale)
    expected = by_torch(case, query, sequence, position, scale)
    np.testing.assert_allclose(out, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("variant", [(), (17,), (None, 5.0), (30, 5.0, True)])
@pytest.mark.parametrize("seed", range(8))
def test_a_token_has_the_same_bits_in_any_company(seed: int, variant: tuple[Any, ...]) -> None:
    """Tiled or alone, whatever is beside it, in ranges or at once."""
    rng = np.random.default_rng(seed)
    lengths = [int(one) for one in rng.integers(1, 90, 4)]
    case = make(lengths, 3, 64, seed=seed)
    sequence = np.repeat(np.arange(4, dtype=np.int32), lengths)
    position = np.concatenate([np.arange(one) for one in lengths]).astype(np.int32)
    query = case.queries(sequence, 9)

    if variant[2:]:
        variant = (*variant[:2], rng.standard_normal(9).astype(np.float32))

    def attend(rows: npt.NDArray[np.intp]) -> Floats:
        picked = query[rows], case.pool, 1, case.tables, sequence[rows], position[rows]
        return paged_attention(*picked, 0.125, *variant)

    together = attend(np.arange(len(sequence)))
    assert np.isfinite(together).all()
    shuffled = rng.permutation(len(sequence))
    np.testing.assert_array_equal(attend(shuffled), together[shuffled])
    for t in rng.integers(0, len(sequence), 10):
        np.testing.assert_array_equal(attend(np.array([t]))[0], together[t])
    in_parts = np.empty_like(together)
    for first in range(0, len(sequence), 5):
        last = min(first + 5, len(sequence))
        arguments = query, case.pool, 1, case.tables, sequence, position, 0.125
        attend_range(*arguments, *variant_arguments(*variant), first, last, in_parts)
    np.testing.assert_array_equal(in_parts, together)


def test_the_block_size_changes_no_bit() -> None:
    outs = []
    for block_size in (16, 32, 64):
        case = make([130], 2, 16, block_size, seed=5)
        other = make([130], 2, 16, 16, seed=5)
        case.keys, case.values = other.keys, other.values
        where = np.arange(130)
        slots = case.tables[0][where // block_size].astype(np.int64) * block_size
        slots += where % block_size
        key, value = (
            np.ascontiguousarray(one[0].transpose(1, 0, 2)) for one in (case.keys, case.values)
        )
        write_kv(key, value, case.pool, 0, slots)
        query = np.random.default_rng(1).standard_normal((130, 4, 16)).astype(np.float32)
        sequence, position = np.zeros(130, np.int32), where.astype(np.int32)
        outs.append(paged_attention(query, case.pool, 0, case.tables, sequence, position, 0.25))
    np.testing.assert_array_equal(outs[0], outs[1])
    np.testing.assert_array_equal(outs[0], outs[2])


def test_write_kv_touches_its_slots_only() -> None:
    pool = np.zeros((4, 2, 2, 2, 16, 8), np.float32)
    key = np.random.default_rng(0).standard_normal((3, 2, 8)).astype(np.float32)
    write_kv(key, -key, pool, 1, np.array([3 * 16 + 15, -1, 16], np.int64))
    np.testing.assert_array_equal(pool[3, 1, 0, :, 15], key[0])
    np.testing.assert_array_equal(pool[3, 1, 1, :, 15], -key[0])
    np.testing.assert_array_equal(pool[1, 1, 0, :, 0], key[2])
    pool[3, 1, :, :, 15] = pool[1, 1, :, :, 0] = 0
    assert not pool.any()


def test_nan_in_what_is_attended_to_shows() -> None:
    case = make([20], 2, 16)
    query = case.queries(np.zeros(1, np.int32), 4)
    zero = np.zeros(1, np.int32)
    beyond = np.array([20], np.int32)  # not written: NaN
    assert np.isnan(paged_attention(query, case.pool, 1, case.tables, zero, beyond, 0.25)).all()
