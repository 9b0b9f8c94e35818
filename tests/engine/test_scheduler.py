"""The scheduler: budgets, order, preemption, aborts, and `advance(k)` = k single steps."""

from __future__ import annotations

import random
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.engine.scheduler import Scheduler, SchedulerConfig
from splitserve.engine.sequence import Sequence, Status
from splitserve.engine.step import StepPlan, StepResult
from splitserve.kv.keys import root_key
from splitserve.kv.lease import LeaseTable
from splitserve.kv.pool import BlockPool
from splitserve.kv.table import BlockTable
from splitserve.sampling import Sampling
from splitserve.wire import Leg

ROOT = root_key(b"m")


def make(num_blocks: int = 64, **settings: object) -> Scheduler:
    config = SchedulerConfig(**settings)  # type: ignore[arg-type]
    return Scheduler(config, BlockPool(num_blocks, 16), LeaseTable("e", 30.0))


def add(
    scheduler: Scheduler, number: int, prompt: list[int], max_tokens: int = 8, leg: Leg = Leg.WHOLE
) -> Sequence:
    sequence = Sequence(
        request_id=f"r{number}",
        leg=leg,
        prompt_ids=prompt,
        output_ids=[],
        sampling=Sampling(seed=1, max_tokens=max_tokens),
        table=BlockTable(scheduler.pool, ROOT),
        number=number,
        arrived_s=0.0,
        deadline_s=600.0,
    )
    scheduler.add(sequence)
    return sequence


def token_for(request_id: str, index: int) -> int:
    return zlib.crc32(f"{request_id}/{index}".encode()) % 500


def execute(plan: StepPlan) -> StepResult:
    return StepResult(
        [
            None if item.draw is None else token_for(item.request_id, len(item.draw.output_ids))
            for item in plan.items
        ]
    )


def one_step(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule(0.0)
    if plan.items:
        scheduler.update(plan, execute(plan), 0.0)
    scheduler.take_preempted()
    return plan


def shape(plan: StepPlan) -> dict[str, tuple[int, int]]:
    return {item.request_id: (item.start, len(item.token_ids)) for item in plan.items}


def test_chunked_decodes_first_then_the_prefill_within_the_budget() -> None:
    scheduler = make(max_batched_tokens=32, max_sequences=8)
    add(scheduler, 0, [1] * 10)
    assert shape(one_step(scheduler)) == {"r0": (0, 10)}
    add(scheduler, 1, [2] * 70)
    assert shape(one_step(scheduler)) == {"r0": (10, 1), "r1": (0, 31)}
    assert shape(one_step(scheduler)) == {"r0": (11, 1), "r1": (31, 31)}
    add(scheduler, 2, [3] * 40)
    assert shape(one_step(scheduler)) == {"r0": (12, 1), "r1": (62, 8), "r2": (0, 23)}


def test_unchunked_prefills_go_first_and_whole() -> None:
    scheduler = make(max_batched_tokens=32, max_sequences=8, chunked_prefill=False)
    add(scheduler, 0, [1] * 10)
    one_step(scheduler)
    add(scheduler, 1, [2] * 70)
    add(scheduler, 2, [3] * 20)
    add(scheduler, 3, [4] * 20)
    assert shape(one_step(scheduler)) == {"r1": (0, 70)}, "longer than the budget: alone"
    assert shape(one_step(scheduler)) == {"r2": (0, 20)}
    assert shape(one_step(scheduler)) == {"r3": (0, 20)}
    assert shape(one_step(scheduler)) == {
        "r0": (10, 1),
        "r1": (70, 1),
        "r2": (20, 1),
        "r3": (20, 1),
    }


def test_a_prefix_hit_leaves_the_last_token_to_compute() -> None:
    scheduler = make()
    add(scheduler, 0, [1] * 32, max_tokens=1)
    one_step(scheduler)
    hit = add(scheduler, 1, [1] * 32, max_tokens=1)
    assert shape(one_step(scheduler)) == {"r1": (16, 16)}
    assert hit.cached_tokens == 16
    longer = add(scheduler, 2, [1] * 33, max_tokens=1)
    assert shape(one_step(scheduler)) == {"r2": (32, 1)}
    assert longer.cached_tokens == 32
    scheduler.check()


def test_without_the_prefix_cache_nothing_is_hit() -> None:
    scheduler = make(prefix_cache=False)
    for number in range(2):
        add(scheduler, number, [1] * 33, max_tokens=1)
        assert shape(one_step(scheduler)) == {f"r{number}": (0, 33)}
    assert scheduler.pool.counts()["free"] == 64


def test_the_newest_is_preempted_and_comes_back() -> None:
    scheduler = make(num_blocks=6, max_batched_tokens=64, max_sequences=4, prefix_cache=False)
    old = add(scheduler, 0, [1] * 30, max_tokens=60)
    new = add(scheduler, 1, [2] * 30, max_tokens=40)
    order = []
    for _ in range(200):
        one_step(scheduler)
        scheduler.check()
        order.append((old.status, new.status))
        if old.status is new.status is Status.DONE:
            break
    assert scheduler.num_preemptions >= 1
    assert (Status.RUNNING, Status.WAITING) in order
    assert (Status.WAITING, Status.RUNNING) not in order, "the older one was never preempted"
    assert old.output_ids == [token_for("r0", i) for i in range(60)]
    assert new.output_ids == [token_for("r1", i) for i in range(40)]


def test_a_prefill_leg_leaves_its_blocks_to_a_lease() -> None:
    scheduler = make(num_blocks=8)
    add(scheduler, 0, [1] * 40, leg=Leg.PREFILL)
    plan = scheduler.schedule(0.0)
    (drawn,) = scheduler.update(plan, execute(plan), 0.0)
    assert drawn.lease is not None
    assert len(drawn.lease.blocks) == 3
    assert scheduler.pool.counts()["leased"] == 3
    assert not scheduler.running
    scheduler.check()
    scheduler.leases.release(drawn.lease.lease_id)
    scheduler.collect_leases(1.0)
    counts = scheduler.pool.counts()
    assert (counts["free"], counts["cached"], counts["leased"]) == (6, 2, 0)


def test_a_first_token_that_ends_the_answer_leaves_no_lease() -> None:
    scheduler = make(num_blocks=8)
    add(scheduler, 0, [1] * 40, max_tokens=1, leg=Leg.PREFILL)
    plan = scheduler.schedule(0.0)
    (drawn,) = scheduler.update(plan, execute(plan), 0.0)
    assert (drawn.end, drawn.lease) == ("length", None)
    assert scheduler.leases.num_active == 0


def test_leases_beyond_the_fraction_stop_new_prefill_legs_only() -> None:
    scheduler = make(num_blocks=10, lease_fraction=0.5)
    for number in range(2):
        add(scheduler, number, [number] * 48, leg=Leg.PREFILL)
        one_step(scheduler)
    assert not scheduler.admits_prefill
    waiting = add(scheduler, 2, [7] * 20, leg=Leg.PREFILL)
    one_step(scheduler)
    assert waiting.status is Status.WAITING
    scheduler.abort(waiting, 0.0)
    whole = add(scheduler, 3, [8] * 20)
    one_step(scheduler)
    assert whole.status is Status.RUNNING
    scheduler.check()


REQUESTS = st.lists(
    st.tuples(st.integers(1, 90), st.integers(1, 40), st.integers(0, 2), st.integers(0, 20)),
    min_size=1,
    max_size=8,
)


@given(
    requests=REQUESTS,
    chunked=st.booleans(),
    budget=st.integers(8, 64),
    num_blocks=st.integers(9, 40),
    aborts=st.dictionaries(st.integers(0, 7), st.integers(0, 60), max_size=3),
)
@settings(max_examples=150, deadline=None)
def test_all_that_are_not_aborted_end_with_their_tokens(
    requests: list[tuple[int, int, int, int]],
    chunked: bool,
    budget: int,
    num_blocks: int,
    aborts: dict[int, int],
) -> None:
    """Whatever arrives when, in a pool however small: nobody starves, blocks add up."""
    scheduler = make(
        num_blocks, max_batched_tokens=budget, max_sequences=6, chunked_prefill=chunked
    )
    sequences: dict[int, Sequence] = {}
    arrivals = {number: request[3] for number, request in enumerate(requests)}
    for step in range(5000):
        for number, (length, max_tokens, seed, _) in enumerate(requests):
            if arrivals[number] == step:
                sequences[number] = add(scheduler, number, [seed] * length, max_tokens)
        for number, at in aborts.items():
            if at == step and number in sequences:
                scheduler.abort(sequences.pop(number), 0.0)
        plan = one_step(scheduler)
        scheduler.check()
        if chunked:
            assert plan.num_tokens <= budget
        elif len(plan.items) > 1:
            assert plan.num_tokens <= max(budget, 6)
        if step > 30 and not scheduler.has_work:
            break
    assert not scheduler.has_work, "somebody starved"
    for number, sequence in sequences.items():
        max_tokens = requests[number][1]
        assert sequence.output_ids == [token_for(f"r{number}", i) for i in range(max_tokens)]
    counts = scheduler.pool.counts()
    assert counts["free"] + counts["cached"] == num_blocks


def state(scheduler: Scheduler) -> object:
    """All that a later decision can depend on."""
    pool = scheduler.pool
    return (
        [
            (x.request_id, x.tokens, x.num_computed, x.table.blocks, x.num_drawn, x.status)
            for x in scheduler.running
        ],
        list(pool._free),
        list(pool._cached),
        dict(pool._index),
        scheduler._mean_output,
    )


@given(
    prompts=st.lists(
        st.tuples(st.integers(1, 60), st.integers(2, 70), st.integers(0, 1)), min_size=1, max_size=6
    ),
    num_blocks=st.integers(8, 60),
    prefix_cache=st.booleans(),
    seed=st.integers(0, 10**6),
)
@settings(max_examples=200, deadline=None)
def test_advance_equals_single_steps(
    prompts: list[tuple[int, int, int]], num_blocks: int, prefix_cache: bool, seed: int
) -> None:
    twins = [
        make(num_blocks, max_batched_tokens=128, max_sequences=8, prefix_cache=prefix_cache)
        for _ in range(2)
    ]
    fast, single = twins
    for number, (length, max_tokens, token) in enumerate(prompts):
        if -(-(length + max_tokens) // 16) <= num_blocks:
            for scheduler in twins:
                add(scheduler, number, [token] * length, max_tokens)
    chooser = random.Random(seed)
    while fast.has_work:
        horizon = fast.horizon()
        if not horizon:
            for scheduler in twins:
                one_step(scheduler)
            continue
        k = chooser.randint(1, horizon)
        tokens = [
            [token_for(x.request_id, len(x.output_ids) + step) for x in fast.running]
            for step in range(k)
        ]
        for step in range(k):
            plan = single.schedule(0.0)
            assert [len(item.token_ids) for item in plan.items] == [1] * len(tokens[0])
            ends = [x.end for x in single.update(plan, execute(plan), 0.0)]
            assert step == k - 1 or not any(ends), "an end before the last step"
        assert [x.end for x in fast.advance(tokens, 0.0)] == ends
        assert state(fast) == state(single)
        fast.check()
    assert state(fast) == state(single)


def test_the_horizon_is_zero_when_there_is_a_decision() -> None:
    scheduler = make(num_blocks=5, max_batched_tokens=32, max_sequences=4)
    assert scheduler.horizon() == 0
    add(scheduler, 0, [1] * 40, max_tokens=20)
    assert scheduler.horizon() == 0, "somebody waits"
    one_step(scheduler)
    assert scheduler.horizon() == 0, "a prefill is not done"
    one_step(scheduler)
    assert scheduler.horizon() == 19
    with pytest.raises(ValueError, match="horizon"):
        scheduler.advance([[1]] * 20, 0.0)
    (last,) = scheduler.advance([[step] for step in range(18)], 0.0)
    assert last.sequence.output_ids[1:] == list(range(18))
    assert scheduler.horizon() == 1
    add(scheduler, 1, [2] * 5)
    assert scheduler.horizon() == 0, "an arrival"
