"""Blocks that other workers ask for by their keys: found in the prefix cache, leased, digested, and
then told (design 3.1: one mechanism)."""

from __future__ import annotations

from splitserve.clock import Clock
from splitserve.connector.base import Connector
from splitserve.connector.jobs import Asked, SealDone, SealJob
from splitserve.engine.scheduler import Scheduler
from splitserve.kv.lease import Lease

ASK_TERM_S = 10.0  # for the reader to come: it knows of no request here that would renew


class Asks:
    """The engine thread's."""

    def __init__(self, scheduler: Scheduler, connector: Connector, clock: Clock) -> None:
        self._scheduler = scheduler
        self._connector = connector
        self._clock = clock
        self._sealing: dict[str, tuple[Asked, Lease]] = {}  # by lease id

    def on_asked(self, event: Asked) -> None:
        """Lease what is here; the answer goes out when its digests are there, or now if it is
        nothing. So much as leases may pin is not exceeded."""
        scheduler = self._scheduler
        blocks = scheduler.pool.lookup(event.keys) if scheduler.config.prefix_cache else []
        if not blocks or not scheduler.admits_prefill:
            self._connector.worker.answer(event.ask_id, None)
            return
        lease = scheduler.lending.lend_cached(
            f"ask-{event.ask_id}", blocks, self._clock.now(), ASK_TERM_S
        )
        self._sealing[lease.lease_id] = event, lease
        self._connector.worker.start_seal(SealJob(lease.lease_id, blocks))

    def on_sealed(self, event: SealDone) -> bool:
        """False if the lease is none of ours."""
        found = self._sealing.pop(event.lease_id, None)
        if found is None:
            return False
        asked, lease = found
        part = None
        if not event.reason and lease.ended is None:
            part = self._connector.scheduler.make_part(
                lease, asked.first, list(lease.blocks), event.digests
            )
        if not self._connector.worker.answer(asked.ask_id, part) or part is None:
            self._scheduler.leases.release(lease.lease_id)
        return True
