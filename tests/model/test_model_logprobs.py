"""Log-probabilities are of the raw logits, normalised, the likeliest first."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.model.logprobs import logprobs


@given(st.integers(0, 999), st.integers(1, 60), st.integers(0, 20), st.booleans())
@settings(max_examples=80, deadline=None)
def test_they_are_torchs(seed: int, vocab: int, num_top: int, ties: bool) -> None:
    rng = np.random.default_rng(seed)
    row = (rng.standard_normal(vocab) * 5).astype(np.float32)
    if ties:
        row = np.round(row)
    token_id = int(rng.integers(vocab))
    expected = torch.log_softmax(torch.from_numpy(row).double(), 0)
    told = logprobs(row, token_id, num_top)
    assert abs(told.drawn - float(expected[token_id])) < 1e-5
    order = sorted(range(vocab), key=lambda i: (-row[i], i))[:num_top]
    assert told.top_ids == order
    assert np.allclose(told.top, expected[order], atol=1e-5)


def test_a_masked_token_has_minus_infinity() -> None:
    told = logprobs(np.array([1.0, -np.inf], np.float32), 1, 2)
    assert told.drawn == -np.inf
    assert told.top == [0.0, -np.inf]
