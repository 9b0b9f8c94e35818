"""One leg as its journey sees it: a stream of what the worker tells, with a patience."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from splitserve import wire
from splitserve.gateway.hub import WorkerHub


class LegLost(Exception):
    """The leg will give no more: its worker died or could not do it. The request may go on."""


class LegStream:
    """Submits a leg on construction; `next` gives tokens and notices in the order of arrival."""

    def __init__(
        self, hub: WorkerHub, worker_id: str, submit: wire.Submit, num_pending: int, opened_s: float
    ) -> None:
        self.worker_id = worker_id
        self.request_id = submit.request_id
        self.opened_s = opened_s
        self.num_known = len(submit.output_ids)  # tokens that the leg was begun with
        self._hub = hub
        self._items: deque[wire.Token | wire.Notice] = deque()
        self._lost: str | None = None
        self._ended = False
        self.on_landed: Callable[[wire.Landing], None] = lambda landing: None
        self._waiter: asyncio.Future[None] | None = None
        if not hub.open_leg(worker_id, submit, self, num_pending):
            self._lost = f"{worker_id} is gone"

    def on_token(self, token: wire.Token) -> None:
        self._items.append(token)
        self._notify()

    def on_notice(self, notice: wire.Notice) -> None:
        if isinstance(notice, wire.Landed):  # its source is to know at once
            self.on_landed(notice.landing)
            return
        self._ended = self._ended or isinstance(notice, wire.End | wire.FetchFailed)
        self._items.append(notice)
        self._notify()

    def on_lost(self, reason: str) -> None:
        self._lost = f"{self.worker_id} {reason}"
        self._notify()

    async def next(self, timeout_s: float) -> wire.Token | wire.Notice:
        """The next item. Raise LegLost when there is none and none can come, or TimeoutError."""
        while not self._items:
            if self._lost is not None:
                raise LegLost(self._lost)
            self._waiter = asyncio.get_running_loop().create_future()
            async with asyncio.timeout(max(0.0, timeout_s)):
                await self._waiter
        return self._items.popleft()

    def close(self, *, abort: bool = True) -> None:
        """Stop listening. The worker is told unless its part is over."""
        self._hub.close_leg(self.worker_id, self.request_id, abort=abort and not self._ended)

    def _notify(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class HeldOffer:
    """Keeps the source's lease on offered KV alive until nobody needs it any more."""

    def __init__(self, hub: WorkerHub, offer: wire.Part | wire.Offer) -> None:
        self.offer = offer
        self.is_needed = True
        self._hub = hub
        self._renewer = asyncio.create_task(self._renew())

    def settle(self, *, release: bool) -> None:
        """The KV is not needed any more. `release` unless a reader has told the source itself."""
        if not self.is_needed:
            return
        self.is_needed = False
        self._renewer.cancel()
        if release:
            message = wire.Release(self.offer.lease_id)
            self._hub.send(self.offer.worker_id, self.offer.epoch, message)

    async def _renew(self) -> None:
        offer = self.offer
        while True:
            await asyncio.sleep(max(0.01, offer.lease_s / 3))
            self._hub.send(offer.worker_id, offer.epoch, wire.Renew(offer.lease_id))
