"""The scheduler: which tokens of which sequences the next step computes, and on which blocks.

Chunked prefill (Sarathi-Serve's Algorithm 3): all decodes first, one token each, then prefills that
are partly done, then new ones, within a token budget per step. The other mode is prefill first:
while prompts wait and fit, a step holds whole prompts only. Both admit first come, first served,
and preempt the newest when blocks run out; the preempted is computed again from its tokens, of
which the prefix cache usually still has most.
"""

from __future__ import annotations

from bisect import insort
from collections import defaultdict, deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from splitserve.engine.lending import Lending
from splitserve.engine.sequence import Incoming, Sequence, Status
from splitserve.engine.step import Draw, PlanItem, StepPlan, StepResult
from splitserve.kv.lease import Lease, LeaseTable
from splitserve.kv.pool import BlockPool, OutOfBlocks, Ref
from splitserve.sampling import Logprobs
from splitserve.wire import Grain, Leg


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """max_batched_tokens: budget of a step; max_sequences: running and fetching at once.

    lease_fraction: beyond it of the pool pinned by leases, no new prefill leg is admitted.
    """

    max_batched_tokens: int = 256
    max_sequences: int = 64
    chunked_prefill: bool = True
    prefix_cache: bool = True
    lease_fraction: float = 0.6

    def __post_init__(self) -> None:
        if not 1 <= self.max_sequences <= self.max_batched_tokens:
            raise ValueError("1 <= max_sequences <= max_batched_tokens must hold")


@dataclass(frozen=True, slots=True)
class Drawn:
    """A token drawn in a step; `end` is why its sequence is over, `lease` its handoff."""

    sequence: Sequence
    token_id: int
    logprobs: Logprobs | None
    end: str | None
    lease: Lease | None


@dataclass(slots=True)
class _Orphan:
    """Blocks in quarantine until the jobs that fill them have ended."""

    blocks: list[int]
    num_jobs: int


class Scheduler:
    """Queues and blocks of one engine. Not thread-safe."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool, leases: LeaseTable) -> None:
        self.config = config
        self.pool = pool
        self.leases = leases
        self.lending = Lending(pool, leases)
        self.waiting: deque[Sequence] = deque()
        self.fetch_queue: deque[Sequence] = deque()
        self.fetching: dict[str, Sequence] = {}
        self.running: list[Sequence] = []  # oldest first
        self.preempted: list[Sequence] = []  # since the last `take_preempted`
        self._loading: list[Sequence] = []  # since the last `take_loading`
        self.num_preemptions = 0
        self._orphans: dict[str, _Orphan] = {}  # fetches of aborted sequences
        self._mean_output = 64.0  # moving mean of what answers turned out to need

    # --- arrival and departure

    def add(self, sequence: Sequence) -> None:
        """Queue a leg. The caller has checked that it can ever fit."""
        if sequence.is_fetch:
            self.fetch_queue.append(sequence)
        else:
            self.waiting.append(sequence)

    def abort(self, sequence: Sequence, now_s: float) -> None:
        """Forget a sequence at this step boundary. Blocks that a fetch may still write go into
        quarantine; a lease that its reader holds already is ended."""
        self.lending.take_back(sequence)
        if sequence.status is Status.FETCHING:
            del self.fetching[sequence.request_id]
            self._abandon_held(sequence, now_s)
        elif sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)
        elif sequence in self.fetch_queue:
            self.fetch_queue.remove(sequence)
        sequence.table.free()
        sequence.status = Status.DONE

    def _abandon_held(self, sequence: Sequence, now_s: float) -> None:
        assert sequence.incoming is not None
        held, sequence.held = sequence.held, []
        if not sequence.incoming.num_jobs:
            self.pool.release_all(held, Ref.HELD)
            return
        self.pool.quarantine(held, now_s)
        self._orphans[sequence.request_id] = _Orphan(held, sequence.incoming.num_jobs)

    @property
    def has_work(self) -> bool:
        """A step could be planned now or after an event within the engine."""
        return bool(self.running or self.waiting or self.fetch_queue)

    @property
    def admits_prefill(self) -> bool:
        """Leases leave room for another prefill leg (design 3.4)."""
        return self.pool.num_leased() <= self.config.lease_fraction * self.pool.num_blocks

    # --- fetches

    def admit_fetches(self, now_s: float) -> list[Sequence]:
        """Reserve blocks for handoffs, first come first served; their jobs may start. Each must be
        answered by `end_fetch` or `abort`."""
        admitted = []
        while self.fetch_queue and self._num_active < self.config.max_sequences:
            sequence = self.fetch_queue[0]
            if self._is_overtaking(sequence) or not self._admit_fetch(sequence, now_s):
                break
            self.fetch_queue.popleft()
            admitted.append(sequence)
        return admitted

    def _is_overtaking(self, sequence: Sequence) -> bool:
        """An older one waits for blocks. A prefill leg does not count: what holds it up may be
        leases on our blocks, and their readers may be held up by ours."""
        return any(
            other.number < sequence.number for other in self.waiting if other.leg is not Leg.PREFILL
        )

    def _admit_fetch(self, sequence: Sequence, now_s: float) -> bool:
        """Blocks for one handoff, if prompt and predicted output fit beside the running's."""
        num_tokens = sequence.num_handed_over
        num_blocks = -(-num_tokens // self.pool.block_size)
        hits = self._find_prefix(sequence, num_tokens)
        num_missing = num_blocks - len(hits)
        available = self.pool.num_available - self.pool.num_cached_among(hits)
        growth = self._predicted_growth(sequence)
        if num_missing > available or (
            self._num_active and num_missing + growth > available - self._reserve()
        ):
            return False
        sequence.started_s = now_s
        self._hold(sequence, hits, num_missing, num_blocks)
        return True

    def _hold(self, sequence: Sequence, hits: list[int], num_missing: int, num_wanted: int) -> None:
        """Reserve blocks for a sequence of whose KV `num_wanted` leading blocks are to come."""
        sequence.table.adopt(hits)
        sequence.held = self.pool.allocate(num_missing, Ref.HELD)
        sequence.incoming = Incoming(len(hits), num_wanted, len(hits), len(hits))
        sequence.status = Status.FETCHING
        self.fetching[sequence.request_id] = sequence

    def give_up_load(self, sequence: Sequence, now_s: float) -> None:
        """Its job takes too long: the sequence queues again, to be computed. The job's blocks stay
        in quarantine until it has ended."""
        del self.fetching[sequence.request_id]
        self._abandon_held(sequence, now_s)
        sequence.table.free()
        sequence.incoming = sequence.found = None
        sequence.status = Status.WAITING
        index = sum(1 for other in self.waiting if other.number < sequence.number)
        self.waiting.insert(index, sequence)

    def end_job(self, request_id: str) -> bool:
        """One of a fetch's jobs is over. False if its sequence was aborted before."""
        orphan = self._orphans.get(request_id)
        if orphan is None:
            return True
        orphan.num_jobs -= 1
        if not orphan.num_jobs:
            self.pool.end_quarantine(orphan.blocks)
            del self._orphans[request_id]
        return False

    def end_fetch(self, sequence: Sequence, num_tokens: int) -> None:
        """KV of positions [0, num_tokens) is there: the sequence runs, and computes the rest."""
        del self.fetching[sequence.request_id]
        held, sequence.held = sequence.held, []
        sequence.incoming = sequence.found = None
        sequence.table.append_held(held)
        sequence.num_computed = num_tokens
        if sequence.leg is not Leg.DECODE and sequence.cached_tokens is None:
            sequence.cached_tokens = num_tokens
        if self.config.prefix_cache:
            sequence.table.seal(sequence.tokens, sequence.num_computed)
        self._run(sequence)

    # --- one step

    def schedule(self, now_s: float) -> StepPlan:
        """Plan the next step; empty if nothing can run."""
        items: dict[str, PlanItem] = {}
        if self.config.chunked_prefill:
            budget = self._plan_running(items, self.config.max_batched_tokens, now_s, decodes=True)
            budget = self._plan_running(items, budget, now_s, decodes=False)
            self._admit(items, budget, now_s)
        else:
            budget = self._plan_running(items, self.config.max_batched_tokens, now_s, decodes=False)
            self._admit(items, budget, now_s)
            if not items:
                self._plan_running(items, self.config.max_sequences, now_s, decodes=True)
        return StepPlan(list(items.values()))

    def update(self, plan: StepPlan, result: StepResult, now_s: float) -> list[Drawn]:
        """Apply a step's result; finished and handed-off sequences leave."""
        by_id = {sequence.request_id: sequence for sequence in self.running}
        drawn = []
        for item, (token_id, logprobs) in zip(plan.items, result.items(), strict=True):
            sequence = by_id[item.request_id]
            sequence.num_computed += len(item.token_ids)
            if self.config.prefix_cache:
                sequence.table.seal(sequence.tokens, sequence.num_computed)
            if token_id is not None:
                drawn.append(self._append(sequence, token_id, logprobs, now_s))
            elif sequence.leg is Leg.PREFILL and sequence.grain is not Grain.REQUEST:
                self.lending.lend_filled(sequence, now_s)
        return drawn

    def _append(
        self, sequence: Sequence, token_id: int, logprobs: Logprobs | None, now_s: float
    ) -> Drawn:
        sequence.append(token_id)
        end = sequence.end_reason()
        lease = None
        if end is not None:
            self._learn_output(len(sequence.output_ids))
            self._leave(sequence)
            self.lending.take_back(sequence)
            sequence.table.free()
        elif sequence.leg is Leg.PREFILL:
            self._leave(sequence)
            lease = self.lending.lend_rest(sequence, now_s)
        return Drawn(sequence, token_id, logprobs, end, lease)

    def collect_leases(self, now_s: float) -> list[Lease]:
        """Unpin the blocks of the leases that ended."""
        return self.lending.collect(now_s)

    def take_preempted(self) -> list[Sequence]:
        taken, self.preempted = self.preempted, []
        return taken

    def take_loading(self) -> list[Sequence]:
        """Legs that got blocks for what was found of their prompts, since the last call. Each must
        be answered by `end_fetch` or `abort`."""
        taken, self._loading = self._loading, []
        return [sequence for sequence in taken if sequence.status is Status.FETCHING]

    def _plan_running(
        self, items: dict[str, PlanItem], budget: int, now_s: float, *, decodes: bool
    ) -> int:
        """Add running sequences, oldest first: the decoding ones or the others. Returns what is
        left of the budget."""
        for sequence in list(self.running):
            if budget <= 0:
                break
            if sequence.status is not Status.RUNNING or sequence.is_decoding != decodes:
                continue
            if sequence.request_id in items:
                continue
            count = min(sequence.num_remaining, budget)
            if self._make_room(sequence, sequence.num_computed + count, items):
                if sequence.started_s is None:  # it was loaded until now
                    sequence.started_s = now_s
                items[sequence.request_id] = self._item(sequence, count)
                budget -= count
        return budget

    def _admit(self, items: dict[str, PlanItem], budget: int, now_s: float) -> None:
        """Start waiting sequences, first come first served, while budget and blocks last."""
        while self.waiting and budget > 0 and self._num_active < self.config.max_sequences:
            sequence = self.waiting[0]
            if sequence.leg is Leg.PREFILL and not self.admits_prefill:
                break
            hits = self._find_prefix(sequence, len(sequence.tokens) - 1)
            num_hit = len(hits) * self.pool.block_size
            count = len(sequence.tokens) - num_hit
            if self.config.chunked_prefill:
                count = min(count, budget)
            elif count > budget and items:
                break
            missing = sequence.table.num_needed(len(sequence.tokens)) - len(hits)
            available = self.pool.num_available - self.pool.num_cached_among(hits)
            if missing + (len(self.running) if self._num_active else 0) > available:
                break
            self.waiting.popleft()
            if sequence.found is not None:
                num_wanted = max(len(hits), sequence.found.stop)
                num_blocks = sequence.table.num_needed(len(sequence.tokens))
                self._hold(sequence, hits, num_blocks - len(hits), num_wanted)
                self._loading.append(sequence)
                continue
            sequence.table.adopt(hits)
            sequence.num_computed = num_hit
            if sequence.cached_tokens is None:
                sequence.cached_tokens = num_hit
                sequence.started_s = now_s
            self._run(sequence)
            sequence.table.grow(len(sequence.tokens))
            items[sequence.request_id] = self._item(sequence, count)
            budget -= count

    def _item(self, sequence: Sequence, count: int) -> PlanItem:
        start, stop = sequence.num_computed, sequence.num_computed + count
        if __debug__:
            sequence.table.assert_writable(start, stop)
        draw = None
        if stop == len(sequence.tokens):
            draw = Draw(sequence.sampling, sequence.prompt_ids, sequence.output_ids)
        return PlanItem(
            sequence.request_id, sequence.tokens[start:stop], start, sequence.table.blocks, draw
        )

    def _make_room(self, sequence: Sequence, num_tokens: int, items: dict[str, PlanItem]) -> bool:
        """Grow the sequence's table, preempting the newest; False if that was itself."""
        while True:
            try:
                sequence.table.grow(num_tokens)
                return True
            except OutOfBlocks:
                victim = self.running[-1]
                self._preempt(victim)
                items.pop(victim.request_id, None)
                if victim is sequence:
                    return False

    def _preempt(self, victim: Sequence) -> None:
        self.running.remove(victim)
        victim.table.free()
        victim.num_computed = 0
        victim.status = Status.WAITING
        victim.offer = victim.found = None
        victim.grain = Grain.REQUEST
        self.lending.take_back(victim)  # its own lease could keep it from being admitted again
        self.num_preemptions += 1
        self.preempted.append(victim)
        index = sum(1 for other in self.waiting if other.number < victim.number)
        self.waiting.insert(index, victim)

    # --- steps ahead, for the simulator (design 3.13)

    def horizon(self) -> int:
        """How many single steps from now are the same decodes, barring events from outside.

        0: the next step has a decision to make (somebody waits, fetches or prefills, nothing runs,
        or blocks are short). The last of the steps may end sequences. Holds for tokens that are
        not stop ids, which only a runner knows.
        """
        if self.waiting or self.fetch_queue or self.fetching or not self.running:
            return 0
        if not all(sequence.is_decoding for sequence in self.running):
            return 0
        steps = min(sequence.num_output_left for sequence in self.running)
        while steps and self._blocks_for_steps(steps) > self.pool.num_available:
            steps -= 1
        return steps

    def advance(self, token_ids: Seq[Seq[int]], now_s: float) -> list[Drawn]:
        """Do len(token_ids) <= `horizon()` steps at once; token_ids[step][i] is for running[i].

        The state afterwards, down to block numbers, is that of as many single steps. Only the last
        step's tokens may end a sequence.
        """
        num_steps = len(token_ids)
        if not 1 <= num_steps <= self.horizon():
            raise ValueError(f"{num_steps} steps asked, the horizon is {self.horizon()}")
        last = len(token_ids) - 1
        size = self.pool.block_size
        started = {id(x): x.num_computed for x in self.running}
        growing: defaultdict[int, list[int]] = defaultdict(list)
        sealing: defaultdict[int, list[int]] = defaultdict(list)
        for i, sequence in enumerate(self.running):
            for step in range(-sequence.num_computed % size, last, size):
                growing[step].append(i)
            for step in range((-sequence.num_computed - 1) % size, last, size):
                sealing[step].append(i)
        for step in sorted(growing.keys() | sealing.keys()):
            for i in growing[step]:
                sequence = self.running[i]
                sequence.table.grow(started[id(sequence)] + step + 1)
            for i in sealing[step]:
                sequence = self.running[i]
                self._forward_to(sequence, started[id(sequence)] + step, token_ids, i, step)
                if self.config.prefix_cache:
                    sequence.table.seal(sequence.tokens, sequence.num_computed + 1)
        for i, sequence in enumerate(self.running):
            self._forward_to(sequence, started[id(sequence)] + last, token_ids, i, last)
        plan = self.schedule(now_s)
        return self.update(plan, StepResult(list(token_ids[last])), now_s)

    @staticmethod
    def _forward_to(
        sequence: Sequence, num_computed: int, tokens: Seq[Seq[int]], i: int, step: int
    ) -> None:
        """Append the tokens of the steps before `step` that the sequence lacks."""
        for past in range(step - (num_computed - sequence.num_computed), step):
            sequence.append(tokens[past][i])
        sequence.num_computed = num_computed

    def _blocks_for_steps(self, steps: int) -> int:
        return sum(x.table.num_needed(x.num_computed + steps) for x in self.running)

    # --- small things

    @property
    def _num_active(self) -> int:
        return len(self.running) + len(self.fetching)

    def _find_prefix(self, sequence: Sequence, max_tokens: int) -> list[int]:
        if not self.config.prefix_cache:
            return []
        return sequence.table.find_prefix(sequence.tokens, max_tokens)

    def _predicted_growth(self, sequence: Sequence) -> int:
        """Blocks that the rest of its answer is expected to need; at least one."""
        expected = max(1.0, self._mean_output - len(sequence.output_ids))
        return -(-min(sequence.num_output_left, int(expected)) // self.pool.block_size)

    def _reserve(self) -> int:
        active = [*self.running, *self.fetching.values()]
        return sum(self._predicted_growth(sequence) for sequence in active)

    def _learn_output(self, num_tokens: int) -> None:
        self._mean_output += 0.1 * (num_tokens - self._mean_output)

    def _run(self, sequence: Sequence) -> None:
        sequence.status = Status.RUNNING
        insort(self.running, sequence, key=lambda other: other.number)

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        sequence.status = Status.DONE

    def check(self) -> None:
        """Assert the invariants of queues, blocks and leases (design §5: 1, 2)."""
        self.pool.check()
        self.leases.check()
        assert not self._loading, "a load was admitted and not begun"
        for sequence in (*self.waiting, *self.fetch_queue):
            assert not sequence.table.blocks, "a waiting sequence holds blocks"
        for sequence in self.running:
            assert sequence.status is Status.RUNNING
            assert 0 <= sequence.num_computed < len(sequence.tokens)
            assert sequence.table.num_needed(sequence.num_computed) == 0
        used = {block for x in self.running for block in x.table.blocks}
        used |= {block for x in self.fetching.values() for block in x.table.blocks}
        counts = self.pool.counts()
        assert counts["used"] == len(used), f"{counts['used']} blocks in use, {len(used)} known"
        assert counts["held"] == sum(len(x.held) for x in self.fetching.values())
