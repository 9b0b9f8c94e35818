"""A worker's line to the gateway: a ZeroMQ DEALER, numbered frames, and the engine loop's wait."""

from __future__ import annotations

import logging
import os
from collections import deque

import msgspec
import zmq

from splitserve import wire
from splitserve.engine.engine import Outbox
from splitserve.errors import FormatMismatch

log = logging.getLogger(__name__)

_FRAMES_KEPT = 4096  # for re-requests


class GatewayLink:
    """Used by the engine thread only, apart from `wake`."""

    def __init__(self, endpoint: str, identity: str) -> None:
        """identity: worker id and epoch, as the ROUTER sees it."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.IDENTITY, identity.encode())
        self._socket.setsockopt(zmq.LINGER, 500)
        # No high-water marks: a frame is never dropped, memory is bounded by max_tokens x streams.
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.connect(endpoint)
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._wake_fd, zmq.POLLIN)
        self._frames: deque[wire.Frame] = deque(maxlen=_FRAMES_KEPT)
        self._next_number = 0

    def say_hello(self, hello: wire.Hello) -> None:
        """The worker is ready for legs and for readers of its KV."""
        self._socket.send_multipart(wire.encode(hello))

    def wake(self) -> None:
        """End the engine thread's `wait`. Any thread."""
        os.eventfd_write(self._wake_fd, 1)

    def wait(self, timeout_s: float) -> None:
        """Until a message, a wake or the timeout."""
        self._poller.poll(int(timeout_s * 1000) + 1)
        try:
            os.eventfd_read(self._wake_fd)
        except BlockingIOError:
            pass

    def receive(self) -> list[wire.ToWorker]:
        """All messages that are there. One that can't be read is logged and dropped: the gateway
        notices by its deadlines."""
        messages: list[wire.ToWorker] = []
        while True:
            try:
                parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            try:
                messages.append(wire.decode_to_worker(parts))
            except (msgspec.MsgspecError, FormatMismatch) as error:
                log.error("unreadable message from the gateway: %s", error)

    def send_frame(self, outbox: Outbox, view: wire.View, tiers: list[wire.TierView]) -> None:
        frame = wire.Frame(
            self._next_number,
            outbox.tokens,
            outbox.notices,
            view,
            outbox.step_s,
            outbox.step_tokens,
            outbox.step_context,
            tiers,
            outbox.cached,
            outbox.evicted,
        )
        self._next_number += 1
        self._frames.append(frame)
        self._socket.send_multipart(wire.encode(frame))

    def resend(self, first: int) -> None:
        """Repeat the frames from `first` on that are still kept."""
        for frame in self._frames:
            if frame.number >= first:
                self._socket.send_multipart(wire.encode(frame))

    def close(self) -> None:
        self._socket.close()
        self._context.term()
        os.close(self._wake_fd)
