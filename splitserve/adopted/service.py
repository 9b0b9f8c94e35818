"""The door to adopted servers, and what is counted of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from splitserve.adopted.fleet import Fleet
from splitserve.adopted.journey import Counts
from splitserve.adopted.server import AdoptedServer
from splitserve.clock import Clock
from splitserve.config import GatewayConfig
from splitserve.gateway.metrics import Metrics
from splitserve.gateway.service import Door
from splitserve.wire import Role


class AdoptedService(Door):
    """Admits journeys over adopted servers."""

    def __init__(self, fleet: Fleet, config: GatewayConfig, clock: Clock, metrics: Metrics) -> None:
        super().__init__(config, clock, metrics)
        self.fleet = fleet

    def roles(self) -> Mapping[str, Role]:
        return {name: server.role for name, server in self.fleet.servers.items() if server.is_up}

    def takers(self) -> set[Role]:
        """A decode server serves a request whole, if nobody prefills."""
        takers = {role for role in Role if self.fleet.router.has(role)}
        return takers | {Role.MIXED} if Role.DECODE in takers else takers


class AdoptedCollector(Collector):
    """Reads the servers' state when scraped."""

    def __init__(self, fleet: Fleet, counts: Counts, clock: Clock) -> None:
        self._fleet = fleet
        self._counts = counts
        self._clock = clock

    def collect(self) -> Iterable[Metric]:
        now = self._clock.now()
        gauges: tuple[tuple[str, str, Callable[[AdoptedServer], float]], ...] = (
            ("up", "1 while it answers its polls and serves the right model.", lambda x: x.is_up),
            (
                "breaker_open",
                "1 while it gets no requests, since several in a row failed there.",
                lambda x: x.breaker.is_open(now),
            ),
            ("legs", "Legs of ours that run there.", lambda x: x.num_legs),
            ("running", "Requests it computes, ours or not.", lambda x: x.load.running),
            ("waiting", "Requests in its queue, ours or not.", lambda x: x.load.waiting),
            ("kv_usage", "Share of its KV that is in use, 0 to 1.", lambda x: x.load.kv_usage),
        )
        counters: tuple[tuple[str, str, Callable[[AdoptedServer], float]], ...] = (
            ("faults", "Legs that failed by its fault.", lambda x: x.num_faults),
            (
                "kv_expired",
                "By its own count: prompts whose KV it freed before anybody fetched it.",
                lambda x: x.load.expired,
            ),
            (
                "kv_fetched_late",
                "By its own count: prompts whose KV was fetched after it was freed, so perhaps "
                "wrong. Each is an alarm.",
                lambda x: x.load.late,
            ),
            ("kv_failed", "By its own count: transfers that failed.", lambda x: x.load.failed),
        )
        for name, text, read in gauges:
            gauge = GaugeMetricFamily(f"splitserve_adopted_{name}", text, labels=["server"])
            for server_id, server in self._fleet.servers.items():
                gauge.add_metric([server_id], float(read(server)))
            yield gauge
        for name, text, read in counters:
            family = CounterMetricFamily(f"splitserve_adopted_{name}", text, labels=["server"])
            for server_id, server in self._fleet.servers.items():
                family.add_metric([server_id], float(read(server)))
            yield family
        counts = self._counts
        for name, text, value in (
            ("handoffs", "Answers that came of KV that another server computed.", counts.handoffs),
            (
                "stale_offers",
                "Prompts computed again, since no decode server came within a third of the lease.",
                counts.stale_offers,
            ),
            (
                "without_offer",
                "Prompts computed on a server that offered nothing to fetch.",
                counts.without_offer,
            ),
            ("resumes", "Streams gone on from the tokens so far, elsewhere.", counts.resumes),
            ("cut_streams", "Streams that ended in an error frame.", counts.cut_streams),
            (
                "errors_in_replies",
                "Errors that came inside a reply of status 200.",
                counts.errors_in_streams,
            ),
        ):
            yield CounterMetricFamily(f"splitserve_adopted_{name}", text, value=value)
