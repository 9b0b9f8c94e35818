"""p2p over shm between two engines of this process: handoffs, proofs, and all that can go wrong."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator

import msgspec
import numpy as np
import pytest

from splitserve import wire
from splitserve.clock import ManualClock
from splitserve.engine.scheduler import SchedulerConfig
from splitserve.errors import ConfigError, TransferFailed
from splitserve.faults import Faults
from splitserve.kv.lease import LeaseEnd
from splitserve.sampling import Sampling
from splitserve.transport.segment import Segment
from tests.support.engines import EngineHost, expected_tokens

GREEDY = Sampling(seed=0, max_tokens=12, temperature=0.0)
PROMPT = list(range(100, 150))  # three full blocks and a tail


class Pair:
    """A prefill and a decode engine."""

    def __init__(self, **decode: object) -> None:
        common = {k: decode.pop(k) for k in ("digests", "block_size") if k in decode}
        source = {k[7:]: decode.pop(k) for k in list(decode) if k.startswith("source_")}
        self.prefill = EngineHost(worker_id="p", **common, **source)  # type: ignore[arg-type]
        self.decode = EngineHost(worker_id="d", **common, **decode)  # type: ignore[arg-type]

    def offer(self, prompt: list[int] = PROMPT, sampling: Sampling = GREEDY) -> wire.Offer:
        self.prefill.submit("p", prompt, sampling, wire.Leg.PREFILL)
        (offered,) = self.prefill.run_until(wire.Offered)
        self.prefill.notices.clear()
        assert isinstance(offered, wire.Offered)
        return offered.offer

    def take(self, offer: wire.Offer, prompt: list[int] = PROMPT, name: str = "d") -> None:
        self.decode.submit(
            name, prompt, offer.sampling, wire.Leg.DECODE, list(offer.output_ids), offer
        )

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    pair = Pair()
    yield pair
    pair.close()


def run_to_end(pair: Pair, offer: wire.Offer, prompt: list[int] = PROMPT) -> list[int]:
    """Decode to the end; the whole answer."""
    pair.take(offer, prompt)
    pair.decode.run_until(wire.End)
    return offer.output_ids + pair.decode.tokens["d"]


def failure(pair: Pair, offer: wire.Offer) -> str:
    """The reason for which the decode engine refuses or loses an offer; nothing leaks."""
    pair.take(offer)
    (failed,) = pair.decode.run_until(wire.FetchFailed)
    assert isinstance(failed, wire.FetchFailed)
    pair.decode.settle()
    assert "d" not in pair.decode.tokens
    assert pair.decode.pool.counts()["free"] == pair.decode.pool.num_blocks
    return failed.reason


@pytest.mark.parametrize("digests", ["full", "lease"])
@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 50, 300])
def test_a_handoff_gives_the_answer_of_one_worker(length: int, digests: str) -> None:
    pair = Pair(digests=digests)
    prompt = list(range(length))
    offer = pair.offer(prompt)
    assert run_to_end(pair, offer, prompt) == expected_tokens(prompt, GREEDY, 12)
    (ended,) = [x for x in pair.decode.notices if isinstance(x, wire.FetchEnded)]
    assert ended.proof == ("digest" if digests == "full" else "lease")
    assert ended.num_bytes == -(-length // 16) * offer.format.block_bytes
    pair.prefill.settle()
    pair.decode.settle()
    assert pair.prefill.leases.ended_counts()[LeaseEnd.READ] == 1
    pair.close()


def test_only_what_the_receiver_lacks_moves(pair: Pair) -> None:
    first = pair.offer()
    run_to_end(pair, first)
    pair.decode.notices.clear()
    pair.decode.tokens.clear()
    longer = [*PROMPT[:48], *range(300, 330)]
    offer = pair.offer(longer)
    assert run_to_end(pair, offer, longer) == expected_tokens(longer, GREEDY, 12)
    (ended,) = [x for x in pair.decode.notices if isinstance(x, wire.FetchEnded)]
    assert ended.reused_tokens == 48
    assert ended.num_bytes == 2 * offer.format.block_bytes


def test_nothing_moves_when_all_is_there(pair: Pair) -> None:
    prompt = PROMPT[:48]
    run_to_end(pair, pair.offer(prompt), prompt)
    pair.prefill.settle()
    pair.decode.notices.clear()
    pair.decode.tokens.clear()
    assert run_to_end(pair, pair.offer(prompt), prompt) == expected_tokens(prompt, GREEDY, 12)
    (ended,) = [x for x in pair.decode.notices if isinstance(x, wire.FetchEnded)]
    assert (ended.proof, ended.num_bytes, ended.reused_tokens) == ("local", 0, 48)
    pair.prefill.settle()


def test_tenants_share_no_blocks(pair: Pair) -> None:
    pair.prefill.submit("a", PROMPT, GREEDY, salt="tenant a")
    pair.prefill.run_until(wire.End)
    pair.prefill.submit("b", PROMPT, GREEDY, salt="tenant b")
    pair.prefill.run_until(wire.End, num=2)
    started = [x for x in pair.prefill.notices if isinstance(x, wire.Started)]
    assert [x.cached_tokens for x in started] == [0, 0]


def test_a_flipped_bit_is_never_used() -> None:
    pair = Pair(faults="fetch.block=flip")
    assert "digest" in failure(pair, pair.offer())
    pair.prefill.settle()
    pair.close()


def test_blocks_that_changed_under_an_expired_lease_are_never_used() -> None:
    clock = ManualClock()
    pair = Pair(source_clock=clock, source_term_s=10.0)
    offer = pair.offer()
    clock.advance(11)
    pair.prefill.settle()
    pair.prefill.segment.blocks[offer.block_ids[1]] ^= np.uint8(255)
    assert "digest" in failure(pair, offer)
    pair.close()


def test_without_digests_an_expired_lease_is_no_proof() -> None:
    clock = ManualClock()
    pair = Pair(source_clock=clock, source_term_s=10.0, digests="lease")
    offer = pair.offer()
    clock.advance(11)
    assert "confirm" in failure(pair, offer)
    pair.prefill.settle()
    pair.close()


def test_with_digests_a_source_that_died_in_the_middle_does_not_matter() -> None:
    pair = Pair()
    warm = pair.offer(PROMPT[:20])
    run_to_end(pair, warm, PROMPT[:20])
    offer = pair.offer()
    pair.prefill.close()
    pair.take(offer, name="later")
    pair.decode.run_until(wire.End, num=2)
    answer = offer.output_ids + pair.decode.tokens["later"]
    assert answer == expected_tokens(PROMPT, GREEDY, 12)
    pair.decode.settle()
    pair.decode.close()


def test_a_source_that_was_met_may_die_before_the_transfer(pair: Pair) -> None:
    offer = pair.offer()
    pair.decode.connector.worker.meet(offer.worker_id, offer.epoch, offer.address)
    pair.decode.connector.worker.end_lease(offer)  # same thread, in order: the meeting is over
    while pair.prefill.leases.num_active:
        assert pair.prefill.woken.wait(5)
    pair.prefill.close()
    assert run_to_end(pair, offer) == expected_tokens(PROMPT, GREEDY, 12)


def test_meeting_somebody_who_is_gone_is_harmless(pair: Pair) -> None:
    pair.decode.connector.worker.meet("ghost", "epoch", "splitserve/ghost")
    assert run_to_end(pair, pair.offer()) == expected_tokens(PROMPT, GREEDY, 12)


def test_a_source_that_is_gone_is_a_failed_fetch(pair: Pair) -> None:
    offer = pair.offer()
    pair.prefill.close()
    assert "gone" in failure(pair, offer)


def test_offers_of_something_else_are_refused_with_both_values(pair: Pair) -> None:
    offer = pair.offer()
    replace = msgspec.structs.replace
    wrong_format = replace(offer.format, num_kv_heads=20)
    cases = {
        "identity": replace(offer, identity=b"other model"),
        "num_kv_heads: 20 here, 1 there": replace(offer, format=wrong_format),
        "another": replace(offer, format=replace(offer.format, dtype="bfloat16")),
        "keys": replace(offer, keys=[*offer.keys[:-1], b"x"]),
        "49 tokens": replace(offer, num_tokens=49),
        "blocks": replace(offer, block_ids=offer.block_ids[:-1]),
        "Transport": replace(offer, transport="rdma"),
        "epoch": replace(offer, epoch="another"),
    }
    for word, case in cases.items():
        pair.decode.notices.clear()
        assert word in failure(pair, case), word
    assert run_to_end(pair, offer) == expected_tokens(PROMPT, GREEDY, 12), (
        "the right one still goes"
    )


def test_a_block_number_outside_the_pool_is_a_failed_fetch(pair: Pair) -> None:
    offer = pair.offer()
    bad = msgspec.structs.replace(offer, block_ids=[10**6, *offer.block_ids[1:]])
    assert "outside the peer" in failure(pair, bad)


def test_aborted_while_copying_the_blocks_are_in_quarantine_until_the_copy_ended() -> None:
    pair = Pair(faults="fetch.verify=delay:30")
    pair.take(pair.offer())
    pair.decode.run_until(wire.FetchStarted)
    assert pair.decode.pool.counts()["held"] == 4
    pair.decode.engine.abort("d")
    counts = pair.decode.pool.counts()
    assert (counts["held"], counts["quarantined"]) == (0, 4)
    assert not pair.decode.engine.is_idle
    pair.decode.settle()
    assert pair.decode.pool.counts()["free"] == pair.decode.pool.num_blocks
    pair.prefill.settle()
    pair.close()


def test_aborting_a_prefill_leg_ends_its_lease(pair: Pair) -> None:
    pair.offer()
    assert pair.prefill.leases.num_active == 1
    pair.prefill.engine.abort("p")
    pair.prefill.settle()
    assert pair.prefill.leases.ended_counts()[LeaseEnd.RELEASED] == 1


def test_aborted_before_the_offer_no_offer_is_made() -> None:
    pair = Pair(source_faults="seal=delay:0.2")
    pair.prefill.submit("p", PROMPT, GREEDY, wire.Leg.PREFILL)
    pair.prefill.run_until(wire.PrefillEnded)
    pair.prefill.engine.abort("p")
    pair.prefill.settle()
    assert pair.prefill.woken.wait(5)
    pair.prefill.turn()
    assert not [x for x in pair.prefill.notices if isinstance(x, wire.Offered)]
    pair.close()


def test_a_fetch_waits_for_blocks_and_holds_none_meanwhile() -> None:
    pair = Pair(num_blocks=6)
    pair.decode.submit("local", list(range(60)), Sampling(seed=0, max_tokens=20, temperature=0))
    pair.decode.turn()
    pair.take(pair.offer())
    pair.decode.turn()
    assert pair.decode.engine.view().waiting == 1
    assert pair.decode.pool.counts()["held"] == 0
    pair.decode.run_until(wire.End, num=2)
    assert pair.decode.tokens["d"] == expected_tokens(PROMPT, GREEDY, 12)[1:]
    pair.decode.settle()
    pair.close()


def test_garbage_on_the_side_channel_drops_only_its_sender(pair: Pair) -> None:
    offer = pair.offer()
    for garbage in (
        b"\xff" * 100,
        struct.pack("<I", 5) + b"abcde",
        b"",
        struct.pack("<I", 1 << 30),
    ):
        with socket.socket(socket.AF_UNIX) as client:
            client.connect("\0" + offer.address.removeprefix("unix:"))
            client.sendall(garbage)
            client.settimeout(5)
            if len(garbage) > 4:
                assert client.recv(10) == b""
    assert run_to_end(pair, offer) == expected_tokens(PROMPT, GREEDY, 12)


def test_an_unsealed_segment_is_refused() -> None:
    """A peer that could shrink its segment could kill the reader with SIGBUS."""
    import os

    fd = os.memfd_create("x")
    os.ftruncate(fd, 4096)
    with pytest.raises(TransferFailed, match="sealed"):
        Segment.attach(fd, 1, 4096)
    sealed = Segment.create(1, 4096)
    with pytest.raises(TransferFailed, match="4096"):
        Segment.attach(os.dup(sealed.fd), 2, 4096)
    with pytest.raises(OSError):
        os.ftruncate(sealed.fd, 100)
    reader = Segment.attach(os.dup(sealed.fd), 1, 4096)
    with pytest.raises(ValueError):
        reader.blocks[0, 0] = 1


def test_memory_that_cannot_be_had_is_an_error_at_the_start() -> None:
    with pytest.raises(ConfigError, match="can't be allocated"):
        Segment.create(1 << 20, 1 << 30)


def test_fault_settings_are_checked() -> None:
    for bad in ("nowhere=delay:1", "seal=delay:soon", "seal=explode", "seal=flip"):
        with pytest.raises(ConfigError):
            Faults(bad)


@pytest.mark.parametrize("chunked", [True, False])
def test_many_handoffs_with_random_aborts_leave_nothing(chunked: bool) -> None:
    """300 requests over small pools, prefixes shared, a third aborted somewhere on the way."""
    chooser = random.Random(7)
    config = SchedulerConfig(max_batched_tokens=48, max_sequences=8, chunked_prefill=chunked)
    prefill = EngineHost(48, config, worker_id="p")
    decode = EngineHost(40, config, worker_id="d")
    live: dict[str, tuple[list[int], Sampling]] = {}
    done: set[str] = set()
    aborted: set[str] = set()
    num_submitted = 0
    seen = {id(prefill): 0, id(decode): 0}
    for _ in range(100_000):
        if num_submitted < 300 and len(live) < 10:
            prompt = [chooser.randint(0, 2)] * chooser.choice([16, 32, 64, 100])
            prompt = prompt[: chooser.randint(1, len(prompt))] + [chooser.randint(0, 500)]
            temperature = chooser.choice([0.0, 1.0])
            sampling = Sampling(
                seed=chooser.randint(0, 99),
                max_tokens=chooser.randint(1, 40),
                temperature=temperature,
            )
            live[f"r{num_submitted}"] = (prompt, sampling)
            prefill.submit(f"r{num_submitted}", prompt, sampling, wire.Leg.PREFILL)
            num_submitted += 1
        if live and chooser.random() < 0.08:
            name = chooser.choice(sorted(live))
            prefill.engine.abort(name)
            decode.engine.abort(name)
            aborted.add(name)
            del live[name]
        progressed = False
        for host in (prefill, decode):
            progressed |= host.turn()
            host.engine.check()
            for notice in host.notices[seen[id(host)] :]:
                name = notice.request_id
                if isinstance(notice, wire.Offered) and name in live:
                    prompt, sampling = live[name]
                    out = list(notice.offer.output_ids)
                    decode.submit(name, prompt, sampling, wire.Leg.DECODE, out, notice.offer)
                elif isinstance(notice, wire.FetchFailed):
                    raise AssertionError(notice)
                elif isinstance(notice, wire.End) and name in live:
                    assert notice.reason == "length", notice
                    done.add(name)
                    prompt, sampling = live.pop(name)
                    answer = prefill.tokens[name] + decode.tokens.get(name, [])
                    assert answer == expected_tokens(prompt, sampling, sampling.max_tokens)
            seen[id(host)] = len(host.notices)
        if num_submitted == 300 and not live:
            break
        if not progressed:
            decode.woken.wait(0.001)
    assert len(done) + len(aborted) == 300
    assert len(aborted) > 20
    for host in (prefill, decode):
        host.settle()
        host.close()
