"""One request's whole journey, written once: pick, prefill leg, handoff, decode leg, retry, resume.

The gateway holds the prompt's and the output's ids, so whatever dies, the rest of the answer can be
computed again from them; sampling is a pure function of them, so it is the same answer. A journey
runs as a task of its own and collects ids; whoever streams them to the client reads at its pace.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass

from splitserve import wire
from splitserve.clock import Clock
from splitserve.config import GatewayConfig
from splitserve.errors import (
    Cancelled,
    DeadlineExceeded,
    SplitserveError,
    TransferFailed,
    WorkerFault,
    WorkerLost,
)
from splitserve.gateway.early import EarlyDecode
from splitserve.gateway.hub import WorkerHub
from splitserve.gateway.legs import HeldOffer, LegLost, LegStream
from splitserve.gateway.noting import note_fetched, note_loaded, note_prefilled, note_started
from splitserve.gateway.picking import Picker
from splitserve.moments import Moment, Timeline
from splitserve.router.grain import decide_grain
from splitserve.sampling import Logprobs, Sampling
from splitserve.wire import Leg

log = logging.getLogger(__name__)

TRANSFER_BYTES_PER_S = 1e9  # prior for the transfer's deadline


@dataclass(frozen=True, slots=True)
class Generation:
    """What a journey has to produce: one choice of one prompt.

    leader: another choice of the same prompt. This one starts when the leader has its first token,
    on the same worker, and so finds the prompt in the prefix cache.
    """

    request_id: str
    prompt_ids: list[int]
    sampling: Sampling
    salt: str = ""
    leader: Journey | None = None


class Journey:
    """Run `run` in a task; read `output_ids` and `end_reason` or `error` after `wait_beyond`."""

    def __init__(
        self, request: Generation, hub: WorkerHub, config: GatewayConfig, clock: Clock
    ) -> None:
        self.request = request
        self.output_ids: list[int] = []
        self.logprobs: list[Logprobs] = []  # one per output id, if asked for
        self.end_reason: str | None = None
        self.error: SplitserveError | None = None
        self.timeline = Timeline()
        self.num_retries = 0
        self._hub = hub
        self._config = config
        self._clock = clock
        self._num_legs = 0
        self._num_failed_transfers = 0
        self._changed = asyncio.Event()
        self._arrived_s = clock.now()
        self._waiting_since_s = self._arrived_s  # the last token, or the last retry
        self._picker = Picker(
            hub, config, clock, self.timeline, request.salt, request.sampling.max_tokens
        )
        self.timeline.mark(Moment.ARRIVED, self._arrived_s)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def is_over(self) -> bool:
        return self.end_reason is not None or self.error is not None

    async def wait_beyond(self, num_tokens: int) -> None:
        """Until there are more than `num_tokens` output ids, or the journey is over."""
        while len(self.output_ids) <= num_tokens and not self.is_over:
            self._changed.clear()
            await self._changed.wait()

    def stop(self) -> None:
        """The reader found a stop string: the answer is whole, and the task may be cancelled."""
        if not self.is_over:
            self.end_reason = "stop"

    async def run(self) -> None:
        """The whole journey; ends with `end_reason` or `error` set, never raises them.

        Cancelling the task means that the client is gone: both workers are told at once.
        """
        try:
            async with asyncio.timeout(self._config.deadlines.total_s):
                await self._run()
        except TimeoutError:
            self.error = self._too_late("whole request", self._config.deadlines.total_s)
        except asyncio.CancelledError:
            pass  # `finish` says so
        except SplitserveError as error:
            self.error = error
        except Exception:
            log.exception("request %s", self.request.request_id)
            self.error = SplitserveError("Internal error in the gateway.")
        finally:
            self.finish()

    def finish(self) -> None:
        """The task is over; has no effect a second time. The task's owner calls it too: a task that
        is cancelled before its first step never enters `run`."""
        if self.timeline.last(Moment.FINISHED) is not None:
            return
        if not self.is_over:
            self.error = Cancelled("Nobody reads this answer any more.")
        self.timeline.num_output = len(self.output_ids)
        self.timeline.mark(Moment.FINISHED, self._clock.now())
        self._changed.set()

    async def _run(self) -> None:
        if self.request.leader is not None:  # its worker has the prompt
            await self.request.leader.wait_beyond(0)
            first = self.request.leader.timeline.workers(Moment.FIRST_TOKEN)
            self._picker.near = frozenset(first)
        while self.end_reason is None:
            try:
                await self._attempt()
            except LegLost as lost:
                self._count_retry(str(lost))

    async def _attempt(self) -> None:
        """Compute what is missing of the answer, split or on one worker; raise LegLost."""
        tokens = self._tokens
        if not self._picker.decide_split(tokens, self._num_failed_transfers).split:
            await self._prefill(Leg.WHOLE)
            return
        early = self._early(len(tokens))
        try:
            offer = await self._prefill(Leg.PREFILL, early)
            if offer is not None:
                await self._decode(offer, early)
        finally:
            if early is not None:
                early.close()

    def _early(self, num_tokens: int) -> EarlyDecode | None:
        """If KV is to move while prefill goes on: the decode worker is picked before its end."""
        hub = self._hub
        shape = hub.kv_shape()
        if shape is None:
            return None
        decision = decide_grain(
            self._config.handoff,
            num_tokens,
            shape,
            hub.rates.transfer_bytes_per_s,
            hub.rates.prefill_tokens_per_s,
        )
        self.timeline.notes.append(decision.reason)
        self.timeline.exposed_predicted_s = {
            grain.value: seconds for grain, seconds in decision.exposed_s.items()
        }
        if decision.grain is wire.Grain.REQUEST:
            return None
        return EarlyDecode(hub, decision.grain, decision.push)

    # --- the two legs

    async def _prefill(self, leg: Leg, early: EarlyDecode | None = None) -> wire.Offer | None:
        """A leg that begins with a prefill: the whole answer, or until the KV is offered."""
        deadlines = self._config.deadlines
        stream = await self._open(leg, None, early.grain if early else wire.Grain.REQUEST)
        started = False
        try:
            while True:
                limit_s = self._token_limit_s()
                if not started:
                    limit_s = min(limit_s, stream.opened_s + deadlines.prefill_queue_s)
                item = await self._next(stream, limit_s, "prefill queue" if not started else None)
                match item:
                    case wire.Started():
                        started = True
                        note_started(self.timeline, stream, item)
                        # a prompt of one step has its token by now: nothing to hide behind
                        is_over = len(self.output_ids) > stream.num_known
                        if early is not None and not early.is_open and not is_over:
                            self._open_early(early, stream)
                    case wire.PartReady(part=part):
                        if early is not None:
                            early.deliver(part)
                            self.timeline.num_parts = early.num_parts
                    case wire.PrefillEnded():
                        note_prefilled(self.timeline, self._hub, stream, item)
                    case wire.Loaded():
                        note_loaded(self.timeline, self._hub, item)
                    case wire.HintFailed():
                        self._picker.note_hint_failed(item, self._tokens)
                    case wire.Token():
                        started = True
                        self._take_token(item, stream)
                    case wire.Offered(offer=offer):
                        stream.close(abort=False)
                        return offer
                    case wire.End():
                        self._take_end(item)
                        return None
                    case wire.Preempted():
                        self.timeline.num_preemptions += 1
        finally:
            stream.close()

    def _open_early(self, early: EarlyDecode, source: LegStream) -> None:
        """Open the decode leg beside the prefill, if another worker than that can take it now."""
        worker_id = self._picker.pick_now(Leg.DECODE, self._tokens, but=source.worker_id)
        if worker_id is not None:
            stream = self._submit(worker_id, Leg.DECODE, None, early.grain, early.push)
            early.begin(stream, source)

    async def _decode(self, offer: wire.Offer, early: EarlyDecode | None) -> None:
        """Fetch the offered KV on a decode worker and follow it to the end of the answer.

        As long as nothing was computed from it, the offer survives the loss of a decode worker.
        """
        held = HeldOffer(self._hub, offer)
        try:
            begun = early.complete(offer) if early is not None else None
            while True:
                stream = begun or await self._open(Leg.DECODE, offer)
                begun = None
                try:
                    await self._follow(stream, offer, held)
                    return
                except LegLost as lost:
                    if not held.is_needed:
                        raise
                    self._count_retry(str(lost))
                    self.timeline.notes.append("the offer still holds")
                finally:
                    stream.close()
        finally:
            held.settle(release=True)

    async def _follow(self, stream: LegStream, offer: wire.Offer, held: HeldOffer) -> None:
        """Follow one decode leg; settles the offer as soon as it is needed no more."""
        size = len(offer.block_ids) * offer.format.block_bytes
        transfer_s = max(self._config.deadlines.transfer_s, 10 * size / TRANSFER_BYTES_PER_S)
        transfer_end_s: float | None = None
        while True:
            limit_s = self._token_limit_s()
            if transfer_end_s is not None:
                limit_s = min(limit_s, transfer_end_s)
            item = await self._next(stream, limit_s, None)
            match item:
                case wire.FetchStarted(queued_s=queued_s):
                    start_s = stream.opened_s + queued_s
                    transfer_end_s = self._clock.now() + transfer_s
                    self.timeline.mark(Moment.TRANSFER_STARTED, start_s, stream.worker_id)
                case wire.FetchEnded():
                    transfer_end_s = None
                    held.settle(release=False)
                    note_fetched(self.timeline, self._hub, stream, item, self._clock.now())
                case wire.FetchFailed(reason=reason):
                    held.settle(release=True)
                    self._num_failed_transfers += 1
                    raise LegLost(f"transfer to {stream.worker_id} failed: {reason}")
                case wire.Token():
                    self._take_token(item, stream)
                case wire.End():
                    self._take_end(item)
                    return
                case wire.Preempted():
                    self.timeline.num_preemptions += 1

    # --- what they share

    async def _open(
        self, leg: Leg, offer: wire.Offer | None, grain: wire.Grain = wire.Grain.REQUEST
    ) -> LegStream:
        """Submit a leg to the best worker, waiting for one to come up if none lives."""
        worker_id = await self._picker.pick(leg, self._tokens, self._token_limit_s())
        return self._submit(worker_id, leg, offer, grain)

    def _submit(
        self,
        worker_id: str,
        leg: Leg,
        offer: wire.Offer | None,
        grain: wire.Grain,
        push: bool = False,
    ) -> LegStream:
        now = self._clock.now()
        self.timeline.mark(Moment.PICKED, now, worker_id)
        queued = Moment.DECODE_QUEUED if leg is Leg.DECODE else Moment.PREFILL_QUEUED
        self.timeline.mark(queued, now, worker_id)
        request = self.request
        submit = wire.Submit(
            request_id=f"{request.request_id}.{self._num_legs}",
            leg=leg,
            prompt_ids=request.prompt_ids,
            output_ids=list(self.output_ids),
            sampling=request.sampling,
            salt=request.salt,
            offer=offer,
            deadline_s=self._arrived_s + self._config.deadlines.total_s - now,
            grain=grain,
            push=push,
            hints=self._picker.make_hints(worker_id, leg, self._tokens),
        )
        self._num_legs += 1
        pending = 0 if leg is Leg.DECODE else len(self._tokens)
        return LegStream(self._hub, worker_id, submit, pending, now)

    @property
    def _tokens(self) -> list[int]:
        return self.request.prompt_ids + self.output_ids

    async def _next(
        self, stream: LegStream, limit_s: float, phase: str | None
    ) -> wire.Token | wire.Notice:
        """The stream's next item. Past the limit: a deadline that only the client can act upon
        raises DeadlineExceeded; a worker that fell silent in the middle is left (LegLost)."""
        try:
            return await stream.next(limit_s - self._clock.now())
        except TimeoutError:
            deadlines = self._config.deadlines
            if not self.output_ids and self._clock.now() >= self._arrived_s + (
                deadlines.first_token_s
            ):
                raise self._too_late("first token", deadlines.first_token_s) from None
            if phase is not None:
                raise self._too_late(phase, deadlines.prefill_queue_s) from None
            self._picker.silent.add(stream.worker_id)
            raise LegLost(f"{stream.worker_id} was silent for too long") from None

    def _token_limit_s(self) -> float:
        """When the next token must be there. After the first one, each attempt has a whole gap."""
        deadlines = self._config.deadlines
        if not self.output_ids:
            return self._arrived_s + deadlines.first_token_s
        return self._waiting_since_s + deadlines.token_gap_s

    def _take_token(self, token: wire.Token, stream: LegStream) -> None:
        if token.index != len(self.output_ids):
            raise LegLost(
                f"{stream.worker_id} sent token {token.index}, not {len(self.output_ids)}"
            )
        now = self._clock.now()
        self._waiting_since_s = now
        self.output_ids.append(token.token_id)
        if token.logprobs is not None:
            self.logprobs.append(token.logprobs)
        if token.index == 0:
            self.timeline.mark(Moment.FIRST_TOKEN, now, stream.worker_id)
        elif token.index == 1:
            self.timeline.mark(Moment.SECOND_TOKEN, now, stream.worker_id)
        self._changed.set()

    def _take_end(self, end: wire.End) -> None:
        if end.code == TransferFailed.code:
            raise LegLost(end.message)
        if end.reason == "error":
            raise WorkerFault(end.message)
        self.end_reason = end.reason
        self._hub.rates.note_output(len(self.output_ids))
        self._changed.set()

    def _count_retry(self, reason: str) -> None:
        """Spend one retry of the budget, or raise WorkerLost."""
        self.num_retries += 1
        self.timeline.notes.append(f"retry {self.num_retries}: {reason}")
        log.warning("request %s: %s", self.request.request_id, reason)
        if self.num_retries > self._config.retries:
            raise WorkerLost(f"Gave up after {self.num_retries} tries: {reason}.")
        self.timeline.attempt += 1
        self._waiting_since_s = self._clock.now()

    @staticmethod
    def _too_late(phase: str, limit_s: float) -> DeadlineExceeded:
        return DeadlineExceeded(f"Deadline of the {phase} exceeded: {limit_s:g} s.")
