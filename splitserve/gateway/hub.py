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
from splitserve.latency.model import StepModel, StepModelState
from splitserve.router.grain import KVShape
from splitserve.router.router import Router

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
    slot: int  # its row in the fleet
    model: StepModel
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


class WorkerHub:
    """Owns the socket. Single-threaded: everything runs in the event loop."""

    def __init__(
        self, endpoint: str, clock: Clock, identity: ModelIdentity, policy: str = "cost"
    ) -> None:
        self.endpoint = endpoint
        self.workers: dict[str, WorkerHandle] = {}
        self.num_gaps = 0
        self.rates = Rates()
        self.router = Router(policy)
        self.fleet, self.index = self.router.fleet, self.router.index
        self.bytes_per_token = 0.0  # of KV
        self._models: dict[str, StepModel] = {}  # by worker, through its restarts
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
        self.fleet.remove(worker_id)
        waiter = self._check_waiters.pop(worker_id, None)
        if waiter is not None and not waiter.done():
            waiter.set_exception(
                WorkerLost(f"{worker_id} {reason} when its invariants were checked.")
            )
        for leg in list(handle.legs.values()):
            leg.listener.on_lost(reason)
        handle.legs.clear()
        self._tell_change()

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
        self.fleet.legs[handle.slot] += 1
        self.fleet.pending[handle.slot] += num_pending
        return True

    def close_leg(self, worker_id: str, request_id: str, *, abort: bool) -> None:
        """Stop listening; with `abort` the worker forgets the leg at its next step boundary."""
        handle = self.workers.get(worker_id)
        if handle is None:
            return
        known = handle.legs.pop(request_id, None)
        if known is None:
            return
        self.fleet.legs[handle.slot] -= 1
        self.fleet.pending[handle.slot] -= known.num_pending
        if abort:
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

    def latency_models(self) -> dict[str, StepModelState]:
        """Of each live worker."""
        return {name: handle.model.state() for name, handle in sorted(self.workers.items())}

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
        if hello.worker_id in self.workers:  # the same epoch once more
            self.lost(hello.worker_id, hello.epoch, "connected anew")
            self.expect(hello.worker_id, hello.epoch)
        model = self._model_of(hello)
        now = self._clock.now()
        self.bytes_per_token = hello.format.block_bytes / hello.format.block_size
        self.workers[hello.worker_id] = WorkerHandle(
            hello,
            address,
            self.fleet.add(
                hello.worker_id,
                hello.role,
                now,
                num_blocks=hello.num_blocks,
                block_size=hello.format.block_size,
                budget=hello.max_batched_tokens,
                model=model,
            ),
            model,
            now,
            wire.View(free_blocks=hello.num_blocks, total_blocks=hello.num_blocks),
        )
        self._introduce(hello)
        self._tell_change()

    def _model_of(self, hello: wire.Hello) -> StepModel:
        """Of the worker as it was before it died; else what others of its role have taught."""
        known = self._models.get(hello.worker_id)
        if known is None:
            known = self._models[hello.worker_id] = StepModel()
            for other in self.workers.values():
                if other.hello.role is hello.role and other.model.is_fitted:
                    known.begin_as(other.model)
                    break
        return known

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
        self.fleet.set_view(handle.slot, frame.view, handle.last_frame_s)
        if frame.step_tokens and handle.model.add(
            frame.step_tokens, frame.step_context, frame.step_s
        ):
            self.fleet.set_model(handle.slot, handle.model)
        self.index.add(handle.worker_id, frame.cached)
        self.index.remove(handle.worker_id, frame.evicted)
        legs = handle.legs
        for token in frame.tokens:
            leg = legs.get(token.request_id)
            if leg is not None:
                if leg.num_pending:
                    self.fleet.pending[handle.slot] -= leg.num_pending
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
