"""The failure contract, cell by cell: docs/failures.md names these tests.

A request is brought into a state and held there, one process is killed with -9, the hold ends. The
answer must be the one of an undisturbed run; afterwards every worker is idle and its invariants
hold (`settle`, after each test). Long because the contract is one table, on servers that are
started once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import time
from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from splitserve import wire
from splitserve.cluster import supervisor
from splitserve.config import Deadlines, GatewayConfig, ServeConfig, SplitMode
from splitserve.errors import Cancelled, DeadlineExceeded, NoWorker, WorkerLost
from splitserve.moments import Moment
from splitserve.router import router
from tests.cluster.conftest import MakeLab
from tests.support.cluster import (
    Flight,
    HttpStream,
    Lab,
    parent_pid,
    simulated_config,
    thread_states,
    until,
)

pytestmark = pytest.mark.processes

P, D, M = "prefill-0", "decode-0", "mixed-0"


@pytest.fixture(scope="module")
def one_lab(make_lab: MakeLab) -> Lab:
    """1P1D that always splits: what is lost is computed again after the restart."""
    return make_lab(simulated_config(1, 1, gateway=GatewayConfig(split=SplitMode.ALWAYS)))


@pytest.fixture(scope="module")
def two_lab(make_lab: MakeLab) -> Lab:
    """2P2D: what is lost is computed again on another worker."""
    return make_lab(simulated_config(2, 2))


@pytest.fixture(scope="module")
def mixed_lab(make_lab: MakeLab) -> Lab:
    return make_lab(simulated_config(num_mixed=2))


@pytest.fixture
def one(one_lab: Lab, loop: asyncio.Runner) -> Iterator[Lab]:
    yield one_lab
    loop.run(one_lab.settle())


@pytest.fixture
def two(two_lab: Lab, loop: asyncio.Runner) -> Iterator[Lab]:
    yield two_lab
    loop.run(two_lab.settle())


@pytest.fixture(params=["one", "two"])
def lab(request: pytest.FixtureRequest) -> Lab:
    """Both, in turn: P and D are the workers picked first."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def mixed(mixed_lab: Lab, loop: asyncio.Runner) -> Iterator[Lab]:
    yield mixed_lab
    loop.run(mixed_lab.settle())


# --- the states


@contextlib.asynccontextmanager
async def queued(lab: Lab, worker_id: str = P) -> AsyncIterator[Flight]:
    """Sent to a worker that has not read it."""
    await lab.freeze(worker_id)
    flight = await lab.begin()
    await until(lambda: lab.hub.workers[worker_id].legs, "queued")
    yield flight
    lab.resume_all()


@contextlib.asynccontextmanager
async def prefilling(lab: Lab, worker_id: str = P) -> AsyncIterator[Flight]:
    """One of four steps of the prompt is computed."""
    with lab.hold("step", worker_id):
        flight = await lab.begin()
        await until(lambda: flight.has(Moment.PREFILL_STARTED), "prefilling")
        assert not flight.output_ids
        yield flight


@contextlib.asynccontextmanager
async def sealing(lab: Lab) -> AsyncIterator[Flight]:
    """The client has the first token, the offer is not made yet."""
    with lab.hold("seal", P):
        flight = await lab.begin()
        await until(lambda: flight.output_ids, "first token")
        assert not flight.has(Moment.DECODE_QUEUED)
        yield flight


@contextlib.asynccontextmanager
async def offered(lab: Lab) -> AsyncIterator[Flight]:
    """The decode worker has the offer in its queue, and the source's pool mapped."""
    await lab.warm_up()
    async with offer_unread(lab) as flight:
        yield flight


@contextlib.asynccontextmanager
async def offered_unmapped(lab: Lab) -> AsyncIterator[Flight]:
    """The same before the two workers have shaken hands."""
    with lab.without(wire.Meet):
        await lab.restarted(D)
    async with offer_unread(lab) as flight:
        yield flight


@contextlib.asynccontextmanager
async def offer_unread(lab: Lab) -> AsyncIterator[Flight]:
    await lab.freeze(D)
    flight = await lab.begin()
    await until(lambda: flight.has(Moment.DECODE_QUEUED), "offered")
    assert not flight.has(Moment.TRANSFER_STARTED)
    yield flight
    lab.resume_all()


@contextlib.asynccontextmanager
async def connecting(lab: Lab) -> AsyncIterator[Flight]:
    """Transferring, before the decode worker has mapped the source's pool."""
    with lab.without(wire.Meet):
        await lab.restarted(D)
    with lab.hold("fetch.begin", D):
        flight = await lab.begin()
        await until(lambda: flight.has(Moment.TRANSFER_STARTED), "transferring")
        yield flight


@contextlib.asynccontextmanager
async def copying(lab: Lab) -> AsyncIterator[Flight]:
    """Transferring, when the source's pool is mapped."""
    await lab.warm_up()
    with lab.hold("fetch.block", D):
        flight = await lab.begin()
        await until(lambda: flight.has(Moment.TRANSFER_STARTED), "transferring")
        yield flight


@contextlib.asynccontextmanager
async def decoding(lab: Lab) -> AsyncIterator[Flight]:
    """The decode worker has given its first token."""
    with lab.hold("step", D):
        flight = await lab.begin()
        await until(lambda: len(flight.output_ids) == 2, "decoding")
        yield flight


STATES = {
    "queued": queued,
    "prefilling": prefilling,
    "sealing": sealing,
    "offered": offered,
    "offered_unmapped": offered_unmapped,
    "connecting": connecting,
    "copying": copying,
    "decoding": decoding,
}


# --- split: who died x when


@pytest.mark.parametrize(
    ("state", "retries", "prefills"),
    [
        ("queued", 1, 2),
        ("prefilling", 1, 2),
        ("sealing", 1, 2),
        ("offered", 0, 1),  # mapped memory and digests outlive the source
        ("offered_unmapped", 1, 2),
        ("connecting", 1, 2),
        ("copying", 0, 1),
        ("decoding", 0, 1),
    ],
)
async def test_prefill_worker_dies(lab: Lab, state: str, retries: int, prefills: int) -> None:
    async with STATES[state](lab) as flight:
        with lab.without(wire.Meet):  # who meets the successor drops the dead one's pool
            await lab.kill(P)
            await lab.all_up()
    await flight.arrive()
    assert flight.journey.num_retries == retries
    assert flight.num(Moment.PREFILL_QUEUED) == prefills


@pytest.mark.parametrize(
    ("state", "retries", "prefills"),
    [
        ("queued", 0, 1),
        ("prefilling", 0, 1),
        ("sealing", 0, 1),
        ("offered_unmapped", 1, 1),
        ("offered", 1, 1),  # the offer holds: fetched by another, or after the restart
        ("connecting", 1, 1),
        ("copying", 1, 1),
        ("decoding", 1, 2),
    ],
)
async def test_decode_worker_dies(lab: Lab, state: str, retries: int, prefills: int) -> None:
    async with STATES[state](lab) as flight:
        await lab.kill(D)
    await flight.arrive()
    assert flight.journey.num_retries == retries
    assert flight.num(Moment.PREFILL_QUEUED) == prefills


@pytest.mark.parametrize(
    ("state", "retries"),
    [
        ("queued", 1),
        ("prefilling", 1),
        ("sealing", 1),
        ("offered", 2),  # the offer is tried once more, its source is gone
        ("connecting", 2),
        ("copying", 2),
        ("decoding", 1),
    ],
)
async def test_zygote_dies(one: Lab, state: str, retries: int) -> None:
    async with STATES[state](one) as flight:
        await one.kill("zygote")
    await flight.arrive()
    assert flight.journey.num_retries == retries


# --- whole legs on mixed workers


@contextlib.asynccontextmanager
async def whole_decoding(lab: Lab) -> AsyncIterator[Flight]:
    with lab.hold("step", M):
        flight = await lab.begin(lab.prompt(20))
        await until(lambda: flight.output_ids, "first token")
        yield flight


@pytest.mark.parametrize("state", ["queued", "prefilling", "decoding"])
async def test_mixed_worker_dies(mixed: Lab, state: str) -> None:
    states = {
        "queued": lambda: queued(mixed, M),
        "prefilling": lambda: prefilling(mixed, M),
        "decoding": lambda: whole_decoding(mixed),
    }
    async with states[state]() as flight:
        await mixed.kill(M)
    await flight.arrive()
    assert flight.journey.num_retries == 1
    assert flight.journey.timeline.workers(Moment.PICKED) == [M, "mixed-1"]


# --- the same with a model that computes


@pytest.fixture(scope="module")
def native_lab(make_lab: MakeLab) -> Lab:
    """1P1D of the tiny model in exact mode: a difference in the last bit would show."""
    gateway = GatewayConfig(split=SplitMode.ALWAYS)
    config = simulated_config(1, 1, gateway=gateway, exact=True)
    return make_lab(msgspec.structs.replace(config, runner="native", kv_memory_bytes=256 * 8192))


@pytest.fixture
def native(native_lab: Lab, loop: asyncio.Runner) -> Iterator[Lab]:
    yield native_lab
    loop.run(native_lab.settle())


@pytest.mark.parametrize(
    ("state", "victim", "retries"),
    [
        ("prefilling", P, 1),
        ("sealing", P, 1),
        ("connecting", P, 1),
        ("copying", P, 0),
        ("copying", D, 1),
        ("decoding", D, 1),
    ],
)
async def test_native_worker_dies(native: Lab, state: str, victim: str, retries: int) -> None:
    async with STATES[state](native) as flight:
        await native.kill(victim)
    await flight.land()
    assert flight.journey.num_retries == retries
    undisturbed = await native.repeat(flight)
    await flight.arrive(undisturbed.output_ids)


# --- what the client sees


async def test_http_stream_shows_no_trace_of_a_death(one: Lab) -> None:
    prompt_ids = one.prompt()
    undisturbed = HttpStream(one.runtime.port, prompt_ids, max_tokens=24)
    await until(lambda: undisturbed.is_over, "undisturbed answer")
    computed = one.hub.workers[D].num_step_tokens
    with one.hold("step", D):
        stream = HttpStream(one.runtime.port, prompt_ids, max_tokens=24)
        await until(lambda: one.hub.workers[D].num_step_tokens > computed, "decoding")
        await one.kill(D)
    await until(lambda: stream.is_over, "answer")
    assert (stream.status, stream.error, stream.broken) == (200, None, None)
    assert (stream.text, stream.finish_reason) == (undisturbed.text, undisturbed.finish_reason)
    assert stream.text
    metrics = one.service.metrics.render().decode()
    assert re.search(r"^splitserve_retries_total [1-9]", metrics, re.M)
    assert re.search(r'^splitserve_worker_restarts_total{worker="decode-0"} [1-9]', metrics, re.M)


async def test_a_worker_that_can_not_be_reached_costs_one_retry(one: Lab) -> None:
    """Its connection is closed, but the supervisor does not know yet that it is dead."""
    zygote = parent_pid(one.pid(D))
    os.kill(zygote, signal.SIGSTOP)
    try:
        os.kill(one.pid(D), signal.SIGKILL)
        await until(lambda: set(thread_states(one.pid(D))) == {"Z"}, "a zombie")
        flight = await one.begin()
        await until(lambda: flight.num(Moment.PICKED) == 2, "retried")
        assert D not in one.hub.workers
    finally:
        os.kill(zygote, signal.SIGCONT)
    await flight.arrive()
    assert flight.journey.num_retries == 1


async def test_a_worker_that_always_dies_ends_in_worker_lost(one: Lab) -> None:
    with one.hold("step", P):
        flight = await one.begin()
        for attempt in range(1 + one.runtime.config.gateway.retries):
            await until(lambda n=attempt: flight.num(Moment.PREFILL_STARTED) > n, "prefilling")
            await one.kill(P)
    await flight.land()
    assert isinstance(flight.journey.error, WorkerLost)
    assert flight.journey.error.status == 502
    assert "killed by SIGKILL" in flight.journey.error.message


# --- a worker that stands still instead of dying


@pytest.fixture(scope="module")
def hasty_lab(make_lab: MakeLab) -> Lab:
    """2P2D with short deadlines."""
    deadlines = Deadlines(token_gap_s=1.0, prefill_queue_s=1.0, transfer_s=1.0)
    return make_lab(simulated_config(2, 2, deadlines=deadlines))


@pytest.fixture
def hasty(hasty_lab: Lab, loop: asyncio.Runner) -> Iterator[Lab]:
    yield hasty_lab
    loop.run(hasty_lab.settle())


@pytest.mark.parametrize(
    ("state", "prefills"), [("offered", 1), ("connecting", 1), ("copying", 1), ("decoding", 2)]
)
async def test_decode_worker_stands_still(hasty: Lab, state: str, prefills: int) -> None:
    async with STATES[state](hasty) as flight:
        await hasty.freeze(D)
        await flight.arrive()
    assert flight.journey.num_retries == 1
    assert flight.journey.timeline.workers(Moment.DECODE_QUEUED) == [D, "decode-1"]
    assert flight.num(Moment.PREFILL_QUEUED) == prefills


async def test_new_requests_avoid_a_worker_that_stands_still(
    hasty: Lab, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(router, "SILENT_S", 0.6)
    await hasty.freeze(D)
    frozen = hasty.hub.workers[D]
    await until(lambda: time.monotonic() - frozen.last_frame_s > 0.6, "silence")
    flight = await hasty.begin()
    await flight.arrive()
    assert flight.journey.num_retries == 0
    assert flight.journey.timeline.workers(Moment.DECODE_QUEUED) == ["decode-1"]


@pytest.fixture(scope="module")
def short_lab(make_lab: MakeLab) -> Lab:
    """1P1D with short deadlines."""
    deadlines = Deadlines(first_token_s=3.0, token_gap_s=0.6)
    return make_lab(simulated_config(1, 1, deadlines=deadlines))


async def test_the_only_decode_worker_stands_still(
    short_lab: Lab,
) -> None:
    """It is tried again until the retries are spent."""
    lab = short_lab
    async with decoding(lab) as flight:
        await lab.freeze(D)
        await flight.land()
    assert isinstance(flight.journey.error, WorkerLost)
    assert "silent" in flight.journey.error.message
    await lab.settle()


async def test_nobody_comes_back(short_lab: Lab, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last test on this lab: it leaves no worker."""
    lab = short_lab
    monkeypatch.setattr(supervisor, "STABLE_S", 60.0)
    monkeypatch.setattr(supervisor, "BACKOFF_FIRST_S", 60.0)
    monkeypatch.setattr(supervisor, "BACKOFF_MAX_S", 60.0)
    # without a prefill worker, split=auto computes on the decode worker what is lost
    async with prefilling(lab) as flight:
        await lab.kill(P)
    await flight.arrive()
    assert flight.journey.timeline.workers(Moment.PICKED) == [P, D]
    assert "local: no prefill worker" in flight.journey.timeline.notes
    # without any worker, a request in flight and a new one end within their deadlines
    with lab.hold("step", D):
        flight = await lab.begin(lab.prompt(20))
        await until(lambda: flight.output_ids, "first token")
        await lab.kill(D)
    stream = HttpStream(lab.runtime.port, lab.prompt(), max_tokens=4)
    await flight.land()
    assert isinstance(flight.journey.error, NoWorker)
    assert len(flight.output_ids) == 1
    await until(lambda: stream.is_over, "error")
    assert stream.status == 503
    assert stream.error is not None
    assert stream.error["code"] == "no_worker"
    assert not lab.service.is_ready


async def test_prefill_worker_stands_still(hasty: Lab) -> None:
    async with queued(hasty) as flight:
        await flight.land()
    assert isinstance(flight.journey.error, DeadlineExceeded)
    assert "prefill queue" in flight.journey.error.message


# --- leases


def leasing_config(digests: str) -> ServeConfig:
    """1P1D; a pool of 24 blocks, of which a prompt takes 7; leases of 0.3 s."""
    gateway = GatewayConfig(split=SplitMode.ALWAYS)
    return simulated_config(1, 1, num_blocks=24, gateway=gateway, lease_term_s=0.3, digests=digests)


@pytest.fixture(scope="module")
def digest_lab(make_lab: MakeLab) -> Lab:
    return make_lab(leasing_config("full"))


@pytest.fixture(scope="module")
def word_lab(make_lab: MakeLab) -> Lab:
    """Without digests: the source's word is the only proof."""
    return make_lab(leasing_config("lease"))


@pytest.fixture
def digest(digest_lab: Lab, loop: asyncio.Runner) -> Iterator[Lab]:
    yield digest_lab
    loop.run(digest_lab.settle())


@pytest.fixture
def word(word_lab: Lab, loop: asyncio.Runner) -> Iterator[Lab]:
    yield word_lab
    loop.run(word_lab.settle())


async def test_renewals_keep_the_lease_of_a_slow_reader(digest: Lab) -> None:
    async with offered(digest) as flight:
        prefill = digest.hub.workers[P]
        seen = prefill.num_frames
        await until(lambda: prefill.num_frames >= seen + 6, "1.5 s, five terms")
        assert prefill.view.leased_blocks == 7
    await flight.arrive()
    assert flight.journey.num_retries == 0


async def test_an_expired_lease_gives_its_blocks_back(digest: Lab) -> None:
    with digest.without(wire.Renew):
        async with offered(digest) as flight:
            await until(lambda: digest.hub.workers[P].view.leased_blocks == 0, "expired")
            await digest.idle(P)
            for _ in range(4):  # overwrite what was offered
                await (await digest.begin(max_tokens=1)).arrive()
    await flight.arrive()
    assert flight.journey.num_retries == 1
    assert any("wrong digest" in note for note in flight.journey.timeline.notes)


async def test_digests_prove_what_an_expired_lease_left(digest: Lab) -> None:
    with digest.without(wire.Renew):
        async with offered(digest) as flight:
            await until(lambda: digest.hub.workers[P].view.leased_blocks == 0, "expired")
    await flight.arrive()
    assert flight.journey.num_retries == 0
    assert flight.journey.timeline.transfer_proof == "digest"


async def test_a_lease_that_expires_before_its_offer(digest: Lab) -> None:
    with digest.hold("seal", P):
        flight = await digest.begin()
        await until(lambda: digest.hub.workers[P].view.leased_blocks == 7, "leased")
        await until(lambda: digest.hub.workers[P].view.leased_blocks == 0, "expired")
    await flight.arrive()
    assert flight.journey.num_retries == 1


async def test_without_digests_an_expired_lease_proves_nothing(word: Lab) -> None:
    with word.without(wire.Renew), word.hold("fetch.verify", D):
        flight = await word.begin()
        await until(lambda: flight.has(Moment.TRANSFER_STARTED), "transferring")
        await until(lambda: word.hub.workers[P].view.leased_blocks == 0, "expired")
    await flight.arrive()
    assert flight.journey.num_retries == 1
    assert flight.journey.timeline.transfer_proof == "lease"


async def test_without_digests_a_dead_source_proves_nothing(word: Lab) -> None:
    await word.warm_up()
    with word.hold("fetch.verify", D):
        flight = await word.begin()
        await until(lambda: flight.has(Moment.TRANSFER_STARTED), "transferring")
        await word.kill(P)
    await flight.arrive()
    assert flight.journey.num_retries == 1


# --- the client goes away


@pytest.mark.parametrize("state", STATES)
async def test_client_goes_away(one: Lab, state: str) -> None:
    async with STATES[state](one) as flight:
        flight.task.cancel()
        await flight.land()
        assert isinstance(flight.journey.error, Cancelled)
        if state in ("sealing", "connecting", "copying"):  # the engine loops are not held
            await one.idle()
    await one.idle()
    for worker_id in one.worker_ids:
        view = one.hub.workers[worker_id].view
        assert view.quarantined_blocks == view.leased_blocks == 0
        assert view.free_blocks == view.total_blocks


async def test_client_is_gone_before_the_journey_begins(one: Lab) -> None:
    flight = await one.begin()
    flight.task.cancel()
    await flight.land()
    await flight.journey.wait_beyond(0)
    assert isinstance(flight.journey.error, Cancelled)
    assert not flight.has(Moment.PICKED)


async def test_a_timeline_never_mixes_attempts(two: Lab) -> None:
    """Prefill started in the first attempt, the second one did not get so far."""
    await two.freeze("prefill-1")
    async with prefilling(two) as flight:
        await two.kill(P)
        await until(lambda: two.hub.workers["prefill-1"].legs, "queued on the other")
        flight.task.cancel()
        await flight.land()
    assert "queue" not in flight.journey.timeline.spans()


async def test_nothing_is_computed_for_a_client_that_is_gone(one: Lab) -> None:
    flight = await one.begin(max_tokens=3000)
    await until(lambda: len(flight.output_ids) > 5, "decoding")
    flight.task.cancel()
    await flight.land()
    await one.idle()
    assert one.hub.workers[D].num_step_tokens < 1500
