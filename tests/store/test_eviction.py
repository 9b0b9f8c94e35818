from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splitserve.store import record
from splitserve.store.base import Policy
from splitserve.store.eviction import HALF_LIFE_S, Victims, used
from splitserve.store.record import MAX_KEY_BYTES, Record

TIMES = st.floats(1.7e9, 1.9e9)


@given(policy=st.sampled_from(Policy), score_s=TIMES, now_s=TIMES)
def test_scores_only_grow(policy: Policy, score_s: float, now_s: float) -> None:
    assert used(policy, score_s, now_s) >= max(score_s, now_s)


def test_least_recent_is_the_time_of_the_last_use() -> None:
    assert used(Policy.LRU, 100.0, 200.0) == 200.0


def test_uses_count_half_after_a_half_life() -> None:
    score_s = 0.0
    for _ in range(3):
        score_s = used(Policy.FREQUENCY, score_s, 0.0)
    assert score_s == pytest.approx(2 * HALF_LIFE_S)  # four uses at once
    assert used(Policy.FREQUENCY, HALF_LIFE_S, HALF_LIFE_S) == pytest.approx(score_s)  # two, later


def test_old_uses_give_way() -> None:
    """Ten uses yesterday are less than one today."""
    score_s = 0.0
    for _ in range(9):
        score_s = used(Policy.FREQUENCY, score_s, 0.0)
    assert 3 * HALF_LIFE_S < score_s < 24 * HALF_LIFE_S


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 99)), max_size=60), st.booleans())
def test_victims_come_by_their_score_now(uses: list[tuple[int, int]], compacts: bool) -> None:
    scores: dict[int, float] = {}
    victims: Victims[int] = Victims(scores.get)
    for key, score in uses:
        if key not in scores:
            victims.add(key, score)
        scores[key] = max(score, scores.get(key, 0))
    for key in [key for key in scores if key % 3 == 0]:
        del scores[key]
    if compacts:
        victims.compact(-(10**6))
        assert len(victims) == len(scores)
    order = []
    while (key := victims.pop()) is not None:
        order.append((scores[key], key))
        del scores[key]
    assert order == sorted(order)
    assert not scores


@given(
    key=st.binary(max_size=MAX_KEY_BYTES),
    namespace=st.binary(min_size=16, max_size=16),
    num_bytes=st.integers(0, 2**63),
    digest=st.binary(min_size=16, max_size=16),
    saved_s=TIMES,
    flipped=st.integers(0, 131),
)
def test_a_header_says_what_was_packed_or_nothing(
    key: bytes, namespace: bytes, num_bytes: int, digest: bytes, saved_s: float, flipped: int
) -> None:
    packed = record.pack(Record(key, namespace, num_bytes, digest, saved_s))
    assert len(packed) == record.HEADER_BYTES
    found = record.unpack(packed)
    assert found == Record(key, namespace, num_bytes, digest, saved_s)
    damaged = bytearray(packed)
    damaged[flipped] ^= 1
    assert record.unpack(damaged) is None
    assert record.unpack(packed[:flipped]) is None


def test_a_key_has_a_largest_size() -> None:
    with pytest.raises(ValueError, match="65 bytes"):
        record.pack(Record(b"k" * 65, b"", 0, b"", 0.0))
