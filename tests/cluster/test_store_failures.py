"""KV from elsewhere through whole servers: a store, or another worker, and anybody may die.

A prompt of 300 tokens takes ten steps of 32, 10 ms each: to load it is far faster.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve.config import ConnectorKind, GatewayConfig, Handoff, SplitMode
from splitserve.moments import Moment
from splitserve.store.registry import parse_tier
from tests.cluster.conftest import MakeLab
from tests.store.places import Place
from tests.support.cluster import Flight, Lab, simulated_config, until

pytestmark = pytest.mark.processes

P, D = "prefill-0", "decode-0"
NUM_TOKENS = 300
NUM_FULL = 18
BLOCK_BYTES = 16 * 8


def make(
    make_lab: MakeLab, *tiers: str, kind: ConnectorKind = ConnectorKind.STORE, way: str = "auto"
) -> Lab:
    gateway = GatewayConfig(split=SplitMode.ALWAYS, handoff=Handoff(way))
    return make_lab(
        simulated_config(
            1,
            1,
            gateway=gateway,
            connector=kind,
            tiers=tuple(parse_tier(tier) for tier in tiers),
            simulated_step_s=0.01,
        )
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module", params=["request-pull", "chunk-pull"])
def one_lab(make_lab: MakeLab, kept: Path, request: pytest.FixtureRequest) -> Lab:
    """Handoffs through files; nothing else connects the two workers."""
    return make(make_lab, f"disk:{kept / request.param}", way=request.param)


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Place]:
    place = Place("redis", tmp_path_factory.mktemp("redis"))
    place.start()
    yield place
    place.close()


@pytest.fixture(scope="module")
def redis_lab(make_lab: MakeLab, redis: Place) -> Lab:
    tier = f"redis:{redis.root}/redis.sock?timeout=0.3"
    return make(make_lab, tier, kind=ConnectorKind.MULTI, way="request-pull")


@pytest.fixture(scope="module")
def memory_lab(make_lab: MakeLab) -> Lab:
    return make(make_lab, "memory:?limit=16M", way="request-pull")


@pytest.fixture(scope="module")
def hint_lab(make_lab: MakeLab) -> Lab:
    return make(make_lab, kind=ConnectorKind.P2P, way="request-pull")


@pytest.fixture
def lab(one_lab: Lab, loop: asyncio.Runner) -> Iterator[Lab]:
    yield one_lab
    loop.run(one_lab.settle())


@pytest.fixture
def kept_in_redis(redis_lab: Lab, loop: asyncio.Runner) -> Iterator[Lab]:
    yield redis_lab
    loop.run(redis_lab.settle())


@pytest.fixture
def kept_in_memory(memory_lab: Lab, loop: asyncio.Runner) -> Iterator[Lab]:
    yield memory_lab
    loop.run(memory_lab.settle())


@pytest.fixture
def hinted(hint_lab: Lab, loop: asyncio.Runner) -> Iterator[Lab]:
    yield hint_lab
    loop.run(hint_lab.settle())


def computed_by(flight: Flight) -> list[str]:
    return [note for note in flight.journey.timeline.notes if "computes" in note]


async def begin_again(lab: Lab, flight: Flight) -> Flight:
    """The same prompt, another answer."""
    return await lab.begin(flight.journey.request.prompt_ids)


async def loaded(lab: Lab, flight: Flight) -> str:
    """Where the same prompt's KV comes from now; its answer is right."""
    again = await begin_again(lab, flight)
    await again.arrive()
    timeline = again.journey.timeline
    assert timeline.cached_tokens == (timeline.loaded_tokens or timeline.cached_tokens)
    return timeline.loaded_from


# --- through files


async def test_blocks_go_by_the_store_and_the_tail_is_computed(lab: Lab) -> None:
    flight = await lab.begin(lab.prompt(NUM_TOKENS))
    await flight.arrive()
    timeline = flight.journey.timeline
    assert timeline.transfer_bytes == NUM_FULL * BLOCK_BYTES
    assert timeline.transfer_proof == "digest"
    assert len(computed_by(flight)) == 1
    assert f"{NUM_TOKENS % 16} tokens" in computed_by(flight)[0]
    assert flight.journey.num_retries == 0


@pytest.mark.parametrize("point", ["step", "save"])
async def test_prefill_dies_before_all_is_saved(lab: Lab, point: str) -> None:
    """Prefilled again, but for what was saved."""
    with lab.hold(point, P):
        flight = await lab.begin(lab.prompt(NUM_TOKENS))
        await until(lambda: flight.has(Moment.PREFILL_STARTED), "started")
        await lab.kill(P)
    await flight.arrive()
    assert flight.journey.num_retries == 1


async def test_prefill_dies_after_the_offer(lab: Lab) -> None:
    """Nobody needs it any more: no retry, nothing is computed again."""
    with lab.hold("fetch.begin", D):
        flight = await lab.begin(lab.prompt(NUM_TOKENS))
        await until(lambda: flight.has(Moment.TRANSFER_STARTED), "offered")
        await until(lambda: flight.output_ids, "first token")
        await until(lambda: not lab.hub.workers[P].legs, "its leg is over")
        await lab.kill(P)
    await flight.arrive()
    assert flight.journey.num_retries == 0
    assert flight.journey.timeline.transfer_bytes == NUM_FULL * BLOCK_BYTES


async def test_decode_dies_while_it_loads(lab: Lab) -> None:
    """The offer still holds, whoever reads it; no second prefill."""
    with lab.hold("fetch.begin", D):
        flight = await lab.begin(lab.prompt(NUM_TOKENS))
        await until(lambda: flight.output_ids, "first token")
        await until(lambda: not lab.hub.workers[P].legs, "its leg is over")
        await lab.kill(D)
    await flight.arrive()
    assert flight.journey.num_retries <= 1
    assert flight.num(Moment.PREFILL_STARTED) == 1


async def test_what_was_kept_is_gone_before_it_is_loaded(lab: Lab, kept: Path) -> None:
    with lab.hold("fetch.begin", D):
        flight = await lab.begin(lab.prompt(NUM_TOKENS))
        await until(lambda: flight.output_ids, "first token")
        for place in os.listdir(kept):
            shutil.rmtree(kept / place)
    await flight.arrive()
    assert flight.journey.num_retries == 0
    assert "300 tokens" in computed_by(flight)[0]


async def test_after_all_workers_died_a_prompt_is_not_computed_again(lab: Lab) -> None:
    flight = await lab.begin(lab.prompt(NUM_TOKENS))
    await flight.arrive()
    await lab.idle()
    await lab.kill("zygote")
    await lab.all_up()
    again = await begin_again(lab, flight)
    await again.arrive()
    timeline = again.journey.timeline
    assert (timeline.loaded_from, timeline.cached_tokens) == ("store", NUM_FULL * 16)
    assert again.journey.num_retries == 0


@pytest.mark.parametrize("point", ["find", "fetch.begin", "save"])
async def test_a_client_that_goes_away_frees_both_sides(lab: Lab, point: str) -> None:
    worker = P if point in ("find", "save") else D
    with lab.hold(point, worker):
        flight = await lab.begin(lab.prompt(NUM_TOKENS))
        if point != "find":
            await until(lambda: flight.has(Moment.PREFILL_STARTED), "started")
        flight.task.cancel()
        await flight.land()
    await lab.idle()


async def test_many_at_once(lab: Lab) -> None:
    prompts = [lab.prompt(40 + 37 * i) for i in range(6)]
    flights = [await lab.begin(prompt) for prompt in prompts * 2]
    for flight in flights:
        await flight.arrive()
        assert flight.journey.num_retries == 0, flight.journey.timeline.notes


# --- a server that stops and returns


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
async def test_a_store_server_stops_and_returns(
    kept_in_redis: Lab, redis: Place, how: signal.Signals
) -> None:
    """While it is away answers are right and nothing waits for it for long; then it is used again,
    with what it has."""
    flight = await kept_in_redis.begin(kept_in_redis.prompt(NUM_TOKENS))
    await flight.arrive()
    await kept_in_redis.idle()
    assert redis.process is not None
    os.kill(redis.process.pid, how)
    if how is signal.SIGKILL:
        redis.process.wait()
    for _ in range(3):
        other = await kept_in_redis.begin(kept_in_redis.prompt(NUM_TOKENS))
        await other.arrive()
        assert other.journey.num_retries == 0

    def are_broken() -> bool:
        tiers = [kept_in_redis.hub.workers[name].tiers for name in (P, D)]
        return all(tier and tier[0].is_broken and tier[0].errors for tier in tiers)

    await until(are_broken, "broken")
    if how is signal.SIGKILL:
        redis.start()
    else:
        os.kill(redis.process.pid, signal.SIGCONT)
    for _ in range(100):  # until it is tried again, after its back-off
        other = await kept_in_redis.begin(kept_in_redis.prompt(NUM_TOKENS))
        await other.arrive()
        await kept_in_redis.idle()
        for name in (P, D):
            await kept_in_redis.restarted(name)
        if await loaded(kept_in_redis, other) == "store":
            break
    else:
        raise AssertionError("never used again")
    if how is signal.SIGSTOP:
        await kept_in_redis.restarted(P)
        await kept_in_redis.restarted(D)
        assert await loaded(kept_in_redis, flight) == "store"


async def test_the_memory_server_dies(kept_in_memory: Lab) -> None:
    """Its blocks are lost, no answer is; another is started at the same address, and filled."""
    flight = await kept_in_memory.begin(kept_in_memory.prompt(NUM_TOKENS))
    await flight.arrive()
    await kept_in_memory.idle()
    await kept_in_memory.restarted(P)
    await kept_in_memory.restarted(D)
    assert await loaded(kept_in_memory, flight) == "store"
    ((name, process),) = kept_in_memory.runtime._store_servers.processes.items()
    process.kill()
    other = await kept_in_memory.begin(kept_in_memory.prompt(NUM_TOKENS))
    await other.arrive()
    processes = kept_in_memory.runtime._store_servers.processes
    await until(lambda: processes[name] is not process, "started again")
    for _ in range(100):
        other = await kept_in_memory.begin(kept_in_memory.prompt(NUM_TOKENS))
        await other.arrive()
        await kept_in_memory.idle()
        await kept_in_memory.restarted(P)
        await kept_in_memory.restarted(D)
        if await loaded(kept_in_memory, other) == "store":
            return
    raise AssertionError("never used again")


# --- another worker, by a hint


async def conversation(lab: Lab) -> list[int]:
    """A prompt of which only the decode worker has the end."""
    flight = await lab.begin(lab.prompt(NUM_TOKENS), max_tokens=200)
    await flight.arrive()
    await lab.restarted(P)
    await until(lambda: lab.hub.index.num_keys(D) > 20, "told")
    return [*flight.journey.request.prompt_ids, *flight.output_ids, 5, 6, 7]


async def test_a_conversation_is_fetched_from_the_decode_worker(hinted: Lab) -> None:
    flight = await hinted.begin(await conversation(hinted))
    await flight.arrive()
    timeline = flight.journey.timeline
    assert (timeline.loaded_from, timeline.cached_tokens) == (D, 496)
    assert flight.journey.num_retries == 0
    assert hinted.hub.index.num_keys(P) >= 31  # it has replicated itself


@pytest.mark.parametrize("point", ["find", "fetch.begin"])
async def test_the_holder_dies(hinted: Lab, point: str) -> None:
    """Before it is asked: the prompt is computed, and the hint counted. Before it is read: its
    memory and digests outlive it."""
    turn = await conversation(hinted)
    num_failed = hinted.hub.num_hints_failed
    with hinted.hold(point, P):
        flight = await hinted.begin(turn)
        await until(lambda: any("hint" in x for x in flight.journey.timeline.notes), "hinted")
        if point == "fetch.begin":
            await until(lambda: hinted.hub.workers[P].view.fetching == 1, "found")
        await hinted.kill(D)
    await flight.arrive()
    assert flight.journey.num_retries <= 1
    assert hinted.hub.num_hints_failed == num_failed + (point == "find")


async def test_the_holder_stands_still(hinted: Lab) -> None:
    """It does not answer: the prompt is computed; the next ones do not wait for it."""
    turn = await conversation(hinted)
    with hinted.hold("find", P):
        flight = await hinted.begin(turn)
        await until(lambda: any("hint" in x for x in flight.journey.timeline.notes), "hinted")
        await hinted.freeze(D)
    await until(lambda: flight.output_ids, "first token")
    assert flight.journey.timeline.cached_tokens == 0
    assert flight.journey.timeline.num_hints_failed == 1
    assert f"load from {D} failed: nobody answered in time" in flight.journey.timeline.notes
    assert hinted.hub.index.num_keys(D) > 20  # it has them still
    hinted.resume_all()
    await flight.arrive()


async def test_the_reader_dies_and_the_client_goes(hinted: Lab) -> None:
    for disturb in ("kill", "cancel"):
        turn = await conversation(hinted)
        with hinted.hold("fetch.begin", P):
            flight = await hinted.begin(turn)
            await until(lambda: hinted.hub.workers[P].view.fetching == 1, "found")
            if disturb == "kill":
                await hinted.kill(P)
            else:
                flight.task.cancel()
                await flight.land()
        if disturb == "kill":
            await flight.arrive()
            assert flight.journey.num_retries == 1
        await hinted.idle()
