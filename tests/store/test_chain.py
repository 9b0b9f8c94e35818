"""The store as a whole: tiers in order, promotion, write-behind, and tiers that break."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.clock import ManualClock
from splitserve.errors import StoreError
from splitserve.store.base import Block, Tier, TierStats
from splitserve.store.chain import KVStore
from tests.store.places import make_blocks, make_keys, make_targets

SIZE = 256


class DictTier(Tier):
    """Keeps blocks in a dict; breaks and stalls when told."""

    def __init__(self, name: str = "dict") -> None:
        self.name = name
        self.kept: dict[bytes, bytes] = {}
        self.lookups: list[tuple[str, int]] = []
        self.saves: list[list[bytes]] = []
        self.error: Exception | None = None
        self.may_save = threading.Event()
        self.may_save.set()
        self.is_saving = threading.Event()
        self.num_closed = 0

    def _note(self, what: str, num: int) -> None:
        self.lookups.append((what, num))
        if self.error is not None:
            raise self.error

    def find(self, keys: Sequence[bytes]) -> int:
        self._note("find", len(keys))
        return ([key in self.kept for key in keys] + [False]).index(False)

    def missing(self, keys: Sequence[bytes]) -> list[bool]:
        self._note("missing", len(keys))
        return [key not in self.kept for key in keys]

    def load(self, keys: Sequence[bytes], targets: Sequence[Block]) -> int:
        self._note("load", len(keys))
        num = ([key in self.kept for key in keys] + [False]).index(False)
        for key, target in zip(keys[:num], targets[:num], strict=True):
            target[:] = np.frombuffer(self.kept[key], np.uint8)
        return num

    def save(self, keys: Sequence[bytes], blocks: Sequence[Block], digests: Sequence[bytes]) -> int:
        self.is_saving.set()
        assert self.may_save.wait(30)
        self._note("save", len(keys))
        self.saves.append(list(keys))
        for key, block, digest in zip(keys, blocks, digests, strict=True):
            assert xxhash.xxh3_128_digest(block) == digest
            assert key not in self.kept
            self.kept[key] = block.tobytes()
        return len(keys)

    def stats(self) -> TierStats:
        return TierStats(num_blocks=len(self.kept))

    def close(self) -> None:
        self.num_closed += 1

    def put(self, *numbers: int) -> None:
        for key, block in zip(make_keys(*numbers), make_blocks(*numbers, size=SIZE), strict=True):
            self.kept[key] = block.tobytes()

    def numbers(self, candidates: range) -> list[int]:
        return [number for number in candidates if make_keys(number)[0] in self.kept]


class Chain:
    """A store of such tiers, and who was told what."""

    def __init__(self, num: int, max_queued_blocks: int = 100) -> None:
        self.clock = ManualClock()
        self.tiers = [DictTier(f"t{i}") for i in range(num)]
        self.store = KVStore(self.tiers, self.clock, max_queued_blocks)
        self.told: list[tuple[int, bool]] = []

    def save(self, *numbers: int) -> list[bool]:
        return [self._save(number) for number in numbers]

    def _save(self, number: int) -> bool:
        (block,) = make_blocks(number, size=SIZE)
        (key,) = make_keys(number)
        digest = xxhash.xxh3_128_digest(block)
        return self.store.save(key, block, digest, lambda saved: self.told.append((number, saved)))

    def load(self, *numbers: int) -> int:
        targets = make_targets(len(numbers), SIZE)
        num = self.store.load(make_keys(*numbers), targets)
        for target, block in zip(targets[:num], make_blocks(*numbers, size=SIZE), strict=False):
            assert np.array_equal(target, block)
        return num

    def close(self) -> None:
        for tier in self.tiers:
            tier.may_save.set()
        self.store.close()


@pytest.fixture
def chain() -> Iterator[Chain]:
    chain = Chain(2)
    yield chain
    chain.close()


def test_a_store_of_no_tiers_has_nothing() -> None:
    chain = Chain(0)
    assert chain.load(0, 1) == 0
    assert chain.store.find(make_keys(0)) == 0
    chain.save(0)
    assert chain.store.flush(30)
    assert chain.told == [(0, False)]
    chain.close()


def test_saves_to_all_tiers(chain: Chain) -> None:
    assert chain.save(0, 1, 2) == [True] * 3
    assert chain.store.flush(30)
    assert [tier.numbers(range(5)) for tier in chain.tiers] == [[0, 1, 2]] * 2
    assert chain.told == [(0, True), (1, True), (2, True)]
    assert chain.load(0, 1, 2, 3) == 3


def test_what_is_queued_is_one_batch_with_one_lookup(chain: Chain) -> None:
    upper = chain.tiers[0]
    upper.may_save.clear()
    chain.save(0)
    assert upper.is_saving.wait(30)
    chain.save(1, 2, 3, 1)
    upper.may_save.set()
    assert chain.store.flush(30)
    assert upper.lookups == [("missing", 1), ("save", 1), ("missing", 3), ("save", 3)]
    assert [number for number, _ in chain.told] == [0, 1, 2, 3, 1]


def test_what_a_tier_has_is_not_saved_again(chain: Chain) -> None:
    chain.tiers[0].put(0, 1)
    chain.save(0, 1)
    assert chain.store.flush(30)
    assert chain.tiers[0].saves == []
    assert chain.tiers[1].numbers(range(2)) == [0, 1]
    assert chain.told == [(0, True), (1, True)]


def test_a_prefix_is_loaded_piece_by_piece(chain: Chain) -> None:
    upper, lower = chain.tiers
    upper.put(0, 1, 5, 6)
    lower.put(1, 2, 3, 4, 7)
    assert chain.store.find(make_keys(*range(10))) == 8
    assert chain.load(*range(10)) == 8
    asked = [what for what, _ in upper.lookups if what in ("find", "load")]
    assert asked == ["find"] * 3 + ["load"] * 3


def test_nobody_is_asked_twice_about_one_key() -> None:
    chain = Chain(3)
    chain.tiers[1].put(0, 1)
    assert chain.store.find(make_keys(0, 1, 2)) == 2
    assert [tier.lookups for tier in chain.tiers] == [
        [("find", 3), ("find", 1)],
        [("find", 3)],
        [("find", 1)],
    ]
    chain.close()


def test_what_a_lower_tier_gave_is_promoted() -> None:
    chain = Chain(3)
    chain.tiers[1].put(0, 1)
    chain.tiers[2].put(2, *range(3, 20))
    assert chain.load(*range(20)) == 20
    assert chain.store.flush(30)
    assert chain.tiers[0].numbers(range(20)) == list(range(20))
    assert chain.tiers[1].numbers(range(20)) == list(range(20))
    assert chain.tiers[2].numbers(range(20)) == list(range(2, 20))
    assert chain.store.stats().promoted == 20
    chain.close()


def test_a_full_queue_drops_at_once() -> None:
    chain = Chain(1, max_queued_blocks=3)
    chain.tiers[0].may_save.clear()
    chain.save(0)
    assert chain.tiers[0].is_saving.wait(30)
    assert chain.save(1, 2, 3, 4, 5) == [True, True, True, False, False]
    assert chain.told == [(4, False), (5, False)]
    assert (chain.store.stats().queued, chain.store.stats().dropped) == (3, 2)
    assert not chain.store.flush(0.01)
    chain.tiers[0].may_save.set()
    assert chain.store.flush(30)
    assert sorted(chain.told) == [(n, n < 4) for n in range(6)]
    assert chain.store.stats().queued == 0
    chain.close()


def test_closing_drops_what_is_queued_and_tells() -> None:
    chain = Chain(1)
    chain.tiers[0].may_save.clear()
    chain.save(0)
    assert chain.tiers[0].is_saving.wait(30)
    chain.save(1, 2)
    closer = threading.Thread(target=chain.store.close)
    closer.start()
    chain.tiers[0].may_save.set()
    closer.join()
    assert sorted(chain.told) == [(0, True), (1, False), (2, False)]
    assert chain.save(3) == [False]
    assert chain.told[-1] == (3, False)
    chain.store.close()
    assert chain.tiers[0].num_closed == 1
    assert chain.store.stats().dropped == 3


@pytest.mark.parametrize("error", [StoreError("gone"), ValueError("a bug")])
def test_a_broken_tier_fails_nobody(chain: Chain, error: Exception) -> None:
    upper, lower = chain.tiers
    upper.put(0)
    upper.error = error
    lower.put(0, 1)
    assert chain.store.find(make_keys(0, 1)) == 2
    assert chain.load(0, 1) == 2
    chain.save(2)
    assert chain.store.flush(30)
    assert lower.numbers(range(3)) == [0, 1, 2]
    assert chain.told == [(2, True)]
    stats = chain.store.stats()
    assert [member.is_broken for member in stats.tiers] == [True, False]
    assert [member.errors for member in stats.tiers] == [1, 0]


def test_with_all_tiers_broken_there_is_nothing(chain: Chain) -> None:
    for tier in chain.tiers:
        tier.put(0)
        tier.error = StoreError("gone")
    assert chain.load(0) == 0
    chain.save(1)
    assert chain.store.flush(30)
    assert chain.told == [(1, False)]


def test_a_broken_tier_is_tried_again_less_and_less_often(
    chain: Chain, caplog: pytest.LogCaptureFixture
) -> None:
    upper = chain.tiers[0]
    upper.error = StoreError("gone")
    tries = []
    with caplog.at_level(logging.WARNING):
        for _ in range(1000):
            before = len(upper.lookups)
            chain.store.find(make_keys(0))
            if len(upper.lookups) > before:
                tries.append(chain.clock.now())
            chain.clock.advance(0.25)
        assert tries[:7] == [0, 1, 3, 7, 15, 31, 61]
        assert len(caplog.records) == 1, "one line when it goes away"
        upper.error = None
        upper.put(0)
        chain.clock.advance(30)
        assert chain.store.find(make_keys(0)) == 1
        assert len(caplog.records) == 2, "and one when it is back"
    assert not chain.store.stats().tiers[0].is_broken
    upper.error = StoreError("gone again")
    chain.store.find(make_keys(0))
    upper.error = None
    chain.clock.advance(1)
    assert chain.store.find(make_keys(0)) == 1, "the back-off begins anew"


def test_a_callback_that_fails_harms_nobody(chain: Chain) -> None:
    (block,), (key,) = make_blocks(0, size=SIZE), make_keys(0)

    def fail(saved: bool) -> None:
        raise RuntimeError("not ours")

    chain.store.save(key, block, xxhash.xxh3_128_digest(block), fail)
    chain.save(1)
    assert chain.store.flush(30)
    assert chain.told == [(1, True)]


@settings(max_examples=30, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 20), max_size=60),
    limit=st.integers(1, 20),
    breaks=st.sets(st.integers(0, 60)),
    closes_early=st.booleans(),
)
def test_each_block_is_told_exactly_once(
    numbers: list[int], limit: int, breaks: set[int], closes_early: bool
) -> None:
    chain = Chain(2, limit)
    for i, number in enumerate(numbers):
        chain.tiers[0].error = StoreError("gone") if i in breaks else None
        chain.tiers[1].error = StoreError("gone") if i + 1 in breaks else None
        chain.clock.advance(0.5)
        chain.save(number)
    if not closes_early:
        assert chain.store.flush(30)
    chain.close()
    assert sorted(number for number, _ in chain.told) == sorted(numbers)
    for number, saved in chain.told:
        if saved:
            assert any(tier.numbers(range(number, number + 1)) for tier in chain.tiers)


def test_real_tiers_together(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """Two directories, of which the upper is small."""
    from splitserve.store.registry import make_tier, parse_tier

    specs = [f"disk:{tmp_path}/upper?limit=1024", f"shared_storage:{tmp_path}/lower"]
    store = KVStore([make_tier(parse_tier(s), b"m", SIZE) for s in specs], ManualClock())
    done = threading.Semaphore(0)
    for key, block in zip(make_keys(*range(10)), make_blocks(*range(10), size=SIZE), strict=True):
        store.save(key, block, xxhash.xxh3_128_digest(block), lambda saved: done.release())
    assert all(done.acquire(timeout=30) for _ in range(10))
    assert store.flush(30)
    targets = make_targets(10, SIZE)
    assert store.load(make_keys(*range(10)), targets) == 10
    assert np.array_equal(targets, make_blocks(*range(10), size=SIZE))
    assert store.flush(30)
    assert store.stats().tiers[0].tier.num_blocks <= 4
    assert store.stats().tiers[1].tier.num_blocks == 10
    store.close()
