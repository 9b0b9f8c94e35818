"""Handoffs between engines whose pools are tensors: other dtypes, and pools that are not where
peers read.

`cpu:0` is a device like any other here: its pool is apart from the segment, so that an answer can
only be right if blocks were brought to the host before they were offered, and to the device before
they were used.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from splitserve import wire
from splitserve.errors import DeviceLost
from splitserve.model.device_pool import DevicePool
from splitserve.model.loader import LoadedModel, load
from splitserve.model.tiny import make_tiny
from splitserve.sampling import Sampling
from tests.support.engines import EngineHost
from tests.support.parity import Answers, Bench, Case

NUM_BLOCKS = 64


def make_cases() -> list[Case]:
    """Prompts of 1 to 200 tokens, the second half continuing the first."""
    rng = np.random.default_rng(5)
    prompts = [[int(one) for one in rng.integers(3, 512, n)] for n in (1, 16, 37, 100)]
    prompts += [[*prompts[-1], *(int(one) for one in rng.integers(3, 512, n))] for n in (3, 100)]
    greedy = Sampling(seed=0, max_tokens=12, temperature=0.0)
    return [Case(f"case-{i}", prompt, greedy) for i, prompt in enumerate(prompts)]


CASES = make_cases()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module", params=["float32", "bfloat16", "float16"])
def loaded(tiny: Path, request: pytest.FixtureRequest) -> LoadedModel:
    return load(tiny, request.param, by_torch=True)


def split_answers(loaded: LoadedModel) -> Answers:
    """One case after the other, so that the steps are the same each time."""
    bench = Bench(loaded, exact=False)
    answers = Answers()
    for case in CASES:
        one = bench.run_split([case], NUM_BLOCKS)
        answers.tokens |= one.tokens
        answers.logits |= one.logits
    return answers


def test_split_is_colocated_and_staged_is_split_bit_for_bit(loaded: LoadedModel) -> None:
    """On one engine, each request alone and without a cache, the same steps come one by one. The
    weights are moved first: MKL's sums depend on where in memory they are."""
    moved = loaded.on("cpu:0")
    colocated = Bench(loaded, exact=False).run(CASES, NUM_BLOCKS, at_once=1, prefix_cache=False)
    split = split_answers(loaded)
    assert colocated.require_equal(split) == 12 * len(CASES)
    assert split_answers(moved).require_equal(colocated) == 12 * len(CASES)


def test_all_at_once_over_one_cache_on_devices(tiny: Path) -> None:
    """Chunked, fetched only in part; in float32 rounding decides no token."""
    bench = Bench(load(tiny, by_torch=True).on("cpu:0"), exact=False)
    expected = Bench(load(tiny), exact=False).run(CASES, NUM_BLOCKS, at_once=1, prefix_cache=False)
    got = bench.run_split(CASES, NUM_BLOCKS, max_batched_tokens=48)
    assert got.tokens == expected.tokens


@pytest.mark.parametrize("way", ["to_host", "to_device"])
def test_without_either_copy_the_answers_are_others(
    tiny: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    loaded = load(tiny, "bfloat16").on("cpu:0")
    expected = split_answers(loaded)
    monkeypatch.setattr(DevicePool, way, lambda self, block_ids: None)
    assert split_answers(loaded).tokens != expected.tokens


def offer_of(host: EngineHost) -> wire.Offer:
    host.submit("p", CASES[2].prompt_ids, CASES[2].sampling, wire.Leg.PREFILL)
    (offered,) = host.run_until(wire.Offered)
    assert isinstance(offered, wire.Offered)
    return offered.offer


def refusal(host: EngineHost, offer: wire.Offer) -> str:
    case = CASES[2]
    host.notices.clear()
    host.submit("d", case.prompt_ids, case.sampling, wire.Leg.DECODE, offer.output_ids, offer)
    (failed,) = host.run_until(wire.FetchFailed)
    assert isinstance(failed, wire.FetchFailed)
    return failed.reason


def test_an_offer_that_hides_its_dtype_is_not_used(tiny: Path) -> None:
    """Pools of different dtypes convert (tests/connector/test_convert.py), if both are known."""
    source = Bench(load(tiny, "bfloat16"), exact=False).host(Answers(), NUM_BLOCKS)
    target = Bench(load(tiny), exact=False).host(Answers(), NUM_BLOCKS)
    offer = offer_of(source)
    forged = msgspec.structs.replace(offer, format=target.config.kv_format)
    assert "another than was offered" in refusal(target, forged)
    for host in (source, target):
        host.engine.abort("p")
        host.settle()
        host.close()


def fails(self: DevicePool, block_ids: list[int]) -> None:
    raise RuntimeError("the device is gone")


def test_a_copy_to_the_host_that_fails_ends_the_leg_and_its_lease(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = Bench(load(tiny, "bfloat16").on("cpu:0"), exact=False).host(Answers(), NUM_BLOCKS)
    monkeypatch.setattr(DevicePool, "to_host", fails)
    host.submit("p", CASES[2].prompt_ids, CASES[2].sampling, wire.Leg.PREFILL)
    (end,) = host.run_until(wire.End)
    assert isinstance(end, wire.End)
    assert (end.reason, end.code) == ("error", "transfer_failed")
    assert "the device is gone" in end.message
    host.settle()
    host.close()


def test_a_lost_device_is_the_end_of_the_process(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not of one request after the other: nothing that this process computes can succeed."""
    host = Bench(load(tiny, "bfloat16").on("cpu:0"), exact=False).host(Answers(), NUM_BLOCKS)

    def lost(self: LlamaForCausalLM, **kwargs: object) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(LlamaForCausalLM, "forward", lost)
    for name in ("a", "b"):
        host.submit(name, CASES[2].prompt_ids, CASES[2].sampling)
    with pytest.raises(DeviceLost, match="illegal memory access"):
        host.turn()
    assert not [notice for notice in host.notices if isinstance(notice, wire.End)]
    host.close()


def test_a_copy_to_the_device_that_fails_is_a_failed_fetch(
    tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(load(tiny, "bfloat16").on("cpu:0"), exact=False)
    source, target = bench.host(Answers(), NUM_BLOCKS), bench.host(Answers(), NUM_BLOCKS)
    offer = offer_of(source)
    monkeypatch.setattr(DevicePool, "to_device", fails)
    assert "the device is gone" in refusal(target, offer)
    assert target.pool.counts()["free"] == NUM_BLOCKS
    for host in (source, target):
        host.settle()
        host.close()
