"""The gateway's door: who may come in, who is inside, and what became of the last ones."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import Protocol, TypeVar

from splitserve.clock import Clock
from splitserve.config import GatewayConfig
from splitserve.errors import Draining, Overloaded, SplitserveError
from splitserve.gateway.hub import WorkerHub
from splitserve.gateway.journey import Generation, Journey
from splitserve.gateway.metrics import Metrics
from splitserve.latency.model import StepModelState
from splitserve.moments import Moment, Timeline
from splitserve.wire import Role

TIMELINES_KEPT = 1000


class Passage(Protocol):
    """A journey as the door sees it: gateway.journey.Journey, or one over adopted servers."""

    timeline: Timeline
    error: SplitserveError | None
    end_reason: str | None
    num_retries: int

    @property
    def request_id(self) -> str: ...

    @property
    def num_prompt_tokens(self) -> int: ...

    async def run(self) -> None: ...

    def finish(self) -> None: ...


P = TypeVar("P", bound=Passage)


class Door:
    """Admits, starts, accounts for and drains journeys."""

    def __init__(self, config: GatewayConfig, clock: Clock, metrics: Metrics) -> None:
        self.config = config
        self.clock = clock
        self.metrics = metrics
        self.recent: OrderedDict[str, Timeline] = OrderedDict()
        self._tasks: dict[asyncio.Task[None], Passage] = {}
        self._slots = asyncio.Semaphore(config.max_inflight)
        self._draining = False

    @property
    def num_inflight(self) -> int:
        return len(self._tasks)

    @property
    def is_draining(self) -> bool:
        return self._draining

    def roles(self) -> Mapping[str, Role]:
        """Of each live worker, by its id."""
        raise NotImplementedError

    def takers(self) -> set[Role]:
        """Roles of those that take new legs."""
        raise NotImplementedError

    def latency_models(self) -> Mapping[str, StepModelState]:
        """What predictions of steps are made of, by worker; of our own ones."""
        return {}

    @property
    def is_ready(self) -> bool:
        """A request that came now would find workers for each of its legs."""
        roles = self.takers()
        served = Role.MIXED in roles or {Role.PREFILL, Role.DECODE} <= roles
        return served and not self._draining

    async def admit(self, journey: P) -> asyncio.Task[None]:
        """Start one journey, waiting for a place up to the admission deadline.

        Cancelling the task tells the workers that the client is gone. Raises Overloaded, Draining.
        """
        self._require_open()
        try:
            async with asyncio.timeout(self.config.deadlines.admit_s):
                await self._slots.acquire()
        except TimeoutError:
            raise Overloaded(
                f"{self.config.max_inflight} answers are being computed and none ended within "
                f"{self.config.deadlines.admit_s:g} s."
            ) from None
        try:
            self._require_open()
        except Draining:
            self._slots.release()
            raise
        journey.timeline.mark(Moment.ADMITTED, self.clock.now())
        task = asyncio.create_task(journey.run(), name=journey.request_id)
        self._tasks[task] = journey
        self._remember(journey)
        task.add_done_callback(self._ended)
        return task

    async def drain(self, limit_s: float) -> int:
        """Refuse new requests and wait for those inside; past the limit they are told an error.

        Returns how many had to be ended.
        """
        self._draining = True
        if self._tasks:
            await asyncio.wait(list(self._tasks), timeout=limit_s)
        left = list(self._tasks.items())
        for task, journey in left:
            journey.error = Draining(f"Not finished within {limit_s:g} s of the shutdown's start.")
            task.cancel()
        if left:
            await asyncio.wait([task for task, _ in left], timeout=5.0)
        return len(left)

    def _require_open(self) -> None:
        if self._draining:
            raise Draining("The server is shutting down.")

    def _ended(self, task: asyncio.Task[None]) -> None:
        journey = self._tasks.pop(task)
        journey.finish()
        self._slots.release()
        outcome = journey.error.code if journey.error else journey.end_reason
        self.metrics.observe(journey, outcome or "unknown")

    def _remember(self, journey: Passage) -> None:
        self.recent[journey.request_id] = journey.timeline
        if len(self.recent) > TIMELINES_KEPT:
            self.recent.popitem(last=False)


class GatewayService(Door):
    """The door to our own workers."""

    def __init__(
        self, hub: WorkerHub, config: GatewayConfig, clock: Clock, metrics: Metrics
    ) -> None:
        super().__init__(config, clock, metrics)
        self.hub = hub

    def roles(self) -> Mapping[str, Role]:
        return {name: handle.hello.role for name, handle in self.hub.workers.items()}

    def takers(self) -> set[Role]:
        return {role for role in Role if self.hub.router.has(role)}

    def latency_models(self) -> Mapping[str, StepModelState]:
        return self.hub.latency_models()

    async def start(self, generation: Generation) -> tuple[Journey, asyncio.Task[None]]:
        """`admit` a journey of our own workers."""
        journey = Journey(generation, self.hub, self.config, self.clock)
        return journey, await self.admit(journey)
