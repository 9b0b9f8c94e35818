"""A worker process: one engine, its pool, its connector and its line to the gateway.

The main thread is the engine loop. It is also the sign of life: a frame leaves after every step
and, when idle, every 250 ms.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import signal
import threading
from dataclasses import dataclass
from types import FrameType
from typing import Protocol

import msgspec

from splitserve import wire
from splitserve.clock import Clock, MonotonicClock
from splitserve.connector.base import Connector, Staging
from splitserve.connector.landing import LandingZone
from splitserve.connector.offers import P2PConfig
from splitserve.connector.p2p import make_p2p
from splitserve.connector.push import Zone
from splitserve.engine.engine import Engine
from splitserve.engine.scheduler import Scheduler, SchedulerConfig
from splitserve.engine.step import Runner
from splitserve.errors import ConfigError
from splitserve.faults import Faults
from splitserve.kv.format import KVFormat, ModelIdentity
from splitserve.kv.lease import LeaseTable
from splitserve.kv.pool import BlockPool
from splitserve.store.chain import KVStore
from splitserve.store.registry import make_tier
from splitserve.transport.registry import LOOPBACK, make_transport
from splitserve.transport.segment import Segment
from splitserve.worker.link import GatewayLink
from splitserve.worker.spec import WorkerSpec

log = logging.getLogger(__name__)

HEARTBEAT_S = 0.25
TIERS_PERIOD_S = 1.0
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, slots=True)
class MadeRunner:
    """exact_rows: what exact mode pads to. staging: of a pool that is not the segment itself."""

    runner: Runner
    exact_rows: int | None = None
    staging: Staging | None = None


class HostedModel(Protocol):
    """A model that was loaded once, before workers were forked."""

    @property
    def identity(self) -> ModelIdentity: ...

    @property
    def max_model_len(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    def kv_format(self, block_size: int) -> KVFormat: ...

    def make_runner(self, segment: Segment, spec: WorkerSpec) -> MadeRunner:
        """The runner on this worker's pool; in the worker's process, once."""
        ...


class Worker:
    """Everything one worker epoch owns."""

    def __init__(self, spec: WorkerSpec, model: HostedModel) -> None:
        self.spec = spec
        clock = MonotonicClock()
        kv_format = model.kv_format(spec.block_size)
        self._segment = Segment.create(spec.num_blocks, kv_format.block_bytes)
        made = model.make_runner(self._segment, spec)
        identity = model.identity
        self._link = GatewayLink(spec.gateway, f"{spec.worker_id}/{spec.epoch}")
        leases = LeaseTable(spec.epoch, spec.lease_term_s)
        self._store = _make_store(spec, identity, kv_format, clock)
        self._faults = Faults(spec.faults.replace("{worker}", spec.worker_id))
        self._connector: Connector = make_p2p(
            P2PConfig(
                spec.worker_id,
                spec.epoch,
                identity.digest(),
                kv_format,
                spec.digests,
                spec.host,
                spec.token.encode(),
                spec.by_store,
            ),
            make_transport(spec.transport, self._segment, spec.host or LOOPBACK),
            self._segment,
            leases,
            clock,
            self._link.wake,
            self._faults,
            made.staging,
            _make_zone(spec, kv_format) if spec.zone_blocks else None,
            self._store,
        )
        scheduler = Scheduler(
            SchedulerConfig(
                max_batched_tokens=spec.max_batched_tokens,
                max_sequences=spec.max_sequences,
                chunked_prefill=spec.chunked_prefill,
                prefix_cache=spec.prefix_cache,
            ),
            BlockPool(spec.num_blocks, spec.block_size),
            leases,
        )
        self.engine = Engine(scheduler, made.runner, self._connector, clock, identity.digest())
        self.engine.flush = lambda: self._tell(progressed=False)
        self.engine.listen = self._listen
        self.engine.keeping.is_shared = spec.weights != "int8"
        self._unread: list[wire.ToWorker] = []  # heard in the middle of a step
        self._clock = clock
        self._no_cancel = threading.Event()
        self._stopping = False
        self._last_frame_s = clock.now()
        self._last_tiers_s = float("-inf")
        self._link.say_hello(
            wire.Hello(
                worker_id=spec.worker_id,
                epoch=spec.epoch,
                role=spec.role,
                pid=os.getpid(),
                identity=identity,
                format=kv_format,
                num_blocks=spec.num_blocks,
                max_model_len=spec.max_model_len or model.max_model_len,
                vocab_size=model.vocab_size,
                exact_rows=made.exact_rows,
                max_batched_tokens=spec.max_batched_tokens,
                address=self._connector.address,
            )
        )

    def run(self) -> None:
        """The engine loop, until Stop or SIGTERM."""
        signal.signal(signal.SIGTERM, self._on_term)
        while not self._stopping:
            unread, self._unread = self._unread, []
            for message in (*unread, *self._link.receive()):
                self._take(message)
            self.engine.pump()
            progressed = self.engine.step()
            self._tell(progressed)
            if progressed:
                self._faults.hit("step", self._no_cancel)
            elif not self._stopping:
                self._link.wait(self._patience_s())

    def close(self) -> None:
        self._connector.worker.close()
        self._link.close()
        self._segment.close()

    def _listen(self) -> None:
        """In the middle of a step: a landing is used at once, all else waits for its end."""
        for message in self._link.receive():
            if isinstance(message, wire.Land):
                self._take(message)
            else:
                self._unread.append(message)
        self._tell(progressed=False)  # a sign of life too: a step may take seconds

    def _take(self, message: wire.ToWorker) -> None:
        match message:
            case wire.Submit():
                self.engine.submit(message)
            case wire.Deliver(request_id, part):
                self.engine.deliver(request_id, part)
            case wire.Land(request_id, landing):
                self.engine.land(request_id, landing)
            case wire.Complete(request_id, offer):
                self.engine.complete(request_id, offer)
            case wire.Abort(request_id):
                self.engine.abort(request_id)
            case wire.Release(lease_id):
                self.engine.release(lease_id)
            case wire.Renew(lease_id):
                self.engine.renew(lease_id)
            case wire.Meet(worker_id, epoch, address):
                self._connector.worker.meet(worker_id, epoch, address)
            case wire.Resend(first):
                self._link.resend(first)
            case wire.Check():
                self._check()
            case wire.Stop():
                self._stopping = True

    def _check(self) -> None:
        self.engine.check()
        self.engine.outbox.notices.append(wire.Checked(self.engine.is_idle))

    def _tell(self, progressed: bool) -> None:
        now = self._clock.now()
        outbox = self.engine.take_outbox()
        if progressed or outbox or now - self._last_frame_s >= HEARTBEAT_S:
            self._link.send_frame(outbox, self.engine.view(), self._tiers(now))
            self._last_frame_s = now

    def _tiers(self, now: float) -> list[wire.TierView]:
        """How the store is, now and then."""
        if self._store is None or now - self._last_tiers_s < TIERS_PERIOD_S:
            return []
        self._last_tiers_s = now
        return [
            wire.TierView(
                name=one.name,
                num_bytes=one.tier.num_bytes,
                hits=one.tier.hits,
                misses=one.tier.misses,
                saved=one.tier.saved,
                evicted=one.tier.evicted,
                corrupt=one.tier.corrupt,
                errors=one.errors,
                is_broken=one.is_broken,
            )
            for one in self._store.stats().tiers
        ]

    def _patience_s(self) -> float:
        """How long nothing can happen without a message or a wake."""
        now = self._clock.now()
        until = self._last_frame_s + HEARTBEAT_S
        deadline = self.engine.next_deadline_s()
        if deadline is not None:
            until = min(until, deadline + 0.001)
        return max(0.0, until - now)

    def _on_term(self, signum: int, frame: FrameType | None) -> None:
        self._stopping = True
        self._link.wake()


def _make_zone(spec: WorkerSpec, kv_format: KVFormat) -> Zone:
    segment = Segment.create(spec.zone_blocks, kv_format.block_bytes, "splitserve-zone")
    transport = make_transport(spec.transport, segment, spec.host or LOOPBACK)
    return Zone(segment, transport, LandingZone(spec.epoch, spec.zone_blocks))


def _make_store(
    spec: WorkerSpec, identity: ModelIdentity, kv_format: KVFormat, clock: Clock
) -> KVStore | None:
    """The cluster's store as this worker sees it: blocks of its model and format (design 3.1)."""
    if not spec.tiers:
        return None
    namespace = hashlib.blake2b(
        identity.digest() + msgspec.json.encode(kv_format), digest_size=16
    ).digest()
    tiers = [make_tier(tier, namespace, kv_format.block_bytes) for tier in spec.tiers]
    return KVStore(tiers, clock)


def _enter_network(path: str) -> None:
    """Move this process into a network namespace; raise ConfigError without the right to."""
    libc = ctypes.CDLL(None, use_errno=True)
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"No network namespace {path}: {error.strerror}.") from error
    try:
        if libc.setns(fd, _CLONE_NEWNET):
            reason = os.strerror(ctypes.get_errno())
            raise ConfigError(f"A worker can't enter the network namespace {path}: {reason}.")
    finally:
        os.close(fd)


def run_worker(spec: WorkerSpec, model: HostedModel) -> None:
    """The life of a forked worker process."""
    if spec.cores:
        os.sched_setaffinity(0, spec.cores)
    if spec.netns:
        _enter_network(spec.netns)
    worker = Worker(spec, model)
    try:
        worker.run()
    finally:
        worker.close()
