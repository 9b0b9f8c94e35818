"""500 random requests over small pools, a third cancelled anywhere: nothing is left over."""

from __future__ import annotations

import asyncio
import gc
import os
import random
from pathlib import Path

import msgspec
import pytest

from splitserve.config import GatewayConfig, ServeConfig, SplitMode
from splitserve.errors import Cancelled
from splitserve.gateway.journey import Generation
from splitserve.gateway.service import GatewayService
from splitserve.moments import Moment
from splitserve.sampling import Sampling
from tests.support.cluster import (
    Flight,
    Lab,
    num_descriptors,
    open_lab,
    resident_bytes,
    simulated_config,
    within,
)
from tests.support.engines import expected_tokens

pytestmark = pytest.mark.processes

NUM_REQUESTS = 500
NUM_AT_ONCE = 12
NUM_BLOCKS = 40  # of 16 tokens, per worker: twelve requests need more than twice as many


def make_generation(chooser: random.Random, number: int) -> Generation:
    """One of four beginnings, cut anywhere, and an end of its own."""
    common = [3 + chooser.randint(0, 3)] * chooser.choice([0, 16, 48, 96, 160])
    prompt = common + [chooser.randint(3, 500) for _ in range(chooser.randint(1, 60))]
    sampling = Sampling(
        seed=number,
        max_tokens=chooser.choice([1, 2, 5, 5, 8, 8, 60, 120]),
        temperature=chooser.choice([0.0, 1.0]),
        stop_ids=tuple(chooser.randint(3, 500) for _ in range(chooser.choice([0, 3]))),
    )
    return Generation(f"random-{number}", prompt, sampling)


async def fly(lab: Lab, generation: Generation, chooser: random.Random, cancel: bool) -> Flight:
    """Start a request, and cancel it: at once, some turns of the loop later, or after a token."""
    flight = Flight(*await lab.service.start(generation))
    if cancel:
        match chooser.choice(["turns", "tokens"]):
            case "turns":
                for _ in range(chooser.choice([0, 1, 10, 100])):
                    await asyncio.sleep(0)
            case "tokens":
                await flight.journey.wait_beyond(chooser.randint(0, 4))
        flight.task.cancel()
    await flight.land(60)
    return flight


async def fly_all(lab: Lab, num: int, first: int, seed: int) -> list[Flight]:
    chooser = random.Random(seed)
    free = asyncio.Semaphore(NUM_AT_ONCE)

    async def one(generation: Generation, cancel: bool) -> Flight:
        async with free:
            return await fly(lab, generation, chooser, cancel)

    plans = [(make_generation(chooser, first + i), chooser.random() < 0.4) for i in range(num)]
    return await asyncio.gather(*[one(*plan) for plan in plans])


async def references(lab: Lab, generations: list[Generation]) -> list[list[int]]:
    """The answers of the simulated model, or of the mixed worker, unsplit and undisturbed."""
    if lab.runtime.config.runner == "simulated":
        return [
            expected_tokens(x.prompt_ids, x.sampling, x.sampling.max_tokens) for x in generations
        ]
    config = GatewayConfig(split=SplitMode.NEVER)
    whole = GatewayService(lab.hub, config, lab.service.clock, lab.service.metrics)
    free = asyncio.Semaphore(4)

    async def one(generation: Generation) -> list[int]:
        async with free:
            flight = Flight(*await whole.start(generation))
            await flight.land()
        assert flight.journey.error is None
        assert flight.journey.timeline.workers(Moment.PICKED) == ["mixed-0"]
        return flight.output_ids

    return await asyncio.gather(*[one(generation) for generation in generations])


def native_config() -> ServeConfig:
    """The tiny model in exact mode. The mixed worker computes nothing but references."""
    block_bytes = 8192
    config = simulated_config(1, 1, 1, policy="cost")
    return msgspec.structs.replace(
        config, runner="native", exact=True, kv_memory_bytes=NUM_BLOCKS * block_bytes
    )


@pytest.mark.parametrize("runner", ["simulated", "native"])
async def test_random_cancels_leave_nothing(runner: str, tiny: Path, tmp_path: Path) -> None:
    config = native_config()
    if runner == "simulated":
        config = simulated_config(1, 1, num_blocks=NUM_BLOCKS, policy="cost")
    always = msgspec.structs.replace(config.gateway, split=SplitMode.ALWAYS)
    config = msgspec.structs.replace(config, gateway=always)
    async with open_lab(tiny, tmp_path, config) as lab:
        assert lab.runtime.num_blocks == NUM_BLOCKS
        await fly_all(lab, 100, first=0, seed=1)  # until what is made once is made
        await lab.settle()
        gc.collect()  # what earlier tests of this process left is closed now, not in between
        pids = [os.getpid(), *lab.runtime.supervisor.pids().values()]
        descriptors = [num_descriptors(pid) for pid in pids]
        resident = [resident_bytes(pid) for pid in pids]

        flights = await within(fly_all(lab, NUM_REQUESTS, first=100, seed=2), 100)
        await lab.settle()

        assert [num_descriptors(pid) for pid in pids] == descriptors
        assert lab.runtime.supervisor.num_restarts() == dict.fromkeys(lab.worker_ids, 0)
        for pid, before in zip(pids, resident, strict=True):
            assert resident_bytes(pid) - before < 8 << 20
        for worker_id in ("prefill-0", "decode-0"):
            view = lab.hub.workers[worker_id].view
            assert view.quarantined_blocks == view.leased_blocks == 0
            assert view.free_blocks == view.total_blocks
        assert lab.hub.workers["decode-0"].view.preemptions > 0

        finished = [flight for flight in flights if flight.journey.error is None]
        cancelled = [x for x in flights if isinstance(x.journey.error, Cancelled)]
        assert len(finished) + len(cancelled) == NUM_REQUESTS
        assert len(finished) > NUM_REQUESTS / 2
        assert len(cancelled) > NUM_REQUESTS / 5
        expected = await references(lab, [flight.journey.request for flight in finished])
        for flight, answer in zip(finished, expected, strict=True):
            assert flight.output_ids == answer
