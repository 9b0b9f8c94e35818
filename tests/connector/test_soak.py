"""Ten thousand handoffs with aborts on both sides: nothing leaks, no answer is wrong (`make
nightly`)."""

from __future__ import annotations

import random

import pytest

from tests.support.pairs import Pair, random_handoffs

NUM_HANDOFFS = 10_000
AT_ONCE = 250  # then both are settled, and checked

pytestmark = pytest.mark.nightly


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("way", ["request-pull", "chunk-pull", "chunk-push", "layer-push"])
def test_ten_thousand_handoffs(way: str, transport: str) -> None:
    rng = random.Random(way + transport)
    pair = Pair(way=way, transport=transport)
    num_whole = 0
    for _ in range(NUM_HANDOFFS // 8 // AT_ONCE):
        num_whole += random_handoffs(pair, rng, AT_ONCE)
        pair.forget()
    assert num_whole > NUM_HANDOFFS // 8 / 2
    pair.close()
