"""The sampler against a reference that sorts everything, and against the distribution asked for."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from splitserve.errors import WorkerFault
from splitserve.model.sampling import draw, draw_batch, uniform
from splitserve.sampling import Sampling

Row = npt.NDArray[np.float32]


def reference(logits: Row, sampling: Sampling, output_index: int) -> int:
    """Design 3.9, with a full sort."""
    if sampling.temperature == 0:
        return int(min(range(len(logits)), key=lambda i: (-logits[i], i)))
    scaled = (logits - logits.max()) / np.float32(sampling.temperature)
    with np.errstate(under="ignore"):
        weights = np.exp(scaled)
    ids = np.flatnonzero(weights >= np.float32(sampling.min_p)) if sampling.min_p else None
    ids = np.arange(len(logits)) if ids is None else ids
    ranked = sorted(ids.tolist(), key=lambda i: (-logits[i], i))
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    if sampling.top_p < 1:
        wanted = sampling.top_p * float(weights[sorted(ranked)].sum(dtype=np.float64))
        cumulative = np.cumsum(weights[ranked], dtype=np.float64)
        ranked = ranked[: int(np.sum(cumulative < wanted)) + 1]
    kept = sorted(ranked)
    cumulative = np.cumsum(weights[kept], dtype=np.float64)
    target = uniform(sampling.seed, sampling.choice, output_index) * cumulative[-1]
    return next(i for i, edge in zip(kept, cumulative, strict=True) if edge > target)


# Few distinct values, so that ties are the rule; and wide ones, so that most weights vanish.
tied = st.integers(-3, 3).map(float)
wide = st.floats(-1000, 1000, width=32)
rows = st.integers(1, 600).flatmap(
    lambda n: st.sampled_from([tied, wide]).flatmap(
        lambda element: arrays(np.float32, n, elements=element, fill=element)
    )
)
samplings = st.builds(
    Sampling,
    seed=st.integers(0, 2**64 - 1),
    max_tokens=st.just(1),
    temperature=st.sampled_from([0.0, 1e-6, 0.3, 1.0, 2.0, 50.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 64, 128, 129, 10_000]),
    top_p=st.sampled_from([1e-9, 0.1, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.0, 1e-3, 0.2, 1.0]),
    choice=st.integers(0, 3),
)


@settings(max_examples=400, deadline=None)
@given(logits=rows, sampling=samplings, output_index=st.integers(0, 10_000))
def test_it_equals_the_full_sort(logits: Row, sampling: Sampling, output_index: int) -> None:
    assert draw(logits, sampling, output_index) == reference(logits, sampling, output_index)


@settings(max_examples=50, deadline=None)
@given(sampling=samplings, seed=st.integers(0, 1000))
def test_a_vocabulary_of_many_bins(sampling: Sampling, seed: int) -> None:
    logits = np.random.default_rng(seed).normal(0, 1, 9000).astype(np.float32)
    assert draw(logits, sampling, 3) == reference(logits, sampling, 3)


@settings(max_examples=50, deadline=None)
@given(sampling=samplings, index=st.integers(0, 6), seed=st.integers(0, 1000))
def test_a_row_does_not_see_its_batch(sampling: Sampling, index: int, seed: int) -> None:
    batch = np.random.default_rng(seed).normal(0, 2, (7, 501)).astype(np.float32)
    together = draw_batch(batch, [(sampling, 5)] * 7)
    assert together[index] == draw(batch[index].copy(), sampling, 5)
    padded = np.empty(502, np.float32)[1:]
    padded[:] = batch[index]
    assert together[index] == draw(padded, sampling, 5)


@pytest.mark.parametrize(
    "filters", [{}, {"temperature": 0.7}, {"top_k": 7}, {"top_p": 0.8}, {"min_p": 0.1}]
)
def test_frequencies_follow_the_distribution(filters: dict[str, float]) -> None:
    logits = np.random.default_rng(1).normal(0, 1.5, 40).astype(np.float32)
    sampling = Sampling(seed=99, max_tokens=1, **filters)  # type: ignore[arg-type]
    weights = np.exp((logits - logits.max()).astype(np.float64) / sampling.temperature)
    order = np.argsort(-logits)
    if sampling.top_k:
        weights[order[sampling.top_k :]] = 0
    if sampling.top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        weights[order[before >= sampling.top_p * weights.sum()]] = 0
    weights[weights < sampling.min_p] = 0
    expected = weights / weights.sum() * 6000
    counts = np.bincount([draw(logits, sampling, i) for i in range(6000)], minlength=40)
    assert not counts[weights == 0].any()
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    degrees = int(possible.sum()) - 1
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5


def test_seed_choice_and_output_index_each_change_the_draw() -> None:
    base = uniform(7, 0, 0)
    assert base == uniform(7, 0, 0)
    assert len({base, uniform(8, 0, 0), uniform(7, 1, 0), uniform(7, 0, 1)}) == 4
    values = [uniform(seed, 0, index) for seed in range(40) for index in range(40)]
    assert 0 <= min(values) < 0.01
    assert 0.99 < max(values) < 1
    assert abs(float(np.mean(values)) - 0.5) < 0.02


def test_the_uniform_is_the_documented_one() -> None:
    """Pinned: another version of numpy or of this file must not change what a seed means."""
    assert uniform(0, 0, 0) == 0.011546754286331562
    assert uniform(2**64 - 1, 3, 1000) == 0.6344591150043761


def test_greedy_takes_the_lowest_id_of_a_tie() -> None:
    logits = np.array([0, 5, 5, 1], np.float32)
    assert draw(logits, Sampling(seed=0, max_tokens=1, temperature=0.0), 0) == 1
    for index in range(20):
        sampling = Sampling(seed=0, max_tokens=1, temperature=1.0, top_k=1)
        assert draw(logits, sampling, index) == 1


def test_masked_tokens_are_never_drawn() -> None:
    logits = np.full(300, -np.inf, np.float32)
    logits[[17, 200]] = -1000.0
    for index in range(50):
        assert draw(logits, Sampling(seed=1, max_tokens=1, top_p=0.99), index) in (17, 200)
        assert draw(logits, Sampling(seed=1, max_tokens=1), index) in (17, 200)


def test_infinite_logits_share_the_draw() -> None:
    logits = np.array([0, np.inf, 3, np.inf], np.float32)
    drawn = {draw(logits, Sampling(seed=1, max_tokens=1), index) for index in range(50)}
    assert drawn == {1, 3}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", ["nan", "-inf"])
def test_a_broken_row_is_a_fault(temperature: float, bad: str) -> None:
    logits = np.zeros(100, np.float32)
    if bad == "nan":
        logits[50] = np.nan
    else:
        logits[:] = -np.inf
    with pytest.raises(WorkerFault, match="logits hold"):
        draw(logits, Sampling(seed=1, max_tokens=1, temperature=temperature), 0)


def test_print_the_speed() -> None:
    batch = (np.random.default_rng(0).normal(0, 2.5, (16, 49152))).astype(np.float32)
    for filters in ({"temperature": 0.0}, {}, {"top_k": 50}, {"top_p": 0.9}):
        sampling = Sampling(seed=1, max_tokens=1, **filters)  # type: ignore[arg-type]
        started = time.perf_counter()
        draw_batch(batch, [(sampling, 0)] * 16)
        print(f"16 x 49152 logits, {filters}: {(time.perf_counter() - started) * 1e3:.1f} ms")
