"""min_tokens, bias and penalties: against a plain reading of their definitions."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.model.adjust import adjusted
from splitserve.sampling import Sampling

VOCAB = 40
IDS = st.lists(st.integers(0, VOCAB + 3), max_size=30)


def plain(logits: list[float], s: Sampling, prompt: list[int], output: list[int]) -> list[float]:
    row = [np.float32(x) for x in logits]
    for i in range(VOCAB):
        if i in s.stop_ids and len(output) < s.min_tokens:
            row[i] = np.float32(-np.inf)
        for token_id, bias in s.logit_bias:
            if token_id == i:
                row[i] += np.float32(bias)
        if i in prompt or i in output:
            penalty = np.float32(s.repetition_penalty)
            row[i] = row[i] / penalty if row[i] > 0 else row[i] * penalty
        if i in output:
            row[i] -= np.float32(s.frequency_penalty) * np.float32(output.count(i))
            row[i] -= np.float32(s.presence_penalty)
    return row


@given(
    seed=st.integers(0, 1000),
    prompt=IDS,
    output=IDS,
    stop_ids=st.lists(st.integers(0, VOCAB + 3), max_size=3).map(tuple),
    min_tokens=st.integers(0, 20),
    bias=st.dictionaries(st.integers(0, VOCAB + 3), st.floats(-100, 100), max_size=4),
    repetition=st.sampled_from([1.0, 1.3, 0.8]),
    frequency=st.sampled_from([0.0, 0.5, -1.0]),
    presence=st.sampled_from([0.0, 1.5, -0.5]),
)
@settings(max_examples=150, deadline=None)
def test_it_is_what_the_definitions_say(
    seed: int,
    prompt: list[int],
    output: list[int],
    stop_ids: tuple[int, ...],
    min_tokens: int,
    bias: dict[int, float],
    repetition: float,
    frequency: float,
    presence: float,
) -> None:
    logits = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)
    before = logits.copy()
    sampling = Sampling(
        seed=0,
        max_tokens=99,
        stop_ids=stop_ids,
        min_tokens=min_tokens,
        logit_bias=tuple(bias.items()),
        repetition_penalty=repetition,
        frequency_penalty=frequency,
        presence_penalty=presence,
    )
    row = adjusted(logits, sampling, prompt, output)
    assert np.array_equal(row, plain(logits.tolist(), sampling, prompt, output))
    assert np.array_equal(logits, before), "the model's own logits stay: logprobs are of them"


def test_nothing_asked_copies_nothing() -> None:
    logits = np.zeros(VOCAB, np.float32)
    assert adjusted(logits, Sampling(seed=0, max_tokens=1, stop_ids=(1,)), [1], [2]) is logits
