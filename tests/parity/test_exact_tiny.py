"""Exact mode on a random model of two layers: one answer, whatever the way to it (design §5, 4).

Real engines, pools, connector and transport; only processes and the wire are left out. Each way
computes all cases; tokens and the bits of every drawn token's logits are those of the reference:
each request alone, its prompt in one step, no cache.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from splitserve import wire
from splitserve.model.loader import load
from splitserve.model.tiny import make_tiny
from splitserve.sampling import Sampling
from splitserve.transport.registry import TRANSPORTS, is_installed
from tests.support.engines import EngineHost
from tests.support.parity import Answers, Bench, Case, notices

NUM_CASES = 320
NUM_BLOCKS = 1200


def make_sampling(rng: np.random.Generator, number: int) -> Sampling:
    """Every third greedy; the others with random filters, each present half of the time."""
    max_tokens = int(rng.integers(1, 17))
    if number % 3 == 0:
        return Sampling(seed=0, max_tokens=max_tokens, temperature=0.0, stop_ids=(0, 2))
    return Sampling(
        seed=int(rng.integers(0, 2**63)),
        max_tokens=max_tokens,
        temperature=float(rng.choice([0.3, 0.8, 1.0, 2.0])),
        top_k=int(rng.integers(1, 200)) if rng.random() < 0.5 else 0,
        top_p=float(rng.uniform(0.1, 1.0)) if rng.random() < 0.5 else 1.0,
        min_p=float(rng.uniform(0.0, 0.3)) if rng.random() < 0.5 else 0.0,
        choice=int(rng.integers(0, 3)),
        stop_ids=(0, 2),
    )


def make_cases() -> list[Case]:
    """Prompts of 1 to 400 tokens, most short; every other one begins like an earlier one."""
    rng = np.random.default_rng(2026)
    cases: list[Case] = []
    for number in range(NUM_CASES):
        size = int(rng.integers(1, 400)) if number % 16 == 0 else int(rng.integers(1, 90))
        prompt = [int(one) for one in rng.integers(3, 512, size)]
        if number % 2 and cases:
            other = cases[int(rng.integers(len(cases)))].prompt_ids
            prompt = (other[: int(rng.integers(len(other) + 1))] + prompt)[:400]
        cases.append(Case(f"case-{number}", prompt, make_sampling(rng, number)))
    return cases


CASES = make_cases()


INSTALLED = [name for name in TRANSPORTS if is_installed(name)]


def shuffled(seed: int) -> list[Case]:
    return [CASES[i] for i in np.random.default_rng(seed).permutation(NUM_CASES)]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(load(make_tiny(tmp_path_factory.mktemp("tiny"))))


@pytest.fixture(scope="module")
def reference(bench: Bench) -> Answers:
    return bench.run(CASES, NUM_BLOCKS, at_once=1, prefix_cache=False)


@pytest.fixture(scope="module")
def start(reference: Answers) -> dict[str, int]:
    """For each case, how many tokens of its answer the client already has."""
    rng = np.random.default_rng(7)
    return {name: int(rng.integers(len(x))) for name, x in reference.tokens.items()}


def test_the_cases_are_of_many_kinds(reference: Answers) -> None:
    answers = list(reference.tokens.values())
    assert len(answers) == NUM_CASES
    assert len({tuple(answer) for answer in answers}) > 0.8 * NUM_CASES
    stopped = sum(answer[-1] in (0, 2) for answer in answers)
    assert 5 < stopped < NUM_CASES / 2
    assert len({token for answer in answers for token in answer}) > 300


@pytest.mark.parametrize("budget", [33, 64, 257])
def test_chunked_in_company(bench: Bench, reference: Answers, budget: int) -> None:
    """Prompts cut wherever the budget ends, up to 32 others in each step."""
    got = bench.run(shuffled(budget), NUM_BLOCKS, max_batched_tokens=budget, prefix_cache=False)
    assert reference.require_equal(got) > 2000


def test_prompts_first(bench: Bench, reference: Answers) -> None:
    reference.require_equal(bench.run(shuffled(1), NUM_BLOCKS, chunked_prefill=False))


def test_out_of_the_prefix_cache(bench: Bench, reference: Answers) -> None:
    """Twice in one pool: the second time every full block of every prompt is there."""
    cached: dict[str, int] = {}

    def observe(host: EngineHost) -> None:
        for notice in notices(host, wire.Started):
            cached[notice.request_id] = notice.cached_tokens  # type: ignore[attr-defined]

    got = bench.run(shuffled(2), 6000, max_batched_tokens=128, rounds=2, observe=observe)
    reference.require_equal(got)
    for case in CASES:
        assert cached[f"{case.name}.1"] == (len(case.prompt_ids) - 1) // 16 * 16
    assert sum(cached[f"{case.name}.0"] > 0 for case in CASES) > 50


def test_split(bench: Bench, reference: Answers) -> None:
    fetched: list[wire.FetchEnded] = []

    def observe(source: EngineHost, target: EngineHost) -> None:
        fetched.extend(notices(target, wire.FetchEnded))  # type: ignore[arg-type]

    got = bench.run_split(shuffled(3), NUM_BLOCKS, max_batched_tokens=64, observe=observe)
    reference.require_equal(got)
    handed_over = sum(len(answer) > 1 for answer in reference.tokens.values())
    assert len(fetched) == handed_over > 250
    assert {one.proof for one in fetched} == {"digest"}
    assert sum(one.reused_tokens > 0 for one in fetched) > 30


@pytest.mark.parametrize("transport", INSTALLED)
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("way", ["request-pull", "chunk-pull", "chunk-push", "layer-push"])
def test_split_by_each_connector(
    bench: Bench, reference: Answers, way: str, prefix_cache: bool, transport: str
) -> None:
    """Transport x valid pair x cache. But for the first pair, KV moves while prefill goes on: what
    steps of 48 tokens filled, or their layers, then the rest."""
    grain, _, direction = way.partition("-")
    parts: list[wire.PartReady] = []

    def observe(source: EngineHost, target: EngineHost) -> None:
        parts.extend(notices(source, wire.PartReady))  # type: ignore[arg-type]

    got = bench.run_split(
        shuffled(8),
        NUM_BLOCKS,
        max_batched_tokens=48,
        prefix_cache=prefix_cache,
        grain=wire.Grain(grain),
        push=direction == "push",
        transport=transport,
        observe=observe,
    )
    reference.require_equal(got)
    assert (len(parts) > 100) == (grain != "request")
    assert (sum(one.part.pushed for one in parts) > 100) == (direction == "push")


@pytest.mark.parametrize("tier", ["disk", "shared_storage"])
@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("way", ["request-pull", "chunk-pull"])
def test_split_through_a_store(
    bench: Bench, reference: Answers, way: str, prefix_cache: bool, tier: str, tmp_path: Path
) -> None:
    """Full blocks by the store, the tails computed by who decodes: from the same bits."""
    fetched: list[wire.FetchEnded] = []

    def observe(source: EngineHost, target: EngineHost) -> None:
        fetched.extend(notices(target, wire.FetchEnded))  # type: ignore[arg-type]

    got = bench.run_split(
        shuffled(8),
        NUM_BLOCKS,
        max_batched_tokens=48,
        prefix_cache=prefix_cache,
        grain=wire.Grain(way.partition("-")[0]),
        store=(f"{tier}:{tmp_path}",),
        by_store=True,
        observe=observe,
    )
    reference.require_equal(got)
    assert sum(one.num_bytes > 0 for one in fetched) > 100
    assert sum(one.missing_tokens > 0 for one in fetched) > 200


@pytest.mark.parametrize("way", ["request-pull", "chunk-pull", "chunk-push", "layer-push"])
def test_split_and_kept(bench: Bench, reference: Answers, way: str, tmp_path: Path) -> None:
    """`multi`: from pool to pool, and kept; then by engines that have only what was kept."""
    grain, _, direction = way.partition("-")
    got = bench.run_split(
        shuffled(9),
        NUM_BLOCKS,
        max_batched_tokens=48,
        grain=wire.Grain(grain),
        push=direction == "push",
        store=(f"disk:{tmp_path}",),
    )
    reference.require_equal(got)
    loaded: list[wire.Loaded] = []

    def observe(host: EngineHost) -> None:
        loaded.extend(notices(host, wire.Loaded))  # type: ignore[arg-type]

    again = bench.run(shuffled(10), NUM_BLOCKS, store=(f"disk:{tmp_path}",), observe=observe)
    reference.require_equal(again)
    assert sum(one.num_tokens for one in loaded) > 1000


def test_fetched_from_whoever_has_it(bench: Bench, reference: Answers) -> None:
    reference.require_equal(bench.run_hinted(shuffled(11), 6000))
    assert bench.num_loaded > 4000


@pytest.mark.parametrize("block_size", [32, 64])
def test_split_between_block_sizes(bench: Bench, reference: Answers, block_size: int) -> None:
    """A change of block size moves bits, and changes none."""
    proofs: list[str] = []

    def observe(source: EngineHost, target: EngineHost) -> None:
        proofs.extend(x.proof for x in notices(target, wire.FetchEnded))  # type: ignore[attr-defined]

    got = bench.run_split(
        shuffled(12),
        NUM_BLOCKS,
        max_batched_tokens=64,
        target_block_size=block_size,
        observe=observe,
    )
    reference.require_equal(got)
    assert proofs.count(f"digest, converted: block_size 16->{block_size}") > 200


def test_split_between_float_types(bench: Bench, tmp_path: Path) -> None:
    """Float32 to bfloat16: what was converted is what the same prompt's KV rounds to, and it says
    so; the first token is the prefill worker's, the others are near."""
    low = Bench(load(make_tiny(tmp_path), "bfloat16"), exact=False)
    high = Bench(bench._loaded, exact=False)
    proofs: list[str] = []

    def observe(source: EngineHost, target: EngineHost) -> None:
        proofs.extend(x.proof for x in notices(target, wire.FetchEnded))  # type: ignore[attr-defined]

    cases = [case for case in CASES if case.sampling.temperature == 0][:40]
    reference = high.run(cases, NUM_BLOCKS, at_once=1)
    got = high.run_split(cases, NUM_BLOCKS, target_bench=low, observe=observe)
    assert set(proofs) == {"digest, converted: dtype float32->bfloat16"}
    assert all(reference.tokens[x.name][0] == got.tokens[x.name][0] for x in cases)
    same = sum(reference.tokens[x.name][:2] == got.tokens[x.name][:2] for x in cases)
    assert same > 0.8 * len(cases)


def test_split_without_cache(bench: Bench, reference: Answers) -> None:
    reference.require_equal(bench.run_split(shuffled(4), NUM_BLOCKS, prefix_cache=False))


def test_resumed(bench: Bench, reference: Answers, start: dict[str, int]) -> None:
    """From a random output token on, computed again elsewhere."""
    got = bench.run(
        shuffled(5),
        NUM_BLOCKS,
        resumed=reference,
        start=start,
        max_batched_tokens=48,
        prefix_cache=False,
    )
    assert reference.require_equal(got, start) > 1000


def test_resumed_and_split(bench: Bench, reference: Answers, start: dict[str, int]) -> None:
    got = bench.run_split(
        shuffled(6), NUM_BLOCKS, resumed=reference, start=start, max_batched_tokens=100
    )
    reference.require_equal(got, start)


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted(bench: Bench, prefix_cache: bool) -> None:
    """Answers that outgrow the pool: running requests lose their blocks and are computed again."""
    rng = np.random.default_rng(9)
    cases = []
    for number in range(24):
        prompt = [int(one) for one in rng.integers(3, 512, int(rng.integers(1, 40)))]
        sampling = Sampling(seed=number, max_tokens=60, temperature=float(number % 2))
        cases.append(Case(f"long-{number}", prompt, sampling))
    reference = bench.run(cases, NUM_BLOCKS, at_once=1, prefix_cache=False)
    preempted: list[wire.Notice] = []

    def observe(host: EngineHost) -> None:
        preempted.extend(notices(host, wire.Preempted))

    got = bench.run(cases, 20, max_batched_tokens=64, prefix_cache=prefix_cache, observe=observe)
    assert reference.require_equal(got) == 24 * 60
    assert len(preempted) >= 5
