"""Handoffs by parts between two engines of this process: while prefill goes on, KV moves."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from splitserve import wire
from splitserve.engine.scheduler import SchedulerConfig
from splitserve.kv.lease import LeaseEnd
from splitserve.wire import Grain, Leg
from tests.support.engines import EngineHost, expected_tokens
from tests.support.pairs import CHUNK, GREEDY, PROMPT, Pair, random_handoffs


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("digests", ["full", "lease"])
@pytest.mark.parametrize("length", [1, 16, 63, 64, 65, 128, 300])
def test_it_gives_the_answer_of_one_worker(length: int, digests: str, prefix_cache: bool) -> None:
    pair = Pair(prefix_cache=prefix_cache, digests=digests)
    prompt = PROMPT[:length]
    pair.submit(prompt)
    pair.run(wire.End)
    answer = [pair.offers["r"].output_ids[0], *pair.decode.tokens["r"]]
    assert answer == expected_tokens(prompt, GREEDY, 12)
    (ended,) = [x for x in pair.decode.notices if isinstance(x, wire.FetchEnded)]
    assert ended.proof == ("digest" if digests == "full" else "lease")
    assert ended.num_bytes == -(-length // 16) * pair.offers["r"].format.block_bytes
    assert pair.num_parts == (length - 1) // CHUNK
    pair.settle()
    assert pair.prefill.leases.ended_counts()[LeaseEnd.READ] == 1
    pair.close()


def test_blocks_move_while_prefill_goes_on(pair: Pair) -> None:
    pair.submit()
    while not pair.num_parts:
        pair.turn()
    sequence = pair.decode.engine._sequences["r"]
    for _ in range(2000):
        pair.decode.turn()
        assert sequence.incoming is not None
        if sequence.incoming.num_bytes:
            break
        pair.decode.woken.wait(0.002)
    assert not pair.offers, "prefill is over already"
    assert sequence.incoming.num_bytes == 4 * pair.decode.config.kv_format.block_bytes
    pair.run(wire.End)
    pair.settle()


def test_only_what_the_reader_lacks_moves(pair: Pair) -> None:
    pair.submit(PROMPT[:160], "first")
    pair.run(wire.End)
    pair.decode.notices.clear()
    pair.submit(PROMPT, "second")
    pair.run(wire.End)
    (ended,) = [x for x in pair.decode.notices if isinstance(x, wire.FetchEnded)]
    assert ended.reused_tokens == 160
    assert ended.num_bytes == 9 * pair.decode.config.kv_format.block_bytes
    pair.settle()


def test_a_first_token_that_ends_the_answer_ends_the_lease(pair: Pair) -> None:
    pair.submit(sampling=msgspec.structs.replace(GREEDY, max_tokens=1))
    while not any(isinstance(x, wire.End) for x in pair.prefill.notices):
        pair.prefill.turn()
    pair.decode.turn()
    pair.decode.engine.abort("r")  # as the gateway does
    pair.settle()
    assert pair.prefill.leases.ended_counts()[LeaseEnd.RELEASED] == 1


def test_damage_on_the_way_ends_the_fetch_and_nothing_is_used() -> None:
    pair = Pair(faults="fetch.block=flip")
    pair.submit()
    (failed,) = pair.run(wire.FetchFailed)
    assert isinstance(failed, wire.FetchFailed)
    assert "wrong digest" in failed.reason
    pair.prefill.engine.abort("r")
    pair.settle()
    assert "r" not in pair.decode.tokens
    assert pair.decode.pool.counts()["free"] == pair.decode.pool.num_blocks
    pair.close()


def test_an_offer_of_other_tokens_is_refused(pair: Pair) -> None:
    pair.prefill.engine.submit(
        wire.Submit("r", Leg.PREFILL, PROMPT[1:], [], GREEDY, grain=Grain.CHUNK)
    )
    pair.decode.engine.submit(
        wire.Submit("r", Leg.DECODE, PROMPT[:-1], [], GREEDY, grain=Grain.CHUNK)
    )
    (failed,) = pair.run(wire.FetchFailed)
    assert isinstance(failed, wire.FetchFailed)
    assert "keys" in failed.reason
    pair.prefill.engine.release(pair.offers["r"].lease_id)  # as the gateway does
    pair.settle()


def test_a_part_lost_on_the_way_comes_with_the_offer(pair: Pair) -> None:
    pair.submit()
    while not pair.offers:
        pair.prefill.turn()
        parts = [x for x in pair.prefill.notices if isinstance(x, wire.PartReady)]
        if pair.num_parts == 1 and parts:
            pair.prefill.notices.remove(parts[0])
            pair.num_parts += 1
        pair.pass_on()
        pair.decode.turn()
    pair.run(wire.End)
    assert pair.decode.tokens["r"] == expected_tokens(PROMPT, GREEDY, 12)[1:]
    pair.settle()


def test_a_lease_that_expires_meanwhile_is_replaced_by_that_of_the_offer(pair: Pair) -> None:
    pair.submit()
    while not pair.num_parts:
        pair.turn()
    (lease,) = pair.prefill.leases._active.values()
    pair.prefill.leases.release(lease.lease_id)
    pair.run(wire.End, wire.FetchFailed)
    if pair.decode.tokens:  # else blocks were taken anew before they were copied: seen by digests
        assert pair.decode.tokens["r"] == expected_tokens(PROMPT, GREEDY, 12)[1:]
    assert pair.offers["r"].lease_id != lease.lease_id
    pair.prefill.engine.release(pair.offers["r"].lease_id)
    pair.settle()


def test_a_preempted_prefill_takes_its_lease_back_and_hands_over_whole() -> None:
    config = SchedulerConfig(CHUNK, 16, prefix_cache=False)
    prefill = EngineHost(num_blocks=20, worker_id="p", config=config)
    prefill.submit("old", list(range(1000, 1060)), msgspec.structs.replace(GREEDY, max_tokens=150))
    prefill.turn()
    prefill.engine.submit(
        wire.Submit("r", Leg.PREFILL, PROMPT[:200], [], GREEDY, grain=Grain.CHUNK)
    )
    prefill.run_until(wire.PartReady)
    victim = prefill.engine._sequences["r"]
    prefill.scheduler._preempt(victim)
    assert victim.lease is None
    (offered,) = prefill.run_until(wire.Offered)
    assert isinstance(offered, wire.Offered)
    assert len(offered.offer.block_ids) == 13
    prefill.engine.release(offered.offer.lease_id)
    prefill.settle()
    prefill.close()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("way", ["chunk-push", "layer-push"])
def test_what_is_pushed_is_the_same(way: str, prefix_cache: bool, transport: str) -> None:
    pair = Pair(way=way, prefix_cache=prefix_cache, transport=transport)
    for number in range(3):
        prompt = [number, *PROMPT[1:]]
        pair.submit(prompt, f"r{number}")
        pair.run(wire.End, num=number + 1)
        answer = [pair.offers[f"r{number}"].output_ids[0], *pair.decode.tokens[f"r{number}"]]
        assert answer == expected_tokens(prompt, GREEDY, 12)
    assert pair.num_pushed >= 3 * 4, "the first part may be told before the landing is known"
    pair.settle()
    pair.close()


def test_a_full_zone_means_pull() -> None:
    pair = Pair(way="layer-push", zone_blocks=3)
    pair.submit()
    pair.run(wire.End)
    assert pair.num_parts
    assert not pair.num_pushed
    assert pair.decode.tokens["r"] == expected_tokens(PROMPT, GREEDY, 12)[1:]
    pair.settle()
    pair.close()


def test_bytes_that_flip_in_the_zone_are_never_used() -> None:
    pair = Pair(way="chunk-push", faults="fetch.block=flip")
    pair.submit()
    (failed,) = pair.run(wire.FetchFailed)
    assert isinstance(failed, wire.FetchFailed)
    pair.prefill.engine.abort("r")
    pair.settle()
    assert "r" not in pair.decode.tokens
    pair.close()


def test_a_writer_that_stands_still_keeps_its_blocks_in_quarantine(tmp_path: Path) -> None:
    """The request is aborted in the middle of a write: nobody gets the landing before its writer
    has ended, and no block of the pool is ever in its reach."""
    hold = tmp_path / "hold"
    hold.touch()
    pair = Pair(way="chunk-push", source_faults=f"push.block=hold:{hold}")
    pair.submit()
    for _ in range(4000):
        pair.turn()
        if any(x.writer is not None for x in pair.decode.landings._landings.values()):
            break
        pair.decode.woken.wait(0.001)
    before = pair.decode.segment.blocks.copy()
    pair.decode.engine.abort("r")  # the source does not know yet
    pair.decode.turn()
    assert pair.decode.landings.num_quarantined == 19
    assert pair.decode.landings.lend(30) is None
    assert not pair.decode.engine.is_idle
    hold.unlink()
    pair.prefill.engine.abort("r")
    pair.settle()
    assert pair.decode.landings.num_quarantined == 0
    lent = pair.decode.landings.lend(40)
    assert lent is not None
    pair.decode.landings.give_back(lent[0])
    assert np.array_equal(pair.decode.segment.blocks, before)
    pair.close()


def test_a_writer_that_comes_too_late_is_refused(tmp_path: Path) -> None:
    hold = tmp_path / "hold"
    hold.touch()
    pair = Pair(way="chunk-push", source_faults=f"push.begin=hold:{hold}")
    pair.submit()
    while not any(isinstance(x, wire.Landed) for x in pair.decode.notices):
        pair.turn()
    for _ in range(20):
        pair.turn()
    pair.decode.engine.abort("r")
    assert pair.decode.landings.is_settled
    pair.decode.zone_segment.blocks[:] = 7
    hold.unlink()
    for _ in range(200):
        pair.turn()
        pair.decode.woken.wait(0.001)
    assert (pair.decode.zone_segment.blocks == 7).all()
    pair.prefill.engine.abort("r")
    pair.settle()
    pair.close()


@pytest.mark.parametrize("way", ["chunk-pull", "chunk-push", "layer-push"])
@pytest.mark.parametrize("seed", range(12))
def test_random_handoffs_with_aborts_on_both_sides(seed: int, way: str) -> None:
    """Requests of any length, aborted at any moment on either side, leave nothing behind."""
    rng = random.Random(seed)
    digests = rng.choice(["full", "lease"]) if way == "chunk-pull" else "full"
    pair = Pair(prefix_cache=rng.random() < 0.7, digests=digests, way=way)
    random_handoffs(pair, rng, 30)
    pair.close()
