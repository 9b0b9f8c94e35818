"""Handoffs by parts through whole servers: KV moves while prefill goes on, and anybody may die.

A prompt of 300 tokens takes ten steps of 32, the first nine of which make a part.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from splitserve.config import GatewayConfig, Handoff, SplitMode
from splitserve.moments import Moment
from tests.cluster.conftest import MakeLab
from tests.support.cluster import Flight, Lab, simulated_config, until

pytestmark = pytest.mark.processes

P, D = "prefill-0", "decode-0"
NUM_TOKENS = 300


@pytest.fixture(
    scope="module",
    params=[
        ("chunk-pull", "shm"),
        ("chunk-pull", "tcp"),
        ("chunk-push", "tcp"),
        ("layer-push", "shm"),
    ],
    ids="-".join,
)
def one_lab(make_lab: MakeLab, request: pytest.FixtureRequest) -> Lab:
    way, transport = request.param
    gateway = GatewayConfig(split=SplitMode.ALWAYS, handoff=Handoff(way))
    return make_lab(simulated_config(1, 1, gateway=gateway, transport=transport))


@pytest.fixture
def lab(one_lab: Lab, loop: asyncio.Runner) -> Iterator[Lab]:
    yield one_lab
    loop.run(one_lab.settle())


def steps_of(flight: Flight) -> list[str]:
    return [note for note in flight.journey.timeline.notes if note.startswith("handoff")]


async def test_the_decode_worker_has_its_blocks_before_the_first_token(lab: Lab) -> None:
    with lab.hold("step", P):
        flight = await lab.begin(lab.prompt(NUM_TOKENS))
        await until(lambda: D in flight.journey.timeline.workers(Moment.DECODE_QUEUED), "opened")
        await until(lambda: lab.hub.workers[D].view.fetching == 1, "reserved")
        assert not flight.output_ids
    await flight.arrive()
    timeline = flight.journey.timeline
    assert timeline.transfer_proof == "digest"
    assert timeline.transfer_bytes == 19 * 16 * 8  # each block once
    assert set(timeline.exposed_predicted_s) == {"request", "chunk", "layer"}
    way = lab.runtime.config.gateway.handoff.value
    assert f"({way})" in steps_of(flight)[0]
    assert timeline.first(Moment.DECODE_QUEUED) < timeline.first(Moment.PREFILL_ENDED)  # type: ignore[operator]
    assert flight.journey.num_retries == 0
    assert timeline.hidden_transfer is not None


async def test_short_prompts_go_in_one(lab: Lab) -> None:
    flight = await lab.begin(lab.prompt(20))
    await flight.arrive()
    assert flight.journey.num_retries == 0


@pytest.mark.parametrize("victim", [P, D])
async def test_a_death_while_parts_move_costs_no_answer(lab: Lab, victim: str) -> None:
    with lab.hold("fetch.block", D):
        flight = await lab.begin(lab.prompt(NUM_TOKENS))
        await until(lambda: lab.hub.workers[D].view.fetching == 1, "reserved")
        await lab.kill(victim)
    await flight.arrive()


@pytest.mark.parametrize(("point", "worker"), [("step", P), ("seal", P), ("fetch.block", D)])
async def test_a_client_that_goes_away_meanwhile_frees_both_sides(
    lab: Lab, point: str, worker: str
) -> None:
    with lab.hold(point, worker):
        flight = await lab.begin(lab.prompt(NUM_TOKENS))
        await until(lambda: lab.hub.workers[D].view.fetching == 1, "reserved")
        flight.task.cancel()
        await flight.land()
    await lab.idle()


async def test_many_at_once(lab: Lab) -> None:
    flights = [await lab.begin(lab.prompt(50 + 37 * i)) for i in range(12)]
    for flight in flights:
        await flight.arrive()
        assert flight.journey.num_retries == 0, flight.journey.timeline.notes


async def test_a_frozen_decode_worker_does_not_hold_the_first_token(lab: Lab) -> None:
    await lab.freeze(D)
    flight = await lab.begin(lab.prompt(NUM_TOKENS))
    await until(lambda: flight.output_ids, "first token")
    lab.resume_all()
    await flight.arrive()
