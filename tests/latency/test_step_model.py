"""The latency model: recovers what made its data, holds still where it has none."""

from __future__ import annotations

import json

import numpy as np
import pytest

from splitserve.errors import ConfigError
from splitserve.latency.model import KNOTS, StepModel
from splitserve.latency.residuals import Residuals


def true_s(num_tokens: float, context: float) -> float:
    """Reading weights takes 30 ms; above 40 tokens GEMMs take longer than that."""
    return max(0.030, 0.020 + num_tokens * 0.9e-3) + context * 4e-7


def learnt(sizes: list[int], num: int = 400, noise: float = 0.05, seed: int = 0) -> StepModel:
    rng = np.random.default_rng(seed)
    model = StepModel()
    for _ in range(num):
        size = int(rng.choice(sizes))
        context = int(size * rng.integers(20, 1000))
        model.add(size, context, true_s(size, context) * float(np.exp(rng.normal(0, noise))))
    return model


def test_recovers_the_equation() -> None:
    model = learnt([1, 2, 4, 8, 16, 32, 64, 128, 256])
    for size, context in ((1, 500), (6, 3000), (24, 9000), (200, 60_000), (256, 20_000)):
        assert model.predict(size, context) == pytest.approx(true_s(size, context), rel=0.08)
    assert model.sigma == pytest.approx(0.05, rel=0.4)
    assert model.error().median < 0.06


def test_goes_on_straight_where_it_has_seen_nothing() -> None:
    """A decode worker that has never prefilled more than 64 tokens, and one that has seen 256."""
    model = learnt([64, 96, 128, 192, 256])
    assert model.predict(1024, 0) == pytest.approx(true_s(1024, 0), rel=0.2)
    few = learnt([1, 2, 4])
    assert few.predict(3, 1000) == pytest.approx(true_s(3, 1000), rel=0.05)
    assert few.predict(8, 0) < 0.1


def test_outliers_weigh_little() -> None:
    model = learnt([1, 16, 256])
    for _ in range(4):
        model.add(16, 1000, 3.0)
    for _ in range(60):
        model.add(16, 1000, true_s(16, 1000))
    assert model.predict(16, 1000) == pytest.approx(true_s(16, 1000), rel=0.1)


def test_follows_a_worker_that_becomes_slower() -> None:
    model = learnt([1, 16])
    for _ in range(200):
        for size in (1, 16):
            model.add(size, 1000, 2 * true_s(size, 1000))
    assert model.predict(16, 1000) == pytest.approx(2 * true_s(16, 1000), rel=0.1)


def test_never_falls_with_more_tokens_or_context() -> None:
    model = learnt([1, 8, 256], num=60, noise=0.5, seed=3)
    times = [model.predict(size, 100) for size in (1, 2, 5, 9, 40, 300, 2000, 5000)]
    assert times == sorted(times)
    assert model.predict(8, 5000) >= model.predict(8, 100)


def test_prefill_is_the_sum_of_its_chunks() -> None:
    model = learnt([1, 64, 128, 256])
    whole = model.prefill_s(600, 100, 256)
    parts = (
        model.predict(256, 256 * 228.5)
        + model.predict(256, 256 * 484.5)
        + (model.predict(88, 88 * 656.5))
    )
    assert whole == pytest.approx(parts)


def test_json_both_ways_and_what_is_refused() -> None:
    model = learnt([1, 16, 256])
    again = StepModel.from_json(model.to_json())
    assert again.predict(100, 5000) == pytest.approx(model.predict(100, 5000))
    assert json.loads(model.to_json())["error"]["num_steps"] == model.error().num_steps
    for change in ({"knots": [1, 2]}, {"sigma": -1}, {"context_s": -1e-9}, {"what": 1}):
        broken = json.loads(model.to_json()) | change
        with pytest.raises(ConfigError):
            StepModel.from_json(json.dumps(broken).encode())
    assert len(model.knot_s) == len(KNOTS)


def test_knows_nothing_before_it_has_seen_steps() -> None:
    model = StepModel()
    assert not model.is_fitted
    assert model.predict(1, 0) > 0
    assert not model.add(0, 0, 1.0)
    assert not model.add(1, 0, 0.0)


def test_residuals_learn_bias_and_spread() -> None:
    rng = np.random.default_rng(1)
    residuals = Residuals()
    for _ in range(2000):
        residuals.note(1.0, 2.0 * float(np.exp(rng.normal(0, 0.2))))
    assert residuals.corrected(1.0) == pytest.approx(2.0, rel=0.15)
    assert residuals.p_exceeds(1.0, 2.0) == pytest.approx(0.5, abs=0.25)
    assert residuals.p_exceeds(1.0, 4.0) < 0.02
    assert residuals.p_exceeds(1.0, 1.0) > 0.98
    assert residuals.p_exceeds(1.0, 0.0) == 1.0
