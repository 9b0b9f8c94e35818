"""KV through a store between two engines of this process: handed over by it, and found in it."""

from __future__ import annotations

import itertools
import random
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from splitserve import wire
from splitserve.clock import ManualClock, MonotonicClock
from splitserve.kv.keys import granule_keys, root_key
from splitserve.store.base import Tier
from splitserve.store.chain import KVStore
from splitserve.store.registry import make_tier, parse_tier
from splitserve.wire import Leg
from tests.support.engines import IDENTITY, EngineHost, expected_tokens
from tests.support.pairs import GREEDY, PROMPT, Pair, random_handoffs

BLOCK_BYTES = 16 * 8  # of the simulated model
KINDS = ("disk", "shared_storage")


@pytest.fixture(params=KINDS)
def make_store(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], KVStore]:
    def make() -> KVStore:
        tier = parse_tier(f"{request.param}:{tmp_path}/kv?limit=64M")
        return KVStore([make_tier(tier, b"namespace", BLOCK_BYTES)], MonotonicClock())

    return make


def answer(pair: Pair, name: str = "r") -> list[int]:
    pair.run(wire.End)
    return [pair.offers[name].output_ids[0], *pair.decode.tokens[name]]


def flush(host: EngineHost) -> None:
    """Turn until what the engine computed is saved."""
    host.settle()


@pytest.mark.parametrize("way", ["request-pull", "chunk-pull"])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 48, 300])
def test_a_handoff_through_the_store(
    make_store: Callable[[], KVStore], way: str, prefix_cache: bool, length: int
) -> None:
    pair = Pair(way=way, prefix_cache=prefix_cache, make_store=make_store, by_store=True)
    prompt = PROMPT[:length]
    pair.submit(prompt)
    pair.run(wire.End)
    assert answer(pair) == expected_tokens(prompt, GREEDY, 12)
    (ended,) = [x for x in pair.decode.notices if isinstance(x, wire.FetchEnded)]
    assert ended.num_bytes == length // 16 * BLOCK_BYTES
    assert ended.missing_tokens == length % 16
    assert (pair.num_parts > 0) == (way == "chunk-pull" and length > 64)
    pair.settle()
    pair.close()


def test_the_source_is_not_needed_any_more(make_store: Callable[[], KVStore]) -> None:
    pair = Pair(way="request-pull", make_store=make_store, by_store=True)
    pair.prefill.submit("r", PROMPT, GREEDY, Leg.PREFILL)
    (offered,) = pair.prefill.run_until(wire.Offered)
    assert isinstance(offered, wire.Offered)
    pair.prefill.settle()
    pair.prefill.close()
    pair.decode.submit(
        "r", PROMPT, GREEDY, Leg.DECODE, list(offered.offer.output_ids), offered.offer
    )
    pair.decode.run_until(wire.End)
    assert [offered.offer.output_ids[0], *pair.decode.tokens["r"]] == expected_tokens(
        PROMPT, GREEDY, 12
    )
    pair.decode.settle()
    pair.close()


@pytest.mark.parametrize("damage", ["all", "middle", "truncated", "flipped", "no directory"])
def test_what_the_store_has_lost_is_computed(
    make_store: Callable[[], KVStore], tmp_path: Path, damage: str
) -> None:
    """Between the offer and the read; the answer is right and nothing leaks."""
    pair = Pair(way="request-pull", make_store=make_store, by_store=True)
    pair.prefill.submit("r", PROMPT, GREEDY, Leg.PREFILL)
    (offered,) = pair.prefill.run_until(wire.Offered)
    assert isinstance(offered, wire.Offered)
    pair.prefill.notices.clear()
    offer = offered.offer
    assert len(offer.block_ids) == 18
    files = [path for path in (tmp_path / "kv").rglob("*") if path.is_file()]
    files = [path for path in files if path.stat().st_size >= BLOCK_BYTES]
    assert len(files) == 18
    (middle,) = [path for path in files if path.stem == offer.keys[7].hex()]
    if damage == "all":
        for path in files:
            path.unlink()
    elif damage == "middle":
        middle.unlink()
    elif damage == "truncated":
        middle.write_bytes(middle.read_bytes()[:-1])
    elif damage == "flipped":
        data = bytearray(middle.read_bytes())
        data[-1] ^= 1
        middle.write_bytes(data)
    else:
        shutil.rmtree(tmp_path / "kv")
    pair.decode.submit("r", PROMPT, GREEDY, Leg.DECODE, list(offer.output_ids), offer)
    pair.decode.run_until(wire.End)
    assert [offer.output_ids[0], *pair.decode.tokens["r"]] == expected_tokens(PROMPT, GREEDY, 12)
    (ended,) = [x for x in pair.decode.notices if isinstance(x, wire.FetchEnded)]
    assert ended.missing_tokens > 12
    pair.settle()
    pair.close()


def test_a_prompt_computed_anywhere_is_not_computed_again(
    make_store: Callable[[], KVStore],
) -> None:
    """Not by the other engine, and not after both were replaced."""
    pair = Pair(way="chunk-pull", make_store=make_store)
    pair.submit()
    pair.run(wire.End)
    pair.settle()
    flush(pair.prefill)
    pair.close()
    for _ in range(2):
        host = EngineHost(128, store=make_store())
        host.submit("again", PROMPT, GREEDY)
        host.run_until(wire.End)
        assert host.tokens["again"] == expected_tokens(PROMPT, GREEDY, 12)
        (started,) = [x for x in host.notices if isinstance(x, wire.Started)]
        (loaded,) = [x for x in host.notices if isinstance(x, wire.Loaded)]
        assert started.cached_tokens == loaded.num_tokens == 288
        assert (loaded.source, loaded.num_bytes) == ("store", 18 * BLOCK_BYTES)
        host.settle()
        host.close()


def test_answers_are_kept_too(make_store: Callable[[], KVStore]) -> None:
    """The next turn of a conversation finds what was decoded."""
    host = EngineHost(128, store=make_store())
    host.submit("first", PROMPT[:40], GREEDY)
    host.run_until(wire.End)
    turn = PROMPT[:40] + host.tokens["first"][:8] + [7, 8, 9]
    host.settle()
    host.close()
    other = EngineHost(128, store=make_store())
    other.submit("second", turn, GREEDY)
    other.run_until(wire.End)
    (started,) = [x for x in other.notices if isinstance(x, wire.Started)]
    assert started.cached_tokens == 48
    assert other.tokens["second"] == expected_tokens(turn, GREEDY, 12)
    other.settle()
    other.close()


def test_what_is_computed_with_rounded_weights_is_for_nobody_else(
    make_store: Callable[[], KVStore],
) -> None:
    host = EngineHost(128, store=make_store())
    host.engine.keeping.is_shared = False
    host.submit("r", PROMPT, GREEDY)
    host.run_until(wire.End)
    host.settle()
    assert not host.engine.outbox.cached
    host.close()
    store = make_store()
    keys = granule_keys(root_key(IDENTITY), PROMPT)
    assert store.find(keys) == 0
    store.close()


def test_tenants_do_not_meet_in_the_store(make_store: Callable[[], KVStore]) -> None:
    for number, salt in enumerate(("a", "b", "a")):
        host = EngineHost(128, store=make_store())
        host.submit("r", PROMPT, GREEDY, salt=salt)
        host.run_until(wire.End)
        (started,) = [x for x in host.notices if isinstance(x, wire.Started)]
        assert started.cached_tokens == (288 if number == 2 else 0)
        host.settle()
        host.close()


def test_random_handoffs_through_the_store(make_store: Callable[[], KVStore]) -> None:
    """With aborts on both sides, and a directory that is emptied now and then."""
    for way, by_store in itertools.product(("request-pull", "chunk-pull"), (True, False)):
        pair = Pair(way=way, make_store=make_store, by_store=by_store)
        assert random_handoffs(pair, random.Random(3), 60) > 20
        pair.close()


@pytest.mark.parametrize("what", ["find", "load"])
def test_a_store_that_hangs_holds_up_nobody_for_long(tmp_path: Path, what: str) -> None:
    """Not an error, no answer: the prompt is computed, the next ones do not ask; blocks that the
    store may still fill are nobody's until it has ended."""

    def make_store() -> tuple[KVStore, Tier]:
        tier = make_tier(parse_tier(f"disk:{tmp_path}/kv"), b"namespace", BLOCK_BYTES)
        return KVStore([tier], MonotonicClock()), tier

    store, _ = make_store()
    before = EngineHost(128, store=store)
    before.submit("r", PROMPT, GREEDY)
    before.run_until(wire.End)
    before.settle()
    before.close()
    store, tier = make_store()
    goes_on = threading.Event()
    inner = getattr(tier, what)

    def hang(*arguments: object) -> int:
        goes_on.wait(60)
        return int(inner(*arguments))

    setattr(tier, what, hang)
    clock = ManualClock()
    host = EngineHost(128, store=store, clock=clock)
    host.submit("r", PROMPT, GREEDY)
    for _ in range(2000):
        host.turn()
        if what == "find" or host.scheduler.fetching:
            break
        host.woken.wait(0.001)
        host.woken.clear()
    assert not host.tokens
    assert host.engine.next_deadline_s() is not None
    clock.advance(60.0)
    host.run_until(wire.End)
    assert host.tokens["r"] == expected_tokens(PROMPT, GREEDY, 12)
    (loaded,) = [x for x in host.notices if isinstance(x, wire.Loaded)]
    assert (loaded.num_tokens, bool(loaded.reason)) == (0, True)
    assert host.pool.num_quarantined == (19 if what == "load" else 0)
    host.submit("next", PROMPT[::-1], GREEDY)
    host.run_until(wire.End, num=2)
    assert len([x for x in host.notices if isinstance(x, wire.Loaded)]) == 1
    goes_on.set()
    host.settle()
    assert host.pool.num_quarantined == 0
    host.close()


class Slow:
    """A store whose tier is slow to answer, until told."""

    def __init__(self, tmp_path: Path) -> None:
        self.tier = make_tier(parse_tier(f"disk:{tmp_path}/kv"), b"namespace", BLOCK_BYTES)
        self.is_held = True
        inner = self.tier.save

        def save(*arguments: object) -> int:
            while self.is_held:
                time.sleep(0.001)
            return inner(*arguments)  # type: ignore[arg-type]

        self.tier.save = save  # type: ignore[method-assign,assignment]


def test_a_slow_store_pins_few_blocks_and_holds_up_nobody(tmp_path: Path) -> None:
    slow = Slow(tmp_path)
    host = EngineHost(num_blocks=64, store=KVStore([slow.tier], MonotonicClock()))
    for number in range(40):
        prompt = [number, *range(100)]
        host.submit(f"r{number}", prompt, GREEDY)
        host.run_until(wire.End, num=number + 1)
        assert host.tokens[f"r{number}"] == expected_tokens(prompt, GREEDY, 12)
        assert host.pool.num_leased() <= 16
        host.engine.scheduler.check()
    view = host.engine.view()
    assert view.blocks_unsaved > 40
    slow.is_held = False
    host.settle()
    host.close()
