"""The simulated runner draws what a real one would have reason to, and catches wrong KV."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from splitserve.clock import ManualClock
from splitserve.engine.step import Draw, PlanItem, StepPlan
from splitserve.errors import ConfigError, WorkerFault
from splitserve.model.simulated import SimulatedRunner, prefix_hashes, simulated_format
from splitserve.sampling import Sampling
from splitserve.transport.segment import Segment

GREEDY = Sampling(seed=0, max_tokens=9, temperature=0.0)
PROMPT = list(range(100, 150))
TABLE = [7, 2, 5, 0]


def pool(num_blocks: int = 8, block_size: int = 16) -> npt.NDArray[np.uint8]:
    return np.zeros((num_blocks, simulated_format(block_size).block_bytes), np.uint8)


def item(
    start: int,
    end: int,
    table: list[int] = TABLE,
    output: list[int] | None = None,
    sampling: Sampling = GREEDY,
    prompt: list[int] = PROMPT,
) -> PlanItem:
    tokens = prompt + (output or [])
    draw = Draw(sampling, prompt, output or []) if end == len(tokens) else None
    return PlanItem("a", tokens[start:end], start, table, draw)


def execute(runner: SimulatedRunner, *items: PlanItem) -> list[int | None]:
    return runner.execute(StepPlan(list(items))).token_ids


def test_8_bytes_per_token() -> None:
    assert simulated_format(16).block_bytes == 128


def test_the_hash_of_a_prefix_can_be_continued() -> None:
    whole = prefix_hashes(PROMPT)
    rest = prefix_hashes(PROMPT[20:], 20, int(whole[19]))
    np.testing.assert_array_equal(whole[20:], rest)
    assert len(set(whole.tolist())) == 50
    assert prefix_hashes([1, 2])[1] != prefix_hashes([2, 1])[1]


@pytest.mark.parametrize("cuts", [[50], [16, 34], [1, 2, 3, 44], [32, 17, 1]])
def test_chunks_do_not_matter(cuts: list[int]) -> None:
    whole = execute(SimulatedRunner(pool(), 16), item(0, 50))
    runner, start = SimulatedRunner(pool(), 16), 0
    for cut in cuts:
        drawn = execute(runner, item(start, start + cut))
        start += cut
        assert (drawn == [None]) == (start < 50)
    assert drawn == whole


def test_the_token_depends_on_all_before_it_and_on_the_seed() -> None:
    runner = SimulatedRunner(pool(), 16, vocab_size=2**31)
    first = execute(runner, item(0, 50))
    changed = execute(runner, item(0, 50, prompt=[99] + PROMPT[1:]))
    seeded = [
        execute(runner, item(0, 50, sampling=Sampling(seed=seed, max_tokens=1)))[0]
        for seed in range(5)
    ]
    assert first != changed
    assert len({*seeded, first[0]}) == 6


def test_decode_continues() -> None:
    runner = SimulatedRunner(pool(), 16)
    output: list[int] = []
    output += [int(token) for token in execute(runner, item(0, 50)) if token is not None]
    for length in range(51, 60):
        (token,) = execute(runner, item(length - 1, length, output=output))
        assert token is not None
        output.append(token)
    again = SimulatedRunner(pool(), 16)
    assert execute(again, item(0, 59, output=output[:9])) == [output[9]]


def test_a_block_that_moved_to_another_pool_is_good() -> None:
    source, target = pool(), pool(16)
    runner = SimulatedRunner(source, 16)
    (first,) = execute(runner, item(0, 50))
    assert first is not None
    table = [11, 12, 3, 15]
    target[table] = source[TABLE]
    expected = execute(runner, item(50, 51, output=[first]))
    moved = execute(SimulatedRunner(target, 16), item(50, 51, table, output=[first]))
    assert moved == expected


def test_it_runs_in_a_segment() -> None:
    segment = Segment.create(8, simulated_format(16).block_bytes)
    (token,) = execute(SimulatedRunner(segment.blocks, 16), item(0, 50))
    assert token is not None
    segment.close()


def corrupt_wrong_block(blocks: npt.NDArray[np.uint8]) -> list[int]:
    return [7, 2, 4, 0]


def corrupt_swapped_blocks(blocks: npt.NDArray[np.uint8]) -> list[int]:
    return [2, 7, 5, 0]


def corrupt_overwritten(blocks: npt.NDArray[np.uint8]) -> list[int]:
    execute(SimulatedRunner(blocks, 16), item(0, 50, [2, 1, 3, 4], prompt=PROMPT[::-1]))
    return TABLE


def corrupt_one_bit(blocks: npt.NDArray[np.uint8]) -> list[int]:
    blocks[7, 70] ^= 1
    return TABLE


def corrupt_lost_half(blocks: npt.NDArray[np.uint8]) -> list[int]:
    blocks[2, 64:] = 0  # V of a block never arrived
    return TABLE


@pytest.mark.parametrize(
    "corrupt",
    [
        corrupt_wrong_block,
        corrupt_swapped_blocks,
        corrupt_overwritten,
        corrupt_one_bit,
        corrupt_lost_half,
    ],
)
def test_wrong_kv_is_caught(corrupt: object) -> None:
    blocks = pool()
    runner = SimulatedRunner(blocks, 16)
    execute(runner, item(0, 48))
    table = corrupt(blocks)  # type: ignore[operator]
    with pytest.raises(WorkerFault, match="wrong KV at position"):
        execute(runner, item(48, 50, table))


def test_a_chunk_on_nothing_is_caught_at_once() -> None:
    with pytest.raises(WorkerFault, match="wrong KV at position 15: it was never written"):
        execute(SimulatedRunner(pool(), 16), item(16, 32))


def test_bad_plans_are_caught() -> None:
    runner = SimulatedRunner(pool(), 16)
    for bad, message in [
        (item(0, 50, [1, 2, 3]), "48 slots for 50 positions"),
        (item(0, 50, [1, 2, 3, 8]), "outside the pool"),
        (item(0, 50, [1, 2, 3, 1]), "a block twice"),
        (PlanItem("a", PROMPT[:20], 0, TABLE, Draw(GREEDY, PROMPT, [])), "with other tokens"),
        (PlanItem("a", PROMPT[::-1], 0, TABLE, Draw(GREEDY, PROMPT, [])), "with other tokens"),
    ]:
        with pytest.raises(WorkerFault, match=message):
            execute(runner, bad)


def test_durations_are_spent_on_the_clock() -> None:
    clock = ManualClock()
    runner = SimulatedRunner(
        pool(), 16, duration_s=lambda plan: 0.5 * plan.num_tokens, spend=clock.advance
    )
    execute(runner, item(0, 50))
    assert clock.now() == 25
    with pytest.raises(ConfigError):
        SimulatedRunner(pool(), 16, duration_s=lambda plan: 1.0)
    with pytest.raises(ConfigError, match="must have 128 bytes"):
        SimulatedRunner(pool(8, 32), 16)
