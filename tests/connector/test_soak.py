"""Ten thousand handoffs with aborts on both sides: nothing leaks, no answer is wrong (`make
nightly`)."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from splitserve.clock import MonotonicClock
from splitserve.store.chain import KVStore
from splitserve.store.registry import make_tier, parse_tier
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


@pytest.mark.parametrize("by_store", [True, False])
@pytest.mark.parametrize("way", ["request-pull", "chunk-pull"])
def test_handoffs_with_a_store_and_hints(way: str, by_store: bool, tmp_path: Path) -> None:
    """A limit that evicts, prompts that begin alike, the other engine asked for each of them."""

    def make_store() -> KVStore:
        tier = parse_tier(f"disk:{tmp_path}/kv?limit=100K&policy=frequency")
        return KVStore([make_tier(tier, b"soak", 16 * 8)], MonotonicClock())

    rng = random.Random(f"{way} {by_store}")
    pair = Pair(way=way, make_store=make_store, by_store=by_store, with_hints=True)
    pair.at_start = True
    num_whole = 0
    for _ in range(NUM_HANDOFFS // 8 // AT_ONCE):
        num_whole += random_handoffs(pair, rng, AT_ONCE)
        pair.forget()
    assert num_whole > NUM_HANDOFFS // 8 / 2
    assert pair.num_loaded > 1000
    pair.close()
