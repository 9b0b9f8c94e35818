"""KV formats that differ: converted where it is read, or refused with both values."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
import torch

from splitserve import wire
from splitserve.connector.convert import find_converter
from splitserve.engine.scheduler import SchedulerConfig
from splitserve.errors import FormatMismatch
from splitserve.kv.format import KVFormat
from splitserve.model.simulated import simulated_format
from splitserve.sampling import Sampling
from splitserve.transport.registry import TRANSPORTS, is_installed
from splitserve.wire import Leg
from tests.support.engines import EngineHost, expected_tokens

GREEDY = Sampling(seed=0, max_tokens=12, temperature=0.0)
BASE = KVFormat(dtype="float32", block_size=16, num_layers=2, num_kv_heads=3, head_dim=4)
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def with_fields(**fields: object) -> KVFormat:
    return msgspec.structs.replace(BASE, **fields)  # type: ignore[arg-type]


def as_tensor(block: np.ndarray, kv_format: KVFormat) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(block.tobytes()), dtype=TORCH[kv_format.dtype])
    return flat.reshape(kv_format.block_shape)


@pytest.mark.parametrize("source", list(TORCH))
@pytest.mark.parametrize("target", list(TORCH))
@pytest.mark.parametrize("sizes", [(16, 16), (16, 64), (64, 16), (32, 16)])
def test_a_conversion_is_that_of_torch(source: str, target: str, sizes: tuple[int, int]) -> None:
    there = with_fields(dtype=source, block_size=sizes[0])
    here = with_fields(dtype=target, block_size=sizes[1])
    converter = find_converter(there, here, "the source")
    if there == here:
        assert converter is None
        return
    assert converter is not None
    torch.manual_seed(0)
    special = torch.tensor([0.0, -0.0, 1.0, float("inf"), -float("inf"), float("nan"), 1e-40, 7e4])
    num_tokens = max(sizes)
    whole = torch.randn((2, 2, 3, num_tokens, 4)) * 100
    whole.reshape(-1)[: len(special)] = special
    whole = whole.to(TORCH[source])
    sources = [
        np.frombuffer(part.contiguous().view(torch.uint8).numpy().tobytes(), dtype=np.uint8)
        for part in whole.split(there.block_size, dim=3)
    ]
    assert len(sources) == converter.source_per_unit
    targets = [np.zeros(here.block_bytes, np.uint8) for _ in range(converter.target_per_unit)]
    converter.convert(sources, targets)
    got = torch.cat([as_tensor(one, here) for one in targets], dim=3)
    expected = whole.to(torch.float32).to(TORCH[target])
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(), expected.nan_to_num())


def test_a_name_says_what_changes() -> None:
    here = with_fields(dtype="bfloat16", block_size=32)
    converter = find_converter(BASE, here, "x")
    assert converter is not None
    assert converter.name == "dtype float32->bfloat16, block_size 16->32"


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"num_layers": 3}, "num_layers: 2 here, 3 there"),
        ({"head_dim": 8}, "head_dim: 4 here, 8 there"),
        ({"head_shard": "0/2"}, "'0/1' here, '0/2' there"),
        ({"layout_version": 2}, "layout_version: 1 here, 2 there"),
        ({"block_size": 48}, None),
        ({"block_size": 32}, None),
    ],
)
def test_what_can_not_be_converted_is_refused_with_both_values(
    fields: dict[str, object], words: str | None
) -> None:
    if words is None:
        assert find_converter(BASE, with_fields(**fields), "x") is not None
        return
    with pytest.raises(FormatMismatch, match="differs") as caught:
        find_converter(BASE, with_fields(**fields), "x")
    assert words in caught.value.message
    with pytest.raises(FormatMismatch, match="48 tokens can't be converted to 32"):
        find_converter(with_fields(block_size=48), with_fields(block_size=32), "x")


@pytest.mark.parametrize("transport", [x for x in TRANSPORTS if is_installed(x)])
@pytest.mark.parametrize("digests", ["full", "lease"])
@pytest.mark.parametrize("sizes", [(16, 32), (32, 16), (16, 64), (64, 16)])
def test_a_handoff_between_block_sizes(
    sizes: tuple[int, int], digests: str, transport: str
) -> None:
    """All lengths around the ends of blocks, with and without a prefix that is here already."""
    config = SchedulerConfig(max_batched_tokens=64, max_sequences=16)
    prefill, decode = (
        EngineHost(
            64, config, block_size=size, digests=digests, transport=transport, worker_id=f"w{size}"
        )
        for size in sizes
    )
    lengths = [1, 15, 16, 17, 31, 32, 33, 47, 63, 64, 65, 100, 200]
    for number, length in enumerate(lengths):
        prompt = [*range(min(length, 50)), *range(100, 100 + length)][:length]
        name = f"r{number}"
        prefill.submit(name, prompt, GREEDY, Leg.PREFILL)
        offered = prefill.run_until(wire.Offered, num=number + 1)[-1]
        assert isinstance(offered, wire.Offered)
        offer = offered.offer
        decode.submit(name, prompt, GREEDY, Leg.DECODE, list(offer.output_ids), offer)
        decode.run_until(wire.End, num=number + 1)
        got = [offer.output_ids[0], *decode.tokens[name]]
        assert got == expected_tokens(prompt, GREEDY, 12), length
    fetched = [x for x in decode.notices if isinstance(x, wire.FetchEnded)]
    proof = "digest" if digests == "full" else "lease"
    moved = [x for x in fetched if x.num_bytes]
    assert {x.proof for x in moved} == {f"{proof}, converted: block_size {sizes[0]}->{sizes[1]}"}
    assert any(x.reused_tokens for x in fetched)
    prefill.settle()
    decode.settle()
    prefill.close()
    decode.close()


def test_damage_shows_before_it_is_converted() -> None:
    prefill = EngineHost(block_size=16, worker_id="p")
    decode = EngineHost(block_size=32, worker_id="d")
    prompt = list(range(100))
    prefill.submit("r", prompt, GREEDY, Leg.PREFILL)
    (offered,) = prefill.run_until(wire.Offered)
    assert isinstance(offered, wire.Offered)
    offer = offered.offer
    prefill.segment.blocks[offer.block_ids[4]][3] ^= 1
    decode.submit("r", prompt, GREEDY, Leg.DECODE, list(offer.output_ids), offer)
    (failed,) = decode.run_until(wire.FetchFailed)
    assert isinstance(failed, wire.FetchFailed)
    assert "digest" in failed.reason
    for host in (prefill, decode):
        host.settle()
        host.close()


def test_blocks_of_another_size_are_not_lent_to_who_asks() -> None:
    """A prefix is fetched as it is or not at all; the hint is told to be wrong."""
    holder = EngineHost(block_size=16, worker_id="holder")
    other = EngineHost(block_size=32, worker_id="other")
    prompt = list(range(100))
    holder.submit("first", prompt, GREEDY)
    holder.run_until(wire.End)
    hint = wire.Hint("holder", holder.config.epoch, holder.connector.address, 3, 0.0, 1.0)
    other.submit("r", prompt, GREEDY, hints=[hint])
    other.run_until(wire.End)
    assert other.tokens["r"] == expected_tokens(prompt, GREEDY, 12)
    assert [x.num_blocks for x in other.notices if isinstance(x, wire.HintFailed)] == [0]
    for host in (holder, other):
        host.settle()
        host.close()


def test_simulated_formats_convert() -> None:
    assert find_converter(simulated_format(16), simulated_format(32), "x") is not None
