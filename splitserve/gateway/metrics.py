"""What the gateway counts, in Prometheus' words. docs/reference/metrics.md is generated."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Protocol

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from splitserve.gateway.hub import WorkerHub
from splitserve.moments import Timeline
from splitserve.wire import TierView, View

_LATENCY_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5)


class Observed(Protocol):
    """A journey that is over."""

    timeline: Timeline
    num_retries: int

    @property
    def num_prompt_tokens(self) -> int: ...


class Metrics:
    """One registry per gateway, so that several can live in one process."""

    def __init__(
        self, hub: WorkerHub | None, num_restarts: Callable[[], dict[str, int]] = dict
    ) -> None:
        """hub: of our own workers; None if others compute."""
        self.registry = CollectorRegistry()
        self.requests = Counter(
            "splitserve_requests",
            "Answers ended, by outcome: stop, length, cancelled or an error code.",
            ["outcome"],
            registry=self.registry,
        )
        self.prompt_tokens = self._counter("splitserve_prompt_tokens", "Prompt tokens admitted.")
        self.output_tokens = self._counter("splitserve_output_tokens", "Output tokens produced.")
        self.cached_tokens = self._counter(
            "splitserve_cached_tokens", "Prompt tokens whose KV existed when the request arrived."
        )
        self.retries = self._counter(
            "splitserve_retries", "Attempts begun again after losing a worker or a transfer."
        )
        self.transfers = self._counter("splitserve_kv_transfers", "KV handoffs that succeeded.")
        self.transfer_bytes = self._counter(
            "splitserve_kv_transfer_bytes", "KV bytes that decode workers fetched."
        )
        self.handoffs = Counter(
            "splitserve_handoffs",
            "Handoffs that succeeded, by grain: request, or parts if some moved during prefill.",
            ["grain"],
            registry=self.registry,
        )
        self.exposed_transfer = self._histogram(
            "splitserve_kv_transfer_exposed_seconds",
            "End of prefill to end of the transfer: what no prefill hid.",
            _TOKEN_BUCKETS,
        )
        self.loads = Counter(
            "splitserve_kv_loads",
            "Prompts of which KV came from elsewhere before prefill, by source: worker or store.",
            ["source"],
            registry=self.registry,
        )
        self.loaded_tokens = Counter(
            "splitserve_kv_loaded_tokens",
            "Prompt tokens that were not computed since their KV was had, by source.",
            ["source"],
            registry=self.registry,
        )
        self.negative_spans = self._counter(
            "splitserve_negative_spans", "Spans of a timeline below zero: each is a bug."
        )
        self.ttft = self._histogram(
            "splitserve_time_to_first_token_seconds", "Arrival to first token.", _LATENCY_BUCKETS
        )
        self.tpot = self._histogram(
            "splitserve_time_per_output_token_seconds",
            "Mean time per output token after the first, per request.",
            _TOKEN_BUCKETS,
        )
        self.handoff_gap = self._histogram(
            "splitserve_handoff_gap_seconds",
            "First to second token of split requests.",
            _LATENCY_BUCKETS,
        )
        if hub is not None:
            self.registry.register(_WorkerCollector(hub, num_restarts))

    def observe(self, journey: Observed, outcome: str) -> None:
        """Account for a journey that is over."""
        timeline = journey.timeline
        self.requests.labels(outcome).inc()
        self.prompt_tokens.inc(journey.num_prompt_tokens)
        self.output_tokens.inc(timeline.num_output)
        self.cached_tokens.inc(timeline.cached_tokens or 0)
        self.retries.inc(journey.num_retries)
        if timeline.ttft_s is not None:
            self.ttft.observe(timeline.ttft_s)
        if timeline.tpot_s is not None:
            self.tpot.observe(timeline.tpot_s)
        if timeline.loaded_tokens:
            source = "store" if timeline.loaded_from == "store" else "worker"
            self.loads.labels(source).inc()
            self.loaded_tokens.labels(source).inc(timeline.loaded_tokens)
        if timeline.transfer_proof:
            self.transfers.inc()
            self.transfer_bytes.inc(timeline.transfer_bytes)
            self.handoffs.labels("parts" if timeline.num_parts else "request").inc()
            if timeline.exposed_transfer_s is not None:
                self.exposed_transfer.observe(timeline.exposed_transfer_s)
            if timeline.handoff_gap_s is not None:
                self.handoff_gap.observe(timeline.handoff_gap_s)
        self.negative_spans.inc(len(timeline.negative_spans()))

    def render(self) -> bytes:
        """The text format of all metrics."""
        return generate_latest(self.registry)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(name, text, buckets=tuple(buckets), registry=self.registry)


class _WorkerCollector(Collector):
    """Reads the workers' views when scraped."""

    def __init__(self, hub: WorkerHub, num_restarts: Callable[[], dict[str, int]]) -> None:
        self._hub = hub
        self._num_restarts = num_restarts

    def collect(self) -> Iterable[Metric]:
        views = {name: handle.view for name, handle in self._hub.workers.items()}
        gauges: tuple[tuple[str, str, Callable[[View], float]], ...] = (
            ("waiting_requests", "Legs queued.", lambda v: v.waiting),
            ("running_requests", "Legs in the batch.", lambda v: v.running),
            ("fetching_requests", "Legs whose KV is on the way.", lambda v: v.fetching),
            ("kv_free_blocks", "Free and cached blocks.", lambda v: v.free_blocks),
            ("kv_leased_blocks", "Blocks pinned by leases.", lambda v: v.leased_blocks),
            ("kv_quarantined_blocks", "Blocks in quarantine.", lambda v: v.quarantined_blocks),
            (
                "kv_landing_quarantined_blocks",
                "Blocks of landing zones that nobody reads and a writer may still write.",
                lambda v: v.landing_blocks_quarantined,
            ),
            (
                "kv_quarantine_age_seconds",
                "Age of the pool's oldest block in quarantine.",
                lambda v: v.quarantine_age_s,
            ),
            ("kv_blocks", "Blocks in the pool.", lambda v: v.total_blocks),
            (
                "kv_unsaved_blocks",
                "Blocks that the store did not take, of the worker that lives now.",
                lambda v: v.blocks_unsaved,
            ),
        )
        for name, text, read in gauges:
            family = GaugeMetricFamily(f"splitserve_worker_{name}", text, labels=["worker"])
            for worker_id, view in views.items():
                family.add_metric([worker_id], read(view))
            yield family
        preemptions = CounterMetricFamily(
            "splitserve_worker_preemptions",
            "Sequences that lost their blocks, of the worker that lives now.",
            labels=["worker"],
        )
        for worker_id, view in views.items():
            preemptions.add_metric([worker_id], view.preemptions)
        yield preemptions
        yield from self._tiers()
        restarts = CounterMetricFamily(
            "splitserve_worker_restarts", "Deaths of a worker.", labels=["worker"]
        )
        for worker_id, num in self._num_restarts().items():
            restarts.add_metric([worker_id], num)
        yield restarts
        yield CounterMetricFamily(
            "splitserve_kv_hints_failed",
            "Hints at workers that had fewer blocks than they had told, or could not be asked.",
            value=self._hub.num_hints_failed,
        )
        yield CounterMetricFamily(
            "splitserve_frame_gaps", "Gaps in the numbering of frames.", value=self._hub.num_gaps
        )

    def _tiers(self) -> Iterable[Metric]:
        """Of the store, as each worker that lives now sees it."""
        counters: tuple[tuple[str, str, Callable[[TierView], float]], ...] = (
            ("hits", "Blocks loaded.", lambda v: v.hits),
            ("misses", "Loads that stopped at a block that was not there.", lambda v: v.misses),
            ("saved", "Blocks saved.", lambda v: v.saved),
            ("evicted", "Blocks evicted to keep the limit.", lambda v: v.evicted),
            ("corrupt", "Blocks found truncated or wrong, and removed.", lambda v: v.corrupt),
            ("errors", "Calls that failed: the tier can't be reached.", lambda v: v.errors),
        )
        labels = ["worker", "tier"]
        views = [
            ([name, tier.name], tier)
            for name, handle in self._hub.workers.items()
            for tier in handle.tiers
        ]
        for name, text, read in counters:
            family = CounterMetricFamily(f"splitserve_store_{name}", text, labels=labels)
            for values, tier in views:
                family.add_metric(values, read(tier))
            yield family
        for name, text, read in (
            ("bytes", "Bytes of blocks that are there.", lambda v: v.num_bytes),
            ("broken", "1 while the tier is left out.", lambda v: float(v.is_broken)),
        ):
            gauge = GaugeMetricFamily(f"splitserve_store_{name}", text, labels=labels)
            for values, tier in views:
                gauge.add_metric(values, read(tier))
            yield gauge
