"""A decode leg that is opened while its prefill goes on, and gets the KV part by part."""

from __future__ import annotations

from splitserve import wire
from splitserve.gateway.hub import WorkerHub
from splitserve.gateway.legs import HeldOffer, LegStream


class EarlyDecode:
    """Opened when prefill starts to compute, not while it queues: its blocks are reserved by then
    (design 3.6). Whatever becomes of it, the offer at the end has all the KV."""

    def __init__(self, hub: WorkerHub, grain: wire.Grain, push: bool) -> None:
        self.grain = grain
        self.push = push
        self._hub = hub
        self._stream: LegStream | None = None
        self._held: HeldOffer | None = None
        self.num_parts = 0

    @property
    def is_open(self) -> bool:
        return self._stream is not None

    def begin(self, stream: LegStream, source: LegStream) -> None:
        """stream: of the decode leg; source: of the prefill leg, which learns where to push."""
        self._stream = stream

        def tell_source(landing: wire.Landing) -> None:
            message = wire.Land(source.request_id, landing)
            self._hub.send_to_leg(source.worker_id, source.request_id, message)

        stream.on_landed = tell_source

    def deliver(self, part: wire.Part) -> None:
        """Pass a part on, and keep its lease alive until the offer takes over."""
        if self._held is None:
            self._held = HeldOffer(self._hub, part)
        if self._stream is not None:
            self.num_parts += 1
            message = wire.Deliver(self._stream.request_id, part)
            self._hub.send_to_leg(self._stream.worker_id, self._stream.request_id, message)

    def complete(self, offer: wire.Offer) -> LegStream | None:
        """Give the leg its offer; its stream is the caller's from now on. None if it had none."""
        stream, self._stream = self._stream, None
        self._settle(still_held=offer.lease_id)
        if stream is not None:
            message = wire.Complete(stream.request_id, offer)
            self._hub.send_to_leg(stream.worker_id, stream.request_id, message)
        return stream

    def close(self) -> None:
        """There will be no offer, or it has been given."""
        self._settle(still_held=None)
        if self._stream is not None:
            self._stream.close()
            self._stream = None

    def _settle(self, still_held: str | None) -> None:
        if self._held is not None:
            self._held.settle(release=self._held.offer.lease_id != still_held)
            self._held = None
