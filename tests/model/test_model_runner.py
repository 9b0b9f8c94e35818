"""The runner against transformers, and exact mode against itself."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import AutoModelForCausalLM

from splitserve.engine.step import Draw, PlanItem, StepPlan
from splitserve.errors import ConfigError, UnsupportedModel, WorkerFault
from splitserve.kv.format import KVFormat
from splitserve.model import exact
from splitserve.model.forward import Forward, pool_view
from splitserve.model.loader import LoadedModel
from splitserve.model.runner import TorchRunner
from splitserve.sampling import Sampling

Blocks = npt.NDArray[np.uint8]
GREEDY = Sampling(seed=0, max_tokens=100, temperature=0.0)
SEEDED = Sampling(seed=5, max_tokens=100, temperature=0.9, top_p=0.95, top_k=100)


class Sequence:
    """A request that runs by hand: what a scheduler would plan for it, item by item."""

    def __init__(self, name: str, prompt: list[int], table: list[int], sampling: Sampling) -> None:
        self.name, self.prompt, self.table, self.sampling = name, prompt, table, sampling
        self.output: list[int] = []
        self.computed = 0

    def item(self, count: int) -> PlanItem:
        """The next `count` tokens, or what is left; draws if that is all there is so far."""
        tokens = self.prompt + self.output
        end = min(self.computed + count, len(tokens))
        draw = Draw(self.sampling, self.prompt, list(self.output)) if end == len(tokens) else None
        item = PlanItem(self.name, tokens[self.computed : end], self.computed, self.table, draw)
        self.computed = end
        return item


def run(runner: TorchRunner, steps: list[list[tuple[Sequence, int]]]) -> None:
    for step in steps:
        result = runner.execute(StepPlan([sequence.item(count) for sequence, count in step]))
        for (sequence, _), token in zip(step, result.token_ids, strict=True):
            if token is not None:
                sequence.output.append(token)


def prompt_of(length: int, seed: int) -> list[int]:
    return [int(one) for one in np.random.default_rng(seed).integers(3, 512, length)]


@pytest.mark.parametrize("is_exact", [False, True])
@pytest.mark.parametrize("cuts", [[70], [40, 30], [5, 17, 48], [1] * 70])
def test_greedy_equals_transformers(
    tiny: LoadedModel, tiny_path: Path, blocks: Blocks, is_exact: bool, cuts: list[int]
) -> None:
    prompt = prompt_of(70, 1)
    module = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32)
    expected = module.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, 70, dtype=torch.long),  # else guessed from the padding id
        max_new_tokens=30,
        do_sample=False,
        eos_token_id=None,
    )
    runner = TorchRunner(tiny, blocks, 16, is_exact, 1)
    sequence = Sequence("a", prompt, [9, 3, 77, 4, 50, 6, 7], GREEDY)
    run(runner, [[(sequence, cut)] for cut in cuts] + [[(sequence, 1)]] * 29)
    assert sequence.output == expected[0, 70:].tolist()
    assert len(set(sequence.output)) > 10


def test_a_default_step_of_many_kinds(tiny: LoadedModel, blocks: Blocks) -> None:
    """Prefill, a later chunk, a short chunk and decodes in one step, against one by one."""
    plain = TorchRunner(tiny, blocks, 16, False, 1)
    lengths = [30, 41, 19, 22, 5]
    together = [
        Sequence(f"{i}", prompt_of(n, i), list(range(i * 4, i * 4 + 4)), GREEDY)
        for i, n in enumerate(lengths)
    ]
    alone = [Sequence(s.name, s.prompt, [t + 40 for t in s.table], GREEDY) for s in together]
    run(plain, [[(together[1], 20)], [(together[2], 17), (together[4], 5)]])
    run(plain, [[(sequence, 40) for sequence in together]])
    run(plain, [[(sequence, 1) for sequence in together]] * 5)
    for one, other in zip(together, alone, strict=True):
        run(plain, [[(other, 64)]] + [[(other, 1)]] * (len(one.output) - 1))
        assert one.output == other.output


def exact_outputs(
    runner: TorchRunner, sequences: list[Sequence], rng: np.random.Generator, num_outputs: int
) -> None:
    """Run all to `num_outputs` tokens in random company and random chunks."""
    while waiting := [one for one in sequences if len(one.output) < num_outputs]:
        picked = [one for one in waiting if rng.random() < 0.7] or waiting[:1]
        run(runner, [[(one, int(rng.choice([1, 2, 7, 16, 33, 64]))) for one in picked]])


def test_exact_mode_is_the_same_bit_for_bit(tiny: LoadedModel, blocks: Blocks) -> None:
    """120 sequences: alone and whole, then chunked at random in random batches."""
    runner = TorchRunner(tiny, blocks, 16, True, 1)
    rng = np.random.default_rng(7)
    for group in range(20):
        prompts = [prompt_of(int(rng.integers(1, 120)), 10 * group + i) for i in range(6)]
        order = [int(one) for one in rng.permutation(128)]
        packed, alone = [], []
        for i, prompt in enumerate(prompts):
            sampling = GREEDY if i % 2 else SEEDED
            packed.append(Sequence(f"{i}", prompt, order[i * 9 : i * 9 + 9], sampling))
            alone.append(Sequence(f"{i}", prompt, order[60:69], sampling))
        exact_outputs(runner, packed, rng, 4)
        for sequence, reference in zip(packed, alone, strict=True):
            run(runner, [[(reference, 1000)]] + [[(reference, 1)]] * 3)
            assert sequence.output == reference.output
            assert_equal_kv(runner, blocks, sequence, reference)


def assert_equal_kv(runner: TorchRunner, blocks: Blocks, one: Sequence, other: Sequence) -> None:
    pool = pool_view(blocks, runner.kv_format)
    held = []
    for sequence in (one, other):
        kv = pool[sequence.table].transpose(1, 2, 3, 0, 4, 5)  # [layer, K|V, head, block, slot, D]
        held.append(kv.reshape(*kv.shape[:3], -1, kv.shape[-1])[:, :, :, : sequence.computed])
    np.testing.assert_array_equal(held[0], held[1])


def test_logits_are_equal_bits_and_threads_do_not_matter(tiny: LoadedModel, blocks: Blocks) -> None:
    rows = exact.invariant_rows(tiny)
    prompt = prompt_of(100, 3)
    item = Sequence("a", prompt, list(range(7)), GREEDY).item(1000)
    other = Sequence("b", prompt_of(50, 4), list(range(10, 14)), GREEDY).item(1000)
    one = Forward(tiny, blocks, 16, min_rows=rows).logits(StepPlan([item]))
    two = Forward(tiny, blocks, 16, min_rows=rows, num_threads=2).logits(StepPlan([other, item]))
    assert one.shape == (1, 512)
    np.testing.assert_array_equal(one[0], two[1])


def test_padding_writes_nothing(tiny: LoadedModel, blocks: Blocks) -> None:
    forward = Forward(tiny, blocks, 16, min_rows=32)
    forward.logits(StepPlan([Sequence("a", [5], [3], GREEDY).item(1)]))
    pool = pool_view(blocks, forward.kv_format)
    assert np.isfinite(pool[3, :, :, :, 0]).all()
    pool[3, :, :, :, 0] = np.nan
    assert np.isnan(pool).all()


def test_a_step_without_draws(tiny: LoadedModel, blocks: Blocks) -> None:
    runner = TorchRunner(tiny, blocks, 16, False, 1)
    sequence = Sequence("a", prompt_of(40, 1), [0, 1, 2], GREEDY)
    result = runner.execute(StepPlan([sequence.item(20)]))
    assert result.token_ids == [None]


def test_the_self_test_finds_what_the_linears_need(tiny: LoadedModel) -> None:
    rows = exact.invariant_rows(tiny)
    assert rows in exact.CANDIDATES
    assert exact._passes_agree(tiny, rows, 1)


def test_no_invariant_size_is_an_error(tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "_passes_agree", lambda *_: False)
    with pytest.raises(UnsupportedModel, match="Exact mode can't be had"):
        exact.invariant_rows(tiny)


def test_the_self_test_notices_arithmetic_that_depends_on_the_batch(
    tiny: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = tiny.module.model.norm  # type: ignore[union-attr]
    plain = norm.forward
    monkeypatch.setattr(norm, "forward", lambda x: plain(x) * (1 + 1e-6 * x.shape[1]))
    assert not exact._passes_agree(tiny, 4, 1)


def test_unfit_plans_are_faults(tiny: LoadedModel, blocks: Blocks) -> None:
    runner = TorchRunner(tiny, blocks, 16, False, 1)
    draw = Draw(GREEDY, [], [])
    for item, message in [
        (PlanItem("a", [1] * 17, 0, [0], draw), "1 blocks for positions up to 17"),
        (PlanItem("a", [1], 0, [128], draw), "outside the pool"),
        (PlanItem("a", [512], 0, [0], draw), "outside the vocabulary"),
        (PlanItem("a", [], 0, [0], draw), "blocks for positions"),
    ]:
        with pytest.raises(WorkerFault, match=message):
            runner.execute(StepPlan([item]))


def test_kv_that_was_never_written_is_a_fault(tiny: LoadedModel, blocks: Blocks) -> None:
    runner = TorchRunner(tiny, blocks, 16, False, 1)
    with pytest.raises(WorkerFault, match=r"Request lost: .*NaN"):
        runner.execute(StepPlan([PlanItem("lost", [5], 20, [0, 1], Draw(GREEDY, [], []))]))


def test_unfit_pools_are_refused(tiny: LoadedModel, blocks: Blocks) -> None:
    with pytest.raises(ConfigError, match="multiple of 16"):
        TorchRunner(tiny, blocks, 8)
    with pytest.raises(ConfigError, match="bytes where the format needs"):
        TorchRunner(tiny, blocks, 32)
    with pytest.raises(ConfigError, match="float32, not bfloat16"):
        pool_view(blocks, KVFormat("bfloat16", 16, 2, 2, 16))
