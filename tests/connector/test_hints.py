"""A prompt's blocks fetched from whichever engine has them, told by a hint."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve import wire
from splitserve.clock import ManualClock, MonotonicClock
from splitserve.engine.scheduler import SchedulerConfig
from splitserve.kv.lease import LeaseEnd
from splitserve.sampling import Sampling
from splitserve.store.chain import KVStore
from splitserve.store.registry import make_tier, parse_tier
from splitserve.transport.registry import TRANSPORTS, is_installed
from splitserve.wire import Leg
from tests.support.engines import EngineHost, expected_tokens

GREEDY = Sampling(seed=0, max_tokens=12, temperature=0.0)
PROMPT = list(range(300))
BLOCK_BYTES = 16 * 8


def hint_at(host: EngineHost, num_blocks: int, epoch: str = "") -> wire.Hint:
    config = host.config
    address = host.connector.address
    return wire.Hint(config.worker_id, epoch or config.epoch, address, num_blocks, 0.001, 1.0)


class Two:
    """A holder that has computed PROMPT, and another engine that has not."""

    def __init__(self, transport: str = "shm", **other: object) -> None:
        self.holder = EngineHost(worker_id="holder", transport=transport)
        self.other = EngineHost(worker_id="other", transport=transport, **other)  # type: ignore[arg-type]
        self.holder.submit("first", PROMPT, GREEDY)
        self.holder.run_until(wire.End)
        self.holder.settle()

    def run(self, *kinds: type, num: int = 1) -> list[wire.Notice]:
        for _ in range(4000):
            found = [x for x in self.other.notices if isinstance(x, kinds)]
            if len(found) >= num:
                return found
            self.holder.turn()
            if not self.other.turn():
                self.other.woken.wait(0.002)
                self.other.woken.clear()
        raise AssertionError(f"no {kinds}: {self.other.notices}")

    def settle(self) -> None:
        end = time.monotonic() + 30
        while not (self.holder.engine.is_idle and self.other.engine.is_idle):
            self.holder.turn()
            self.other.turn()
            self.other.woken.wait(0.001)
            self.other.woken.clear()
            assert time.monotonic() < end, "not idle"
        self.holder.settle()
        self.other.settle()

    def close(self) -> None:
        self.holder.close()
        self.other.close()


@pytest.fixture
def two() -> Iterator[Two]:
    two = Two()
    yield two
    two.close()


def cached(host: EngineHost) -> list[int]:
    return [x.cached_tokens for x in host.notices if isinstance(x, wire.Started)]


def loaded(host: EngineHost) -> list[wire.Loaded]:
    return [x for x in host.notices if isinstance(x, wire.Loaded)]


def failed(host: EngineHost) -> list[wire.HintFailed]:
    return [x for x in host.notices if isinstance(x, wire.HintFailed)]


@pytest.mark.parametrize("transport", [x for x in TRANSPORTS if is_installed(x)])
@pytest.mark.parametrize("leg", [Leg.WHOLE, Leg.PREFILL])
def test_what_another_engine_has_is_not_computed(transport: str, leg: Leg) -> None:
    two = Two(transport)
    two.other.submit("r", PROMPT, GREEDY, leg, hints=[hint_at(two.holder, 18)])
    two.run(wire.End if leg is Leg.WHOLE else wire.Offered)
    whole = expected_tokens(PROMPT, GREEDY, 12)
    assert two.other.tokens["r"] == (whole if leg is Leg.WHOLE else whole[:1])
    assert cached(two.other) == [288]
    (one,) = loaded(two.other)
    assert (one.source, one.num_tokens, one.num_bytes) == ("holder", 288, 18 * BLOCK_BYTES)
    assert not failed(two.other)
    two.other.engine.abort("r")
    two.settle()
    assert two.holder.leases.ended_counts()[LeaseEnd.READ] == 1
    two.close()


def test_a_prefix_of_it(two: Two) -> None:
    prompt = [*PROMPT[:100], 7, *range(400, 430)]
    two.other.submit("r", prompt, GREEDY, hints=[hint_at(two.holder, 6)])
    two.run(wire.End)
    assert two.other.tokens["r"] == expected_tokens(prompt, GREEDY, 12)
    assert cached(two.other) == [96]
    two.settle()


def test_the_last_token_is_always_computed(two: Two) -> None:
    two.other.submit("r", PROMPT[:288], GREEDY, hints=[hint_at(two.holder, 18)])
    two.run(wire.End)
    assert two.other.tokens["r"] == expected_tokens(PROMPT[:288], GREEDY, 12)
    assert cached(two.other) == [272]
    two.settle()


def test_only_what_is_lacked_moves(two: Two) -> None:
    two.other.submit("own", PROMPT[:64], GREEDY)
    two.run(wire.End)
    two.other.submit("r", PROMPT, GREEDY, hints=[hint_at(two.holder, 18)])
    two.run(wire.End, num=2)
    assert cached(two.other) == [0, 288]
    assert loaded(two.other)[0].num_bytes == 14 * BLOCK_BYTES
    two.settle()


def test_a_conversation_goes_back_to_the_prefill_worker(two: Two) -> None:
    """The next turn's prefill fetches what was decoded elsewhere."""
    turn = [*PROMPT, *two.holder.tokens["first"][:11], 5, 6, 7]
    two.other.submit("r", turn, GREEDY, Leg.PREFILL, hints=[hint_at(two.holder, 19)])
    two.run(wire.Offered)
    assert cached(two.other) == [304]
    assert two.other.tokens["r"] == expected_tokens(turn, GREEDY, 1)
    two.other.engine.abort("r")
    two.settle()


def test_a_hint_at_nothing_costs_a_round_trip_and_is_told(two: Two) -> None:
    prompt = list(range(200, 400))
    two.other.submit("r", prompt, GREEDY, hints=[hint_at(two.holder, 12)])
    two.run(wire.End)
    assert two.other.tokens["r"] == expected_tokens(prompt, GREEDY, 12)
    (wrong,) = failed(two.other)
    assert (wrong.worker_id, wrong.num_hinted, wrong.num_blocks) == ("holder", 12, 0)
    two.settle()


def test_a_hint_at_too_much_is_told_and_used(two: Two) -> None:
    prompt = [*PROMPT[:100], *range(400, 500)]
    two.other.submit("r", prompt, GREEDY, hints=[hint_at(two.holder, 12)])
    two.run(wire.End)
    assert cached(two.other) == [96]
    assert [x.num_blocks for x in failed(two.other)] == [6]
    two.settle()


def test_a_holder_that_is_gone_or_was_restarted(two: Two) -> None:
    stale = hint_at(two.holder, 18, epoch="before")
    two.other.submit("r", PROMPT, GREEDY, hints=[stale])
    two.run(wire.End)
    assert [x.num_blocks for x in failed(two.other)] == [0]
    hint = hint_at(two.holder, 12)
    two.holder.close()
    prompt = list(range(100, 300))
    two.other.submit("s", prompt, GREEDY, hints=[hint])
    two.other.run_until(wire.End, num=2)
    assert two.other.tokens["s"] == expected_tokens(prompt, GREEDY, 12)
    assert [x.num_blocks for x in failed(two.other)] == [0, 0]
    two.other.settle()


def test_the_next_hint_is_asked_when_one_fails(two: Two) -> None:
    stale = hint_at(two.holder, 18, epoch="before")
    stale = wire.Hint("third", stale.epoch, stale.address, 18, 0.001, 1.0)
    two.other.submit("r", PROMPT, GREEDY, hints=[stale, hint_at(two.holder, 18)])
    two.run(wire.End)
    assert cached(two.other) == [288]
    assert [x.worker_id for x in failed(two.other)] == ["third"]
    two.settle()


def test_a_flipped_bit_is_computed_instead() -> None:
    two = Two(faults="fetch.block=flip")
    two.other.submit("r", PROMPT, GREEDY, hints=[hint_at(two.holder, 18)])
    two.run(wire.End)
    assert two.other.tokens["r"] == expected_tokens(PROMPT, GREEDY, 12)
    assert cached(two.other) == [0]
    (one,) = loaded(two.other)
    assert "digest" in one.reason
    two.settle()
    two.close()


def test_a_lease_that_expires_while_the_reader_queues() -> None:
    """The holder gave the blocks to others meanwhile: their digests are not those told."""
    clock = ManualClock()
    holder = EngineHost(24, worker_id="holder", clock=clock)
    holder.submit("first", PROMPT, GREEDY)
    holder.run_until(wire.End)
    holder.settle()
    other = EngineHost(worker_id="other", config=SchedulerConfig(max_sequences=1))
    other.submit("busy", [1, 2, 3], Sampling(seed=0, max_tokens=300, temperature=0.0))
    other.turn()
    other.submit("r", PROMPT, GREEDY, hints=[hint_at(holder, 18)])
    for _ in range(2000):  # it is found, and waits for its turn
        holder.turn()
        other.turn()
        if not other.engine.loader._finding:
            break
        other.woken.wait(0.001)
    assert holder.pool.num_leased() == 18
    clock.advance(60.0)
    holder.submit("second", list(range(500, 200, -1)), GREEDY)
    holder.run_until(wire.End, num=2)
    holder.settle()
    other.run_until(wire.End, num=2)
    assert other.tokens["r"] == expected_tokens(PROMPT, GREEDY, 12)
    assert cached(other)[-1] == 0
    assert "digest" in loaded(other)[0].reason
    other.settle()
    other.close()
    holder.close()


def test_a_holder_lends_no_more_than_leases_may_pin(two: Two) -> None:
    for number in range(3):  # prefill legs whose offers nobody takes
        prompt = [number, *range(250)]
        two.holder.submit(f"p{number}", prompt, GREEDY, Leg.PREFILL)
    two.holder.run_until(wire.Offered, num=3)
    assert not two.holder.scheduler.admits_prefill
    two.other.submit("r", PROMPT, GREEDY, hints=[hint_at(two.holder, 18)])
    two.run(wire.End)
    assert cached(two.other) == [0]
    for number in range(3):
        two.holder.engine.abort(f"p{number}")
    two.settle()


@pytest.mark.parametrize("when", ["finding", "found", "loading"])
def test_a_client_that_goes_leaves_nothing(when: str, tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    faults = f"fetch.begin=hold:{hold}" if when == "loading" else ""
    two = Two(faults=faults)
    two.other.submit("r", PROMPT, GREEDY, hints=[hint_at(two.holder, 18)])
    if when != "finding":
        for _ in range(2000):
            two.holder.turn()
            if when == "loading":
                two.other.turn()
                if two.other.scheduler.fetching:
                    break
            elif two.holder.leases.num_active and not two.holder.engine.asks._sealing:
                break
            two.other.woken.wait(0.001)
    two.other.engine.abort("r")
    if when == "loading":
        assert two.other.pool.num_quarantined == 19
    hold.unlink()
    two.settle()
    assert two.other.pool.num_quarantined == 0
    assert "r" not in two.other.tokens
    two.close()


def test_what_no_worker_has_comes_from_the_store(tmp_path: Path) -> None:
    def make_store() -> KVStore:
        tier = make_tier(parse_tier(f"disk:{tmp_path}/kv"), b"namespace", BLOCK_BYTES)
        return KVStore([tier], MonotonicClock())

    before = EngineHost(128, store=make_store())
    before.submit("r", PROMPT, GREEDY)
    before.run_until(wire.End)
    before.settle()
    before.close()
    two = Two(store=make_store())
    stale = hint_at(two.holder, 18, epoch="before")
    two.other.submit("r", PROMPT, GREEDY, hints=[stale])
    two.run(wire.End)
    assert [x.source for x in loaded(two.other)] == ["store"]
    assert cached(two.other) == [288]
    two.settle()
    two.close()


def test_random_hints_and_aborts(two: Two) -> None:
    """True, wrong and stale hints, both ways, with aborts at any moment: right answers, no leak."""
    rng = random.Random(5)
    hosts = [two.holder, two.other]
    answers: dict[str, list[int]] = {}
    alive: list[tuple[EngineHost, str]] = []
    for number in range(150):
        prompt = [rng.randrange(30)] * (16 * rng.randrange(1, 7))
        prompt += [rng.randrange(500) for _ in range(rng.randrange(1, 60))]
        host, holder = rng.sample(hosts, 2)
        hints = [hint_at(holder, rng.randrange(1, 8), rng.choice(["", "", "", "stale"]))]
        name = f"r{number}"
        host.submit(name, prompt, GREEDY, hints=hints)
        answers[name] = expected_tokens(prompt, GREEDY, 12)
        alive.append((host, name))
        for _ in range(rng.randrange(5)):
            for one in hosts:
                one.turn()
                one.engine.check()
        if rng.random() < 0.3:
            victim = rng.choice(alive[-8:])
            victim[0].engine.abort(victim[1])
            alive.remove(victim)
    two.settle()
    for host, name in alive:
        assert host.tokens[name] == answers[name]
    assert sum(one.num_tokens > 0 for host in hosts for one in loaded(host)) > 10
