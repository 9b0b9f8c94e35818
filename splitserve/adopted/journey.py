"""One prompt's journey over adopted servers: prefill there, decode here, again elsewhere.

What the gateway can't have proven of a foreign engine's KV it bounds: an offer is used once, and
only within a third of the time for which the server keeps it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from splitserve.adopted.asked import Asked
from splitserve.adopted.client import ConnectionLost, TooSlow
from splitserve.adopted.dialect import Prompt, read_leg_one
from splitserve.adopted.events import UsageBody
from splitserve.adopted.fleet import Fleet
from splitserve.adopted.legs import Leg, LegLost, gave_up
from splitserve.adopted.relay import ServerError, StreamRelay, whole_answer
from splitserve.clock import Clock
from splitserve.config import GatewayConfig
from splitserve.errors import (
    Cancelled,
    DeadlineExceeded,
    NoWorker,
    SplitserveError,
    WorkerLost,
)
from splitserve.moments import Moment, Timeline
from splitserve.router.split import decide_split
from splitserve.wire import Leg as LegKind

log = logging.getLogger(__name__)

LAST_BYTES_S = 1.0  # from [DONE] to the end of the reply

Emit = Callable[[bytes], Awaitable[None]]


@dataclass(slots=True)
class Counts:
    """Over all journeys, for the metrics."""

    handoffs: int = 0
    stale_offers: int = 0
    without_offer: int = 0
    resumes: int = 0
    cut_streams: int = 0
    errors_in_streams: int = 0


@dataclass(frozen=True, slots=True)
class Setting:
    """What all journeys share. lease_s: how long a server keeps KV that nobody has fetched."""

    fleet: Fleet
    config: GatewayConfig
    clock: Clock
    lease_s: float
    counts: Counts = field(default_factory=Counts)


@dataclass(frozen=True, slots=True)
class _Offer:
    params: dict[str, Any]
    server_id: str
    until_s: float  # when leg 2 must have been sent


class AdoptedJourney:
    """Run `run` in a task. Events go to `emit`; of an answer that is not streamed, see `answer`."""

    def __init__(
        self, request_id: str, asked: Asked, index: int, setting: Setting, emit: Emit, is_one: bool
    ) -> None:
        """index: of the prompt. is_one: the request has no other prompt."""
        self.timeline = Timeline()
        self.error: SplitserveError | None = None
        self.end_reason: str | None = None
        self.num_retries = 0
        self.answer: dict[str, Any] | None = None
        self.asked = asked
        self._request_id = request_id
        self._suffix = f"-{index}"
        self._setting = setting
        self._emit = emit
        self._prompt = Prompt(asked)
        response_id = None if is_one else request_id
        self.relay = StreamRelay(asked, self._prompt, index, response_id)
        self._response_id = response_id
        self._avoid: set[str] = set()  # servers that failed this request
        self._last_server_id = ""
        self._num_failed_handoffs = 0
        self._arrived_s = setting.clock.now()
        self._waiting_since_s = self._arrived_s
        self.timeline.mark(Moment.ARRIVED, self._arrived_s)

    @property
    def request_id(self) -> str:
        return self._request_id + self._suffix

    @property
    def num_prompt_tokens(self) -> int:
        if self._prompt.ids is not None:
            return len(self._prompt.ids)
        if self.answer is not None:
            return int(self.answer["usage"].get("prompt_tokens") or 0)
        return 0 if self.relay.usage is None else self.relay.usage.prompt_tokens

    def usage(self) -> UsageBody:
        """Of a streamed answer, over all its attempts."""
        last = self.relay.usage
        if last is not None and not self.relay.is_resumed:
            return last
        details = None if last is None else last.prompt_tokens_details
        return UsageBody(self.num_prompt_tokens, self.relay.num_output, details)

    async def run(self) -> None:
        """The whole journey; ends with `end_reason` or `error` set, never raises them.

        Cancelling the task means that the client is gone: connections are closed at once.
        """
        total_s = self._setting.config.deadlines.total_s
        try:
            async with asyncio.timeout(total_s):
                await self._run()
        except TimeoutError:
            self.error = _too_late("whole request", total_s)
        except asyncio.CancelledError:
            pass  # `finish` says so
        except SplitserveError as error:
            self.error = error
        except Exception:
            log.exception("request %s", self.request_id)
            self.error = SplitserveError("Internal error in the gateway.")
        finally:
            self.finish()

    def finish(self) -> None:
        """The task is over; has no effect a second time."""
        if self.timeline.last(Moment.FINISHED) is not None:
            return
        if self.error is None and self.end_reason is None:
            self.error = Cancelled("Nobody reads this answer any more.")
        if self.answer is None:
            self.timeline.num_output = self.relay.num_output
        self.timeline.mark(Moment.FINISHED, self._now())

    async def _run(self) -> None:
        while self.end_reason is None:
            try:
                await self._attempt()
            except LegLost as lost:
                self._count_retry(lost)
                if self.relay.started:
                    self._require_resumable(lost)

    async def _attempt(self) -> None:
        setting = self._setting
        self.relay.begin()
        if self.asked.one_worker:
            reason, is_split = self.asked.one_worker, False
        else:
            decision = decide_split(
                setting.config.split,
                self._prompt.num_tokens,
                setting.config.local_prefill_tokens,
                setting.fleet.router,
                self._num_failed_handoffs,
            )
            reason, is_split = decision.reason, decision.split
        self.timeline.notes.append(reason)
        if is_split:
            offer = await self._prefill()
            if offer is not None:
                await self._fetch_and_answer(offer)
                return
        await self._answer_on(LegKind.WHOLE, self._prompt.whole())

    # --- the legs

    async def _prefill(self) -> _Offer | None:
        """Leg 1; None if the server keeps nothing to be fetched."""
        deadlines = self._setting.config.deadlines
        server_id = await self._pick(LegKind.PREFILL)
        try:
            async with Leg(self._fleet, self._fleet.servers[server_id], self._num_tokens) as leg:
                await self._send(leg, self._prompt.leg_one(), Moment.PREFILL_QUEUED)
                self.timeline.mark(Moment.PREFILL_STARTED, self._now(), server_id)
                limit_s = self._limit_s(deadlines.prefill_queue_s)
                await leg.status(limit_s)
                reply = read_leg_one(await leg.body(limit_s))
                leg.note_first_token()
        except LegLost:
            self._num_failed_handoffs += 1
            raise
        now = self._now()
        self.timeline.mark(Moment.PREFILL_ENDED, now, server_id)
        if self._prompt.ids is None:
            self._prompt.ids = reply.prompt_ids
        if reply.offer is None:
            self._setting.counts.without_offer += 1
            self.timeline.notes.append(f"{server_id} offers no KV: answered on one server")
            return None
        return _Offer(reply.offer, server_id, now + self._setting.lease_s / 3)

    async def _fetch_and_answer(self, offer: _Offer) -> None:
        """Leg 2. The offer is spent with the first byte that is sent of it, whatever becomes of the
        leg; a server that could not be reached did not see it."""
        body = self._prompt.leg_two(offer.params)
        while True:
            server_id = await self._pick(LegKind.DECODE, but=offer.server_id, until_s=offer.until_s)
            if self._now() >= offer.until_s:
                self._setting.counts.stale_offers += 1
                raise LegLost("no decode server within a third of the KV's lease")
            try:
                await self._answer_on(LegKind.DECODE, body, server_id)
                self._setting.counts.handoffs += 1
                return
            except LegLost as lost:
                if not lost.not_sent:
                    self._num_failed_handoffs += not self.relay.started
                    raise
                self._count_retry(lost)
                self.timeline.notes.append("the offer was not seen and still holds")

    async def _answer_on(self, kind: LegKind, body: bytes, server_id: str = "") -> None:
        """A leg that gives the answer."""
        server_id = server_id or await self._pick(kind)
        server = self._fleet.servers[server_id]
        # of a decode leg the prompt is computed
        num_tokens = 0 if kind is LegKind.DECODE else self._num_tokens
        async with Leg(self._fleet, server, num_tokens) as leg:
            moment = Moment.DECODE_QUEUED if kind is LegKind.DECODE else Moment.PREFILL_QUEUED
            await self._send(leg, body, moment)
            try:
                if self.asked.stream:
                    await self._follow(leg)
                else:
                    await self._collect(leg)
            except ServerError as error:
                self._setting.counts.errors_in_streams += 1
                self.timeline.notes.append(f"an error inside the reply of {server_id}: {error}")
                # KV that can't be fetched is told by who wanted it
                is_blamed = kind is not LegKind.DECODE or leg.has_first_token
                raise leg.refusal(error.error, error.status, is_blamed=is_blamed) from None

    async def _follow(self, leg: Leg) -> None:
        deadlines = self._setting.config.deadlines
        relay = self.relay
        await leg.status(self._limit_s(deadlines.prefill_queue_s))
        limit_s = self._limit_s(deadlines.prefill_queue_s)
        try:
            while data := await leg.read(limit_s):
                events = relay.feed(data)
                if events:
                    self._note_tokens(leg)
                    await self._emit(events)
                if relay.failure is not None:
                    raise relay.failure
                if relay.is_over:
                    relay.finish()
                    limit_s = LAST_BYTES_S  # read out, so that the connection can be used again
                else:
                    limit_s = deadlines.token_gap_s if relay.started else self._limit_s(limit_s)
        except (ConnectionLost, TooSlow):
            if not relay.is_whole:
                raise
        relay.finish()
        self.end_reason = relay.end_reason
        self.timeline.cached_tokens = relay.usage.cached_tokens if relay.usage else None

    async def _collect(self, leg: Leg) -> None:
        """An answer that comes in one piece: until then there is nothing to tell a slow server
        from a stuck one, but that it answers its polls."""
        left_s = self._arrived_s + self._setting.config.deadlines.total_s - self._now()
        await leg.status(left_s)
        body = await leg.body(left_s)
        self.answer = whole_answer(body, self.asked, self._response_id)
        leg.note_first_token()
        reasons = {choice["finish_reason"] for choice in self.answer["choices"]}
        self.end_reason = "length" if reasons == {"length"} else "stop"
        usage = self.answer["usage"]
        self.timeline.num_output = int(usage.get("completion_tokens") or 0)
        details = usage.get("prompt_tokens_details") or {}
        self.timeline.cached_tokens = details.get("cached_tokens")

    # --- what they share

    async def _send(self, leg: Leg, body: bytes, moment: Moment) -> None:
        server_id = leg.server.server_id
        self._last_server_id = server_id
        now = self._now()
        self.timeline.mark(Moment.PICKED, now, server_id)
        self.timeline.mark(moment, now, server_id)
        # vLLM puts its own prefix before the id, so that it is the request's again
        _, _, bare_id = self._request_id.partition("-")
        connect_s = self._setting.config.deadlines.connect_s
        await leg.send(self.asked.path, bare_id, body, connect_s)

    async def _pick(self, kind: LegKind, but: str = "", until_s: float | None = None) -> str:
        """The best server, waiting for one to come up if there is none."""
        limit_s = self._arrived_s + self._setting.config.deadlines.first_token_s
        if self.relay.started:
            limit_s = self._waiting_since_s + self._setting.config.deadlines.token_gap_s
        while True:
            avoid = frozenset({*self._avoid, but} if but else self._avoid)
            picked = self._fleet.pick(kind, self._num_tokens, avoid)
            if picked is not None and picked[0] != but:
                self.timeline.notes.append(picked[1])
                return picked[0]
            if picked is not None:
                self._num_failed_handoffs = 2  # nowhere to hand over to: the next attempt is local
                raise LegLost(f"{but} is the only server that decodes")
            left_s = (limit_s if until_s is None else min(limit_s, until_s)) - self._now()
            try:
                await self._fleet.wait_for_change(max(0.0, left_s))
            except TimeoutError:
                if until_s is not None and self._now() >= until_s and self._now() < limit_s:
                    self._setting.counts.stale_offers += 1
                    self._num_failed_handoffs += 1
                    raise LegLost("no decode server within a third of the KV's lease") from None
                raise NoWorker(f"No server for the {kind.value} leg came up in time.") from None

    def _limit_s(self, phase_s: float) -> float:
        """How long to wait for a leg's first sign; past the first token's own deadline it is the
        client's turn to act."""
        first_token_s = self._setting.config.deadlines.first_token_s
        if self.relay.started:
            return phase_s
        left_s = self._arrived_s + first_token_s - self._now()
        if left_s <= 0:
            raise _too_late("first token", first_token_s)
        return min(phase_s, left_s)

    def _note_tokens(self, leg: Leg) -> None:
        now = self._now()
        leg.note_first_token()
        self._waiting_since_s = now
        timeline, server_id = self.timeline, leg.server.server_id
        if timeline.first(Moment.FIRST_TOKEN) is None:
            timeline.mark(Moment.FIRST_TOKEN, now, server_id)
        elif timeline.first(Moment.SECOND_TOKEN) is None:
            timeline.mark(Moment.SECOND_TOKEN, now, server_id)

    def _count_retry(self, lost: LegLost) -> None:
        """Spend one retry of the budget, or raise what the client is told."""
        deadlines = self._setting.config.deadlines
        self.num_retries += 1
        self._avoid.add(self._last_server_id)
        self.timeline.notes.append(f"retry {self.num_retries}: {lost}")
        log.warning("request %s: %s", self.request_id, lost)
        if not self.relay.started and self._now() >= self._arrived_s + deadlines.first_token_s:
            raise _too_late("first token", deadlines.first_token_s)
        if self.num_retries > self._setting.config.retries:
            raise gave_up(lost, self.num_retries)
        self.timeline.attempt += 1
        self._waiting_since_s = self._now()

    def _require_resumable(self, lost: LegLost) -> None:
        """Raise WorkerLost unless what the client has can be gone on from."""
        if not self.relay.can_resume:
            self._setting.counts.cut_streams += 1
            raise WorkerLost(
                f"The server was lost in the middle of an answer that can't be resumed: {lost}.",
                advice="Ask again. Greedy requests (temperature 0, with max_tokens and without "
                "stop, penalties, tools or formats) are resumed.",
            )
        self._setting.counts.resumes += 1
        num = len(self._prompt.output_ids)
        self.timeline.notes.append(f"resumed after {num} tokens, from their ids")

    @property
    def _fleet(self) -> Fleet:
        return self._setting.fleet

    @property
    def _num_tokens(self) -> int:
        return self._prompt.num_tokens

    def _now(self) -> float:
        return self._setting.clock.now()


def _too_late(phase: str, limit_s: float) -> DeadlineExceeded:
    return DeadlineExceeded(f"Deadline of the {phase} exceeded: {limit_s:g} s.")
