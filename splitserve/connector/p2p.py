"""The worker side that moves KV between pools, and between a pool and a store.

Pull: the reader copies leased blocks out of the source's pool, all of them when prefill has ended
or each step's while it goes on. Push: the source writes them to a landing that the reader lends
(`connector.push`), and the reader copies them from there. Store: the source saves blocks by their
keys, and whoever needs them loads them. This file starts the parts that do it, each with threads of
its own, and collects what they report:

  Answerer  answers readers and writers          Fetcher  copies into our pool, and proves
  Finder    asks others and the store            Pusher   writes to landings of others
  Saver     digests, and hands to the store
"""

from __future__ import annotations

import functools
import queue

from splitserve.clock import Clock
from splitserve.connector.answering import Answerer
from splitserve.connector.base import Connector, Staging, Wake, WorkerSide
from splitserve.connector.convert import find_converter
from splitserve.connector.converted import make_scratch
from splitserve.connector.fetch import Fetcher
from splitserve.connector.find import Finder
from splitserve.connector.jobs import (
    Event,
    FetchDone,
    FetchJob,
    FindJob,
    PushJob,
    SaveJob,
    SealJob,
)
from splitserve.connector.offers import P2PConfig, P2PScheduler
from splitserve.connector.peers import Peer, Peers
from splitserve.connector.push import Pusher, Zone, ZoneLender
from splitserve.connector.save import Saver
from splitserve.connector.sidechannel import SIDE_CHANNEL_VERSION, PeerHello, SideChannel
from splitserve.errors import SplitserveError
from splitserve.faults import Faults
from splitserve.kv.lease import LeaseTable
from splitserve.store.chain import KVStore
from splitserve.transport.base import Transport
from splitserve.transport.registry import LOOPBACK
from splitserve.transport.segment import Segment
from splitserve.wire import Landing, Offer, Part

CONNECT_TIMEOUT_S = 2.0


class P2PWorker(WorkerSide):
    """zone: what we lend to writers, if anything. store: the cluster's, if it has one."""

    def __init__(
        self,
        config: P2PConfig,
        transport: Transport,
        segment: Segment,
        leases: LeaseTable,
        clock: Clock,
        wake: Wake,
        faults: Faults | None = None,
        staging: Staging | None = None,
        zone: Zone | None = None,
        store: KVStore | None = None,
    ) -> None:
        faults = faults or Faults()
        self._config = config
        self._transport = transport
        self._zone = zone
        self._store = store
        self._wake = wake
        self._done: queue.SimpleQueue[Event] = queue.SimpleQueue()
        layer_bytes = config.kv_format.block_bytes // config.kv_format.num_layers
        zones = Peers(functools.partial(self._open, to_zone=True))  # the pushing thread's
        self._pusher = Pusher(
            zones, config.kv_format.block_bytes, layer_bytes, self._report, faults
        )
        self._saver = Saver(
            segment, store, config.digests == "full", staging, clock, faults, self._report
        )
        self._fetcher = Fetcher(
            segment,
            self._open,
            zone.link_to(segment) if zone else None,
            store,
            staging,
            clock,
            faults,
            self._report,
        )
        self._finder = Finder(self._connect_to_ask, store, clock, faults, self._report)
        self._answerer = Answerer(
            config, transport, segment, leases, clock, zone, wake, self._report
        )

    @property
    def address(self) -> str:
        return self._answerer.address

    # --- called by the engine thread

    def start_seal(self, job: SealJob) -> None:
        self._saver.start_seal(job)

    def start_save(self, job: SaveJob) -> None:
        self._saver.start_save(job)

    def start_fetch(self, job: FetchJob) -> None:
        self._fetcher.start(job)

    def cancel_fetch(self, request_id: str) -> None:
        self._fetcher.cancel(request_id)

    def start_find(self, job: FindJob) -> None:
        self._finder.start(job)

    def answer(self, ask_id: int, part: Part | None) -> bool:
        return self._answerer.answer(ask_id, part)

    def start_push(self, job: PushJob) -> None:
        self._pusher.start(job)

    def end_push(self, landing: Landing) -> None:
        self._pusher.end(landing)

    def meet(self, worker_id: str, epoch: str, address: str) -> None:
        self._fetcher.meet(worker_id, epoch, address)
        self._finder.meet(worker_id, epoch, address)

    def end_lease(self, source: Part | Offer) -> None:
        self._fetcher.end_lease(source)

    def poll(self) -> list[Event]:
        events: list[Event] = []
        while not self._done.empty():
            event = self._done.get()
            if isinstance(event, FetchDone):
                self._fetcher.note_done(event)
            events.append(event)
        return events

    def close(self) -> None:
        self._finder.close()
        self._fetcher.close()
        self._saver.close()
        self._pusher.close()
        self._answerer.close()
        self._transport.close()
        if self._zone is not None:
            self._zone.transport.close()
            self._zone.segment.close()
        if self._store is not None:
            self._store.close()

    # --- any thread

    def _open(self, epoch: str, address: str, *, to_zone: bool = False) -> Peer:
        """Shake hands and open the pool or the zone of the worker epoch at an address."""
        config = self._config
        channel = self._connect(epoch, address, to_zone=to_zone)
        num_bytes = channel.num_blocks * channel.format.block_bytes
        scratch = None
        try:
            converter = find_converter(channel.format, config.kv_format, "the source")
            if converter is not None:
                host = config.host or LOOPBACK
                scratch = make_scratch(converter, self._transport.name, host)
            transport = scratch.transport if scratch else self._transport
            link = transport.open(channel.card, channel.descriptors, num_bytes, writable=to_zone)
        except SplitserveError:
            channel.close()
            if scratch is not None:
                scratch.close()
            raise
        return Peer(channel, link, scratch)

    def _connect_to_ask(self, epoch: str, address: str) -> SideChannel:
        return self._connect(epoch, address, is_question=True)

    def _connect(
        self, epoch: str, address: str, *, to_zone: bool = False, is_question: bool = False
    ) -> SideChannel:
        config = self._config
        hello = PeerHello(
            SIDE_CHANNEL_VERSION,
            epoch,
            self._transport.name,
            config.identity,
            config.kv_format,
            to_zone,
            is_question,
        )
        return SideChannel(address, hello, CONNECT_TIMEOUT_S, config.token)

    def _report(self, event: Event) -> None:
        self._done.put(event)
        self._wake()


def make_p2p(
    config: P2PConfig,
    transport: Transport,
    segment: Segment,
    leases: LeaseTable,
    clock: Clock,
    wake: Wake,
    faults: Faults | None = None,
    staging: Staging | None = None,
    zone: Zone | None = None,
    store: KVStore | None = None,
) -> Connector:
    """The connector `p2p` over one transport. With a store it is `multi`, or `store` if the config
    says that KV is handed over by it alone."""
    worker = P2PWorker(
        config, transport, segment, leases, clock, wake, faults, staging, zone, store
    )
    scheduler = P2PScheduler(config, transport.name, worker.address, clock)
    lender = ZoneLender(config.worker_id, config.epoch, worker.address, zone)
    name = "store" if config.by_store else "multi" if store else "p2p"
    return Connector(
        name,
        scheduler,
        worker,
        lender,
        config.kv_format,
        worker.address,
        has_store=store is not None,
        by_store=config.by_store,
    )
