"""The gateway's side of the wire: one ROUTER socket, who is connected, which legs run where.

A worker counts as live from its Hello until the supervisor says that its process is gone. Frames
are numbered per epoch; a gap is re-requested and nothing after it is used before it is filled.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
import zmq

from splitserve import wire
from splitserve.clock import Clock
from splitserve.errors import FormatMismatch, WorkerLost
from splitserve.gateway.rates import Rates
from splitserve.kv.format import ModelIdentity
from splitserve.router.candidates import Candidate
from splitserve.router.grain import KVShape
from splitserve.router.prefix_index import PrefixIndex

log = logging.getLogger(__name__)

MET_AHEAD = 8  # workers, up to which each meets each


class LegListener(Protocol):
    """Whoever follows one leg. Called in the event loop; must not block."""

    def on_token(self, token: wire.Token) -> None: ...

    def on_notice(self, notice: wire.Notice) -> None: ...

    def on_lost(self, reason: str) -> None: ...


@dataclass(slots=True)
class _Leg:
    listener: LegListener
    num_pending: int  # prompt tokens not yet known to be computed


@dataclass(slots=True, eq=False)
class WorkerHandle:
    """One live worker epoch."""

    hello: wire.Hello
    address: bytes
    last_frame_s: float
    view: wire.View = wire.View()  # noqa: RUF009
    next_frame: int = 0
    legs: dict[str, _Leg] = field(default_factory=dict)
    num_frames: int = 0
    step_s: float = 0.0  # engine time, summed
    num_step_tokens: int = 0
    tiers: list[wire.TierView] = field(default_factory=list)

    @property
    def worker_id(self) -> str:
        return self.hello.worker_id

    def candidate(self, now_s: float) -> Candidate:
        return Candidate(
            worker_id=self.hello.worker_id,
            role=self.hello.role,
            view=self.view,
            num_legs=len(self.legs),
            pending_tokens=sum(leg.num_pending for leg in self.legs.values()),
            num_blocks=self.hello.num_blocks,
            silent_s=now_s - self.last_frame_s,
        )


class WorkerHub:
    """Owns the socket. Single-threaded: everything runs in the event loop."""

    def __init__(self, endpoint: str, clock: Clock, identity: ModelIdentity) -> None:
        self.endpoint = endpoint
        self.workers: dict[str, WorkerHandle] = {}
        self.draining: set[str] = set()
        self.num_gaps = 0
        self.rates = Rates()
        self.index = PrefixIndex()
        self.num_hints_failed = 0
        self.identity_digest = identity.digest()
        self._clock = clock
        self._identity = identity
        self._expected: dict[str, str] = {}
        self._waiters: list[asyncio.Future[None]] = []
        self._check_waiters: dict[str, asyncio.Future[bool]] = {}
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.bind(endpoint)
        self._fd = int(self._socket.getsockopt(zmq.FD))
        self._loop: asyncio.AbstractEventLoop | None = None
        self.on_change: Callable[[], None] = lambda: None

    def start(self) -> None:
        """Begin to read; call from the event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._drain)
        self._drain()

    def close(self) -> None:
        if self._loop is not None:
            self._loop.remove_reader(self._fd)
        self._socket.close()
        self._context.term()

    # --- who is there

    def expect(self, worker_id: str, epoch: str) -> None:
        """The supervisor started this epoch; Hellos of any other are turned away."""
        self._expected[worker_id] = epoch

    def lost(self, worker_id: str, epoch: str, reason: str) -> None:
        """The process is gone, or about to be known to be: its connection is closed. What it sent
        before is read first; then its legs hear of it."""
        if self._loop is not None:
            self._drain()
        handle = self.workers.get(worker_id)
        if self._expected.get(worker_id) == epoch:
            del self._expected[worker_id]
        if handle is None or handle.hello.epoch != epoch:
            return
        del self.workers[worker_id]
        self.index.drop(worker_id)
        waiter = self._check_waiters.pop(worker_id, None)
        if waiter is not None and not waiter.done():
            waiter.set_exception(
                WorkerLost(f"{worker_id} {reason} when its invariants were checked.")
            )
        for leg in list(handle.legs.values()):
            leg.listener.on_lost(reason)
        handle.legs.clear()
        self._tell_change()

    def candidates(self) -> list[Candidate]:
        """Live workers that take new legs."""
        now = self._clock.now()
        return [
            handle.candidate(now)
            for handle in self.workers.values()
            if handle.worker_id not in self.draining
        ]

    def kv_shape(self) -> KVShape | None:
        """Of a worker that prefills; None if there is none, or who decodes has another format: its
        blocks are converted, which is done for a whole handoff."""
        if len({handle.hello.format for handle in self.workers.values()}) > 1:
            return None
        for handle in self.workers.values():
            if handle.hello.role is not wire.Role.DECODE:
                kv_format = handle.hello.format
                return KVShape(
                    bytes_per_token=kv_format.block_bytes / kv_format.block_size,
                    num_layers=kv_format.num_layers,
                    chunk_tokens=handle.hello.max_batched_tokens,
                )
        return None

    async def wait_for_change(self, timeout_s: float) -> None:
        """Until a worker comes or goes; raise TimeoutError."""
        future = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        finally:
            if future in self._waiters:
                self._waiters.remove(future)

    # --- legs

    def open_leg(
        self, worker_id: str, submit: wire.Submit, listener: LegListener, num_pending: int
    ) -> bool:
        """Send a leg to a worker and listen to it. False if the worker is gone."""
        handle = self.workers.get(worker_id)
        if handle is None:
            return False
        if not self._send(handle, submit):
            self.lost(worker_id, handle.hello.epoch, "closed its connection")
            return False
        handle.legs[submit.request_id] = _Leg(listener, num_pending)
        return True

    def close_leg(self, worker_id: str, request_id: str, *, abort: bool) -> None:
        """Stop listening; with `abort` the worker forgets the leg at its next step boundary."""
        handle = self.workers.get(worker_id)
        if handle is None:
            return
        known = handle.legs.pop(request_id, None)
        if abort and known is not None:
            self._send(handle, wire.Abort(request_id))

    def send_to_leg(self, worker_id: str, request_id: str, message: wire.ToWorker) -> None:
        """Send to the worker that has this leg; nothing if the leg is lost."""
        handle = self.workers.get(worker_id)
        if handle is not None and request_id in handle.legs:
            self._send(handle, message)

    def send(self, worker_id: str, epoch: str, message: wire.ToWorker) -> bool:
        """Send to this epoch of a worker; False if it is gone."""
        handle = self.workers.get(worker_id)
        if handle is None or handle.hello.epoch != epoch:
            return False
        return self._send(handle, message)

    async def check(self, worker_id: str, timeout_s: float = 30.0) -> bool:
        """Have a worker assert its invariants; returns whether it is idle. A failed invariant
        kills the worker, which raises here."""
        handle = self.workers[worker_id]
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._check_waiters[worker_id] = future
        self._send(handle, wire.Check())
        async with asyncio.timeout(timeout_s):
            return await future

    # --- inside

    def _send(self, handle: WorkerHandle, message: wire.ToWorker) -> bool:
        try:
            self._socket.send_multipart([handle.address, *wire.encode(message)], zmq.NOBLOCK)
        except zmq.ZMQError as error:
            log.warning("%s can't be reached: %s", handle.worker_id, error)
            return False
        finally:
            # The descriptor is edge-triggered: after a send, what has arrived is not announced.
            assert self._loop is not None
            self._loop.call_soon(self._drain)
        return True

    def _drain(self) -> None:
        """Read all that is there."""
        while not self._socket.closed:
            try:
                address, *parts = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            try:
                message = wire.decode_to_gateway(parts)
            except (msgspec.MsgspecError, FormatMismatch) as error:
                log.error("unreadable message from worker %r: %s", address, error)
                continue
            if isinstance(message, wire.Hello):
                self._welcome(address, message)
            else:
                self._take_frame(address, message)

    def _welcome(self, address: bytes, hello: wire.Hello) -> None:
        if self._expected.get(hello.worker_id) != hello.epoch:
            log.warning("a worker %s of epoch %s is not ours", hello.worker_id, hello.epoch)
            return
        if hello.identity != self._identity:
            log.error(
                "worker %s serves %s, the gateway %s",
                hello.worker_id,
                hello.identity,
                self._identity,
            )
            return
        self.workers[hello.worker_id] = WorkerHandle(
            hello,
            address,
            self._clock.now(),
            wire.View(free_blocks=hello.num_blocks, total_blocks=hello.num_blocks),
        )
        self._introduce(hello)
        self._tell_change()

    def _introduce(self, new: wire.Hello) -> None:
        """Tell those that may read another's KV to shake hands: who decodes reads of who prefills.
        By hints anybody may read of anybody; a pool costs its reader page tables (1/500 of it), so
        among many workers that waits for the first hint."""
        are_few = len(self.workers) <= MET_AHEAD
        for other in [handle.hello for handle in self.workers.values()]:
            for source, reader in ((new, other), (other, new)):
                hands_over = (
                    source.role is not wire.Role.DECODE and reader.role is not wire.Role.PREFILL
                )
                if source is not reader and (hands_over or are_few):
                    message = wire.Meet(source.worker_id, source.epoch, source.address)
                    self.send(reader.worker_id, reader.epoch, message)

    def _take_frame(self, address: bytes, frame: wire.Frame) -> None:
        worker_id, _, epoch = address.decode().partition("/")
        handle = self.workers.get(worker_id)
        if handle is None or handle.hello.epoch != epoch:
            return
        handle.last_frame_s = self._clock.now()
        if frame.number != handle.next_frame:
            if frame.number > handle.next_frame:
                self.num_gaps += 1
                self._send(handle, wire.Resend(handle.next_frame))
            return
        handle.next_frame += 1
        handle.num_frames += 1
        handle.view = frame.view
        handle.step_s += frame.step_s
        handle.num_step_tokens += frame.step_tokens
        handle.tiers = frame.tiers or handle.tiers
        self.index.add(handle.worker_id, frame.cached)
        self.index.remove(handle.worker_id, frame.evicted)
        legs = handle.legs
        for token in frame.tokens:
            leg = legs.get(token.request_id)
            if leg is not None:
                leg.num_pending = 0
                leg.listener.on_token(token)
        for notice in frame.notices:
            self._take_notice(handle, notice)

    def _take_notice(self, handle: WorkerHandle, notice: wire.Notice) -> None:
        if isinstance(notice, wire.Checked):
            waiter = self._check_waiters.pop(handle.worker_id, None)
            if waiter is not None and not waiter.done():
                waiter.set_result(notice.idle)
            return
        leg = handle.legs.get(notice.request_id)
        if leg is not None:
            leg.listener.on_notice(notice)
        elif isinstance(notice, wire.Offered):
            # Its request was given up between the last token and the offer.
            self._send(handle, wire.Release(notice.offer.lease_id))
        elif isinstance(notice, wire.PartReady):
            self._send(handle, wire.Release(notice.part.lease_id))

    def _tell_change(self) -> None:
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            if not future.done():
                future.set_result(None)
        self.on_change()
