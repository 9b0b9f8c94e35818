"""A gateway over servers that others have started: `serve --adopt-prefill URL …`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import uvicorn

from splitserve.adopted.fleet import Fleet
from splitserve.adopted.front import Front, cards_of
from splitserve.adopted.journey import Setting
from splitserve.adopted.service import AdoptedCollector, AdoptedService
from splitserve.api.app import App
from splitserve.clock import MonotonicClock
from splitserve.cluster.listening import close_server, http_server, listen, url_of
from splitserve.config import AdoptConfig
from splitserve.gateway.metrics import Metrics

log = logging.getLogger(__name__)


class AdoptingRuntime:
    """`start` returns when it is ready; `stop` ends the gateway, never the servers."""

    def __init__(
        self,
        config: AdoptConfig,
        key: str | None = None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.config = config
        clock = MonotonicClock()
        gateway = config.gateway
        # predicted costs are of our own engines: of these there is no model
        policy = "least_loaded" if gateway.policy == "cost" else gateway.policy
        self.fleet = Fleet(config.servers, clock, policy, key, say)
        self._setting = Setting(self.fleet, gateway, clock, config.kv_lease_s)
        metrics = Metrics(None)
        metrics.registry.register(AdoptedCollector(self.fleet, self._setting.counts, clock))
        self.service = AdoptedService(self.fleet, gateway, clock, metrics)
        self.app = App(self.service)
        self._say = say
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return url_of(self.config.host, self.port)

    @property
    def model_names(self) -> list[str]:
        return [card.id for card in cards_of(self.fleet)]

    def describe_plan(self) -> list[str]:
        """For a person to read."""
        return [f"{role.value}: {url}" for role, url in self.config.servers]

    async def start(self) -> None:
        """Listen, then wait for the servers. On any failure everything is stopped again."""
        listener = listen(self.config.host, self.config.port)
        self.port: int = listener.getsockname()[1]
        try:
            self._server = http_server(self.app)
            self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
            await self.fleet.start(self.config.gateway.deadlines.start_s)
            self.app.serve(Front(self.service, self._setting))
        except BaseException:
            await self.stop(drain_s=0.0)
            listener.close()
            raise

    async def stop(self, drain_s: float | None = None) -> None:
        """Drain within the deadline, then stop listening."""
        if drain_s is None:
            drain_s = self.config.gateway.deadlines.drain_s
        num_ended = await self.service.drain(drain_s)
        if num_ended:
            self._say(f"{num_ended} answers were not finished in time and got an error")
        if self._server is not None and self._serving is not None:
            await close_server(self._server, self._serving)
        await self.fleet.stop()
