"""Engines in this process: real scheduler, pool, connector and transport; the model is simulated
unless a runner is given."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from splitserve import wire
from splitserve.clock import Clock, MonotonicClock
from splitserve.connector.landing import LandingZone
from splitserve.connector.offers import P2PConfig
from splitserve.connector.p2p import make_p2p
from splitserve.connector.push import Zone
from splitserve.engine.engine import Engine
from splitserve.engine.scheduler import Scheduler, SchedulerConfig
from splitserve.engine.step import Draw, Runner
from splitserve.faults import Faults
from splitserve.kv.format import KVFormat
from splitserve.kv.lease import LeaseTable
from splitserve.kv.pool import BlockPool
from splitserve.model.simulated import (
    SimulatedRunner,
    next_token,
    prefix_hashes,
    simulated_format,
)
from splitserve.sampling import Sampling
from splitserve.store.chain import KVStore
from splitserve.transport.registry import make_transport
from splitserve.transport.segment import Segment

Blocks = npt.NDArray[np.uint8]

VOCAB = 512
IDENTITY = b"simulated"


def expected_tokens(prompt_ids: list[int], sampling: Sampling, num: int) -> list[int]:
    """The answer that a simulated model gives, computed without any engine."""
    tokens = list(prompt_ids)
    for _ in range(num):
        draw = Draw(sampling, prompt_ids, tokens[len(prompt_ids) :])
        token_id = next_token(int(prefix_hashes(tokens)[-1]), draw, VOCAB)
        tokens.append(token_id)
        if token_id in sampling.stop_ids:
            break
    return tokens[len(prompt_ids) :]


class EngineHost:
    """One engine with its own pool, as a worker process has it."""

    def __init__(
        self,
        num_blocks: int = 64,
        config: SchedulerConfig | None = None,
        *,
        clock: Clock | None = None,
        block_size: int = 16,
        digests: str = "full",
        faults: str = "",
        term_s: float = 30.0,
        identity: bytes = IDENTITY,
        epoch: str = "",
        worker_id: str = "w",
        kv_format: KVFormat | None = None,
        make_runner: Callable[[Blocks], Runner] | None = None,
        transport: str = "shm",
        host: str = "",
        zone_blocks: int = 0,
        store: KVStore | None = None,
        by_store: bool = False,
    ) -> None:
        clock = clock or MonotonicClock()
        kv_format = kv_format or simulated_format(block_size)
        self.woken = threading.Event()
        self.is_closed = False
        self.segment = Segment.create(num_blocks, kv_format.block_bytes)
        blocks = self.segment.blocks
        if make_runner is None:
            runner: Runner = SimulatedRunner(blocks, block_size, VOCAB)
        else:
            runner = make_runner(blocks)
        self.leases = LeaseTable(epoch or secrets.token_hex(4), term_s)
        self.config = P2PConfig(
            worker_id,
            epoch or secrets.token_hex(6),
            identity,
            kv_format,
            digests,
            host,
            b"token",
            by_store,
        )
        self.connector = make_p2p(
            self.config,
            make_transport(transport, self.segment),
            self.segment,
            self.leases,
            clock,
            self.woken.set,
            Faults(faults),
            getattr(runner, "device_pool", None),
            self._make_zone(transport, zone_blocks, kv_format) if zone_blocks else None,
            store,
        )
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(config or SchedulerConfig(), self.pool, self.leases)
        self.engine = Engine(self.scheduler, runner, self.connector, clock, identity)
        self.engine.loader.always = True  # what it costs here says nothing
        self.tokens: dict[str, list[int]] = {}
        self.notices: list[wire.Notice] = []

    def _make_zone(self, transport: str, num_blocks: int, kv_format: KVFormat) -> Zone:
        self.zone_segment = Segment.create(num_blocks, kv_format.block_bytes)
        self.landings = LandingZone(self.config.epoch, num_blocks)
        return Zone(self.zone_segment, make_transport(transport, self.zone_segment), self.landings)

    def submit(
        self,
        request_id: str,
        prompt_ids: list[int],
        sampling: Sampling,
        leg: wire.Leg = wire.Leg.WHOLE,
        output_ids: list[int] | None = None,
        offer: wire.Offer | None = None,
        salt: str = "",
        grain: wire.Grain = wire.Grain.REQUEST,
        push: bool = False,
        hints: list[wire.Hint] | None = None,
    ) -> None:
        output_ids = list(output_ids or [])
        self.engine.submit(
            wire.Submit(
                request_id,
                leg,
                prompt_ids,
                output_ids,
                sampling,
                salt,
                offer,
                grain=grain,
                push=push,
                hints=hints or [],
            )
        )

    def turn(self) -> bool:
        """One turn of the engine loop; what it tells is kept in `tokens` and `notices`."""
        self.engine.pump()
        progressed = self.engine.step()
        outbox = self.engine.take_outbox()
        for token in outbox.tokens:
            self.tokens.setdefault(token.request_id, []).append(token.token_id)
        self.notices += outbox.notices
        return progressed

    def run_until(self, *kinds: type, num: int = 1, limit: int = 2_000) -> list[wire.Notice]:
        """Turn until `num` notices of the kinds are there; returns them."""
        for _ in range(limit):
            found = [notice for notice in self.notices if isinstance(notice, kinds)]
            if len(found) >= num:
                return found
            if not self.turn():
                self.woken.wait(0.05)
                self.woken.clear()
        raise AssertionError(f"no {kinds} within {limit} turns: {self.notices}")

    def settle(self) -> None:
        """Turn until idle, then check every invariant."""
        for _ in range(2000):
            self.turn()
            if self.engine.is_idle:
                break
            self.woken.wait(0.01)
            self.woken.clear()
        self.engine.check()
        assert self.engine.is_idle

    def close(self) -> None:
        """Like the end of a worker process; may be called again."""
        if not self.is_closed:
            self.is_closed = True
            self.connector.worker.close()
