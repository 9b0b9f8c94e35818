"""The engine: one step is three calls, `schedule`, `execute`, `update`.

It turns wire messages into sequences and what happens to them into wire notices. It knows no
sockets and no tensors: the worker process hosts it, a test drives it by hand.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from splitserve import wire
from splitserve.clock import Clock
from splitserve.connector.base import Connector
from splitserve.connector.jobs import (
    Asked,
    Event,
    FetchDone,
    FoundDone,
    PushDone,
    SaveDone,
    SealDone,
)
from splitserve.engine.asks import Asks
from splitserve.engine.keeping import Keeping
from splitserve.engine.layers import LayerPush
from splitserve.engine.loading import Loader
from splitserve.engine.reader import Reader
from splitserve.engine.scheduler import Drawn, Scheduler
from splitserve.engine.sequence import Sequence, Status
from splitserve.engine.source import Source
from splitserve.engine.step import PlanItem, Runner, StepPlan, StepResult
from splitserve.errors import DeviceLost, SplitserveError, WorkerFault
from splitserve.kv.keys import root_key
from splitserve.kv.table import BlockTable
from splitserve.sampling import Logprobs

log = logging.getLogger(__name__)

LONG_STEP_TOKENS = 16  # what arrives in a shorter step waits for its end


@dataclass(slots=True)
class Outbox:
    """What the gateway has to hear of, since the last frame."""

    tokens: list[wire.Token] = field(default_factory=list)
    notices: list[wire.Notice] = field(default_factory=list)
    cached: list[bytes] = field(default_factory=list)
    evicted: list[bytes] = field(default_factory=list)
    step_s: float = 0.0
    step_tokens: int = 0
    step_context: int = 0

    def __bool__(self) -> bool:
        return bool(self.tokens or self.notices)


class Engine:
    """One worker's engine. All methods are called by one thread, between steps."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        connector: Connector,
        clock: Clock,
        identity: bytes,
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self.connector = connector
        self.clock = clock
        self.outbox = Outbox()
        self._identity = identity
        self._sequences: dict[str, Sequence] = {}
        self.keeping = Keeping(scheduler.pool, connector)
        self.source = Source(scheduler, connector, self.keeping, clock, self._tell)
        self.reader = Reader(scheduler, connector, clock, self._tell, self._sequences)
        self.loader = Loader(scheduler, connector, clock, self._tell, self._sequences)
        self.asks = Asks(scheduler, connector, clock)
        self._leases_by_request: dict[str, str] = {}
        self._num_arrived = 0
        self.flush: Callable[[], None] = lambda: None
        """Sends the outbox now: the host's, called before and in the middle of a step."""
        self.listen: Callable[[], None] = lambda: None
        """Takes in messages that can't wait for the end of a step: the host's, called in its
        middle."""
        self._deferred: list[Event] = []  # heard of in the middle of a step

    # --- messages

    def submit(self, message: wire.Submit) -> None:
        """Start a leg; what is wrong with it comes back as its End."""
        now = self.clock.now()
        pool = self.scheduler.pool
        sequence = Sequence(
            request_id=message.request_id,
            leg=message.leg,
            prompt_ids=list(message.prompt_ids),
            output_ids=list(message.output_ids),
            sampling=message.sampling,
            table=BlockTable(pool, root_key(self._identity, message.salt)),
            number=self._num_arrived,
            arrived_s=now,
            deadline_s=now + message.deadline_s,
            offer=message.offer,
            grain=message.grain,
            wants_push=message.push,
        )
        self._num_arrived += 1
        try:
            self._check_submit(sequence)
        except SplitserveError as error:
            if sequence.is_fetch:
                self.outbox.notices.append(wire.FetchFailed(sequence.request_id, error.message))
            else:
                self._end(sequence.request_id, "error", error.code, error.message)
            return
        self._sequences[sequence.request_id] = sequence
        if not self.loader.begin(sequence, message.hints):
            self.scheduler.add(sequence)

    def _check_submit(self, sequence: Sequence) -> None:
        if sequence.request_id in self._sequences:
            raise WorkerFault(f"Request id {sequence.request_id} is in use on this worker.")
        if not sequence.prompt_ids or sequence.num_output_left < 1:
            raise WorkerFault("A leg needs a prompt, and room for at least one more token.")
        pool = self.scheduler.pool
        longest = len(sequence.prompt_ids) + sequence.sampling.max_tokens
        if -(-longest // pool.block_size) > pool.num_blocks:
            raise WorkerFault(
                f"{longest} tokens can't fit a pool of {pool.num_blocks * pool.block_size}."
            )
        if sequence.offer is not None:
            self.reader.check_offer(sequence, sequence.offer)

    def deliver(self, request_id: str, part: wire.Part) -> None:
        self.reader.deliver(request_id, part)

    def land(self, request_id: str, landing: wire.Landing) -> None:
        self.source.land(self._sequences.get(request_id), landing)

    def complete(self, request_id: str, offer: wire.Offer) -> None:
        self.reader.complete(request_id, offer)

    def abort(self, request_id: str) -> None:
        """Forget a request: its sequence, or the lease that it left."""
        sequence = self._sequences.pop(request_id, None)
        if sequence is not None:
            if sequence.status is Status.FETCHING:
                self.connector.worker.cancel_fetch(request_id)
            self._drop(sequence)
        lease_id = self._leases_by_request.pop(request_id, None)
        if lease_id is not None:
            self.scheduler.leases.release(lease_id)

    def release(self, lease_id: str) -> None:
        self.scheduler.leases.release(lease_id)

    def renew(self, lease_id: str) -> None:
        self.scheduler.leases.renew(lease_id, self.clock.now())

    # --- progress

    def pump(self) -> None:
        """Take in what happened outside: ended leases, digests, fetches. Then start fetches."""
        now = self.clock.now()
        self._collect_leases(now)
        deferred, self._deferred = self._deferred, []
        for event in (*deferred, *self.connector.worker.poll()):
            self._take_event(event)
        self.loader.give_up(now)
        self.reader.admit(now)
        self._note_changes(computed=False)

    def _take_event(self, event: Event) -> None:
        match event:
            case SealDone():
                if not self.asks.on_sealed(event):
                    self.source.on_sealed(event)
            case PushDone():
                self.source.on_pushed(event)
            case FetchDone():
                if self.scheduler.end_job(event.request_id):
                    sequence = self._sequences[event.request_id]
                    taker = self.reader if sequence.found is None else self.loader
                    taker.on_fetched(sequence, event)
            case FoundDone():
                self.loader.on_found(event)
            case SaveDone():
                self.keeping.on_saved(event)
                self.source.on_saved(event)
            case Asked():
                self.asks.on_asked(event)

    def step(self) -> bool:
        """One step, if there is anything to compute. False: wait for something from outside."""
        now = self.clock.now()
        plan = self.scheduler.schedule(now)
        self._tell_preempted()
        is_any_ready = self.loader.start()
        if not plan.items:
            return is_any_ready
        self._tell_started(plan, now)
        if self.outbox.notices:
            self.flush()  # others go on by them while this step is computed
        layers = LayerPush(
            plan, self._sequences, self.scheduler.pool.block_size, self.connector.worker
        )
        plan, result = self._execute(plan, layers)
        after = self.clock.now()
        for drawn in self.scheduler.update(plan, result, after):
            self._tell_drawn(drawn, after)
        for filled in self.scheduler.lending.take_filled():
            self.source.seal(filled.sequence, filled.lease, filled.blocks)
        self._note_changes(computed=True)
        self.loader.speeds.note_step(plan.num_tokens, after - now)
        self.outbox.step_s += after - now
        self.outbox.step_tokens += plan.num_tokens
        self.outbox.step_context += plan.context
        return True

    def take_outbox(self) -> Outbox:
        taken, self.outbox = self.outbox, Outbox()
        return taken

    def view(self) -> wire.View:
        scheduler = self.scheduler
        waiting = (*scheduler.waiting, *scheduler.running)
        decoding = [x for x in scheduler.running if x.is_decoding]
        return wire.View(
            waiting=len(scheduler.waiting) + len(scheduler.fetch_queue),
            running=len(scheduler.running),
            fetching=len(scheduler.fetching),
            free_blocks=scheduler.pool.num_available,
            leased_blocks=scheduler.pool.num_leased(),
            quarantined_blocks=scheduler.pool.num_quarantined,
            landing_blocks_quarantined=self.connector.lender.num_quarantined,
            blocks_unsaved=self.keeping.num_unsaved,
            quarantine_age_s=scheduler.pool.quarantine_age_s(self.clock.now()),
            total_blocks=scheduler.pool.num_blocks,
            waiting_tokens=sum(x.num_remaining for x in waiting if not x.is_decoding),
            context_tokens=sum(len(x.prompt_ids) + len(x.output_ids) for x in decoding),
            preemptions=scheduler.num_preemptions,
            admits_prefill=scheduler.admits_prefill,
        )

    def next_deadline_s(self) -> float | None:
        """When the engine has something to do, though nothing happens."""
        deadlines = self.scheduler.leases.next_deadline_s(), self.loader.next_deadline_s()
        return min((one for one in deadlines if one is not None), default=None)

    @property
    def is_idle(self) -> bool:
        """Nothing queued, running, fetching, leased, saved or in quarantine."""
        return (
            not self._sequences
            and self.connector.lender.is_settled
            and self.keeping.is_settled
            and self.scheduler.leases.is_settled
            and not self.scheduler.pool.num_quarantined
        )

    def check(self) -> None:
        """Assert the invariants; when idle, also that every block is free or cached."""
        self._collect_leases(self.clock.now())
        self.scheduler.check()
        self.connector.lender.check()
        if self.is_idle:
            counts = self.scheduler.pool.counts()
            assert counts["free"] + counts["cached"] == self.scheduler.pool.num_blocks, counts
            assert not self._leases_by_request, self._leases_by_request

    # --- inside

    def _note_changes(self, *, computed: bool) -> None:
        cached, evicted = self.keeping.note_changes(computed=computed)
        self.outbox.cached += cached
        self.outbox.evicted += evicted

    def _collect_leases(self, now: float) -> None:
        for lease in self.scheduler.collect_leases(now):
            self._leases_by_request.pop(lease.request_id, None)
            self.source.forget(lease)

    def _execute(
        self, plan: StepPlan, layers: LayerPush | None = None
    ) -> tuple[StepPlan, StepResult]:
        """Run the plan. If the runner raises, run its items one by one, so that only those ends
        that fail alone; writing the same KV again is harmless. A lost device fails them all, here
        and later: that is the process's end, after which another one takes the requests up."""
        try:
            if layers is None or plan.num_tokens < LONG_STEP_TOKENS:
                return plan, self.runner.execute(plan)

            def on_layer(layer: int) -> None:
                self._hear()
                layers.on_layer(layer)

            result = self.runner.execute(plan, on_layer)
            layers.note_whole()
            return plan, result
        except DeviceLost:
            raise
        except Exception as error:
            if len(plan.items) == 1:
                self._fail(plan.items[0].request_id, error)
                return StepPlan(), StepResult([])
            log.exception("a step of %d sequences failed, running each alone", len(plan.items))
        items: list[PlanItem] = []
        results: list[tuple[int | None, Logprobs | None]] = []
        for item in plan.items:
            alone, result = self._execute(StepPlan([item]))
            items += alone.items
            results += result.items()
        token_ids = [token_id for token_id, _ in results]
        return StepPlan(items), StepResult(token_ids, [logprobs for _, logprobs in results])

    def _hear(self) -> None:
        """In the middle of a step: what others wait for, and touches nothing that is computed. A
        landing, digests that were computed meanwhile, parts that are pushed, questions."""
        self.listen()
        for event in self.connector.worker.poll():
            if isinstance(event, SealDone | PushDone | Asked):
                self._take_event(event)
            else:
                self._deferred.append(event)
        if self.outbox.notices:
            self.flush()

    def _fail(self, request_id: str, error: Exception) -> None:
        log.error("request %s failed in a step: %r", request_id, error)
        self._drop(self._sequences.pop(request_id))
        code = error.code if isinstance(error, SplitserveError) else WorkerFault.code
        self._end(request_id, "error", code, f"{type(error).__name__}: {error}")

    def _tell_preempted(self) -> None:
        for sequence in self.scheduler.take_preempted():
            self.outbox.notices.append(wire.Preempted(sequence.request_id))

    def _tell_started(self, plan: StepPlan, now: float) -> None:
        """Tell of legs that left the queue."""
        for item in plan.items:
            sequence = self._sequences[item.request_id]
            if sequence.started_s == now and sequence.cached_tokens is not None:
                queued = now - sequence.arrived_s
                self.outbox.notices.append(
                    wire.Started(item.request_id, queued, sequence.cached_tokens)
                )

    def _tell_drawn(self, drawn: Drawn, now: float) -> None:
        sequence = drawn.sequence
        request_id = sequence.request_id
        index = len(sequence.output_ids) - 1
        self.outbox.tokens.append(wire.Token(request_id, index, drawn.token_id, drawn.logprobs))
        if sequence.num_drawn == 1 and sequence.leg is not wire.Leg.DECODE:
            assert sequence.started_s is not None
            computed = len(sequence.tokens) - 1 - (sequence.cached_tokens or 0)
            self.outbox.notices.append(
                wire.PrefillEnded(request_id, now - sequence.started_s, computed)
            )
        if drawn.end is not None:
            del self._sequences[request_id]
            self.source.end_push(sequence)
            self._end(request_id, drawn.end)
        elif drawn.lease is not None:
            del self._sequences[request_id]
            self._leases_by_request[request_id] = drawn.lease.lease_id
            self.source.seal_rest(sequence, drawn.lease)

    def _drop(self, sequence: Sequence) -> None:
        """It has left `_sequences`: nothing of it stays."""
        self.loader.forget(sequence)
        self.scheduler.abort(sequence, self.clock.now())
        if sequence.leg is wire.Leg.PREFILL:
            self.source.end_push(sequence)
        else:
            self.reader.give_back(sequence)

    def _tell(self, notice: wire.Notice) -> None:
        self.outbox.notices.append(notice)

    def _end(self, request_id: str, reason: str, code: str = "", message: str = "") -> None:
        self.outbox.notices.append(wire.End(request_id, reason, code, message))
