"""The torch path against each model's own forward, in every dtype, and against the kernels."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch

from splitserve.engine.step import Draw, PlanItem, StepPlan
from splitserve.errors import ConfigError, UnsupportedModel
from splitserve.model import device_pool, selfcheck, tensor_attention
from splitserve.model.device_pool import DevicePool
from splitserve.model.forward import Forward
from splitserve.model.loader import LoadedModel, load
from splitserve.model.runner import TorchRunner
from splitserve.sampling import Sampling
from tests.model.families import CARRIED, MIXTURES, build

Floats = npt.NDArray[np.float32]

TOKENS = [int(one) for one in np.random.default_rng(0).integers(3, 300, 60)]
DRAW = Draw(Sampling(seed=0, max_tokens=1, temperature=0.0), [], [])
LENGTHS = (60, 41, 23, 1, 9, 33)


def forward_of(loaded: LoadedModel) -> Forward:
    """On 64 blocks of bits that are NaN in every dtype."""
    return Forward(loaded, np.full((64, loaded.kv_format(16).block_bytes), 0xFF, np.uint8), 16)


def item(number: int, start: int, end: int) -> PlanItem:
    """Positions of sequence `number`, which begins anywhere in TOKENS, in blocks of its own."""
    tokens = (TOKENS[number:] + TOKENS[:number])[start:end]
    return PlanItem(f"{number}", tokens, start, [number * 4 + i for i in (2, 0, 3, 1)], DRAW)


def packed_logits(forward: Forward) -> Floats:
    """Last logits of each sequence: prompts beside later chunks, then decodes of all at once."""
    forward.logits(StepPlan([item(0, 0, 20), item(1, 0, 40)]))
    rest = [item(i, 0, n - 1) for i, n in enumerate(LENGTHS) if i > 1 and n > 1]
    forward.logits(StepPlan([item(0, 20, 59), *rest]))
    rows: Floats = forward.logits(StepPlan([item(i, n - 1, n) for i, n in enumerate(LENGTHS)]))
    return rows


def own_logits(module: torch.nn.Module) -> Floats:
    with torch.inference_mode():
        rows = [
            module(torch.tensor([item(i, 0, n).token_ids])).logits[0, -1].float().numpy()
            for i, n in enumerate(LENGTHS)
        ]
    return np.stack(rows)


def difference(rows: Floats, expected: Floats) -> float:
    return float(np.abs(rows - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize("name", CARRIED)
def test_each_family_is_its_own_forward_in_every_dtype(
    tmp_path: Path, tiny_path: Path, name: str
) -> None:
    """Beyond the window, where there is one; loading checks the model in that dtype as well. In a
    mixture a near tie between experts may fall the other way: there most sequences count."""
    kind, changes = CARRIED[name]
    expected = own_logits(build(tmp_path, tiny_path, kind, **changes))
    rows = packed_logits(forward_of(load(tmp_path, by_torch=True)))
    assert difference(rows, expected) < 5e-6
    for dtype, bound in (("bfloat16", 8e-2), ("float16", 1e-2)):
        loaded = load(tmp_path, dtype)
        rows = packed_logits(forward_of(loaded))
        assert loaded.kv_format(16).block_bytes * 2 == loaded.info.kv_format(16).block_bytes
        each = [difference(rows[i], expected[i]) for i in range(len(LENGTHS))]
        assert (np.median(each) if name in MIXTURES else max(each)) < bound, dtype


@pytest.mark.parametrize("limit", [1, 70, 10**6])
def test_how_decodes_are_grouped_does_not_matter(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(tensor_attention, "_GATHER_SLOTS", limit)
    kernels = packed_logits(forward_of(load(tiny_path)))
    rows = packed_logits(forward_of(load(tiny_path, by_torch=True)))
    np.testing.assert_allclose(rows, kernels, atol=1e-5 * float(np.abs(kernels).max()))


def test_one_sequences_nan_stays_its_own(tiny_path: Path) -> None:
    """Decodes that attend in one group, one of them over KV that was never written."""
    forward = forward_of(load(tiny_path, "bfloat16"))
    forward.logits(StepPlan([item(0, 0, 20)]))
    alone = forward.logits(StepPlan([item(0, 20, 21)]))[0]
    rows = forward.logits(StepPlan([item(0, 20, 21), item(1, 40, 41)]))
    assert np.isnan(rows[1]).all()
    np.testing.assert_allclose(rows[0], alone, atol=2e-2 * float(np.abs(alone).max()))


def test_a_model_on_another_device_is_checked_there(tiny_path: Path) -> None:
    loaded = load(tiny_path, "bfloat16")
    moved = loaded.on("cpu:0")
    np.testing.assert_array_equal(
        packed_logits(forward_of(moved)), packed_logits(forward_of(loaded))
    )
    moved.module.model.norm.weight *= 1.5  # type: ignore[union-attr,operator]
    with pytest.raises(UnsupportedModel, match=r"logits differ .* where 6e-02 is allowed"):
        loaded.on("cpu:0")


def test_what_is_wrong_shows_in_low_precision_too(
    tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, changes = CARRIED["mistral"]
    build(tmp_path, tiny_path, kind, **changes)
    monkeypatch.setattr(tensor_attention.TensorStep, "_grouped", lambda self, window: [])
    with pytest.raises(UnsupportedModel, match="logits differ"):
        load(tmp_path, "float16")
    assert set(selfcheck.TOLERANCES) == {"float32", "bfloat16", "float16"}


def test_a_pool_on_a_device_is_apart_and_one_on_the_cpu_is_not(tiny_path: Path) -> None:
    kv_format = load(tiny_path, "bfloat16").kv_format(16)
    blocks = np.zeros((4, kv_format.block_bytes), np.uint8)
    same, apart = DevicePool(blocks, kv_format), DevicePool(blocks, kv_format, "cpu:0")
    assert not same.is_staged
    same.tensor[1] = 1
    assert blocks[1].any()
    assert not apart.tensor.any()
    apart.to_device([1])
    assert (apart.tensor[1] == 1).all()
    assert not apart.tensor[0].any()
    apart.tensor[2:] = 2
    assert not blocks[2:].any()
    apart.to_host([2])
    assert (same.tensor[2] == 2).all()
    assert not blocks[3].any()


def test_memory_that_a_device_does_not_have_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"of 67108864 MiB can't be allocated on cpu:0"):
        device_pool._allocated((1 << 45,), torch.bfloat16, "cpu:0")


def test_weights_that_do_not_fit_a_device_are_an_error(
    tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(tiny_path, "bfloat16")

    def full(device: str) -> None:
        raise torch.OutOfMemoryError(f"{device} is full")

    monkeypatch.setattr(loaded.module, "to", full)
    with pytest.raises(ConfigError, match="can't be moved to cpu:0: cpu:0 is full"):
        loaded.on("cpu:0")


def test_exact_mode_is_refused(tiny_path: Path) -> None:
    loaded = load(tiny_path, by_torch=True)
    blocks = np.zeros((4, loaded.kv_format(16).block_bytes), np.uint8)
    with pytest.raises(ConfigError, match="Exact mode is for float32 on the CPU"):
        TorchRunner(loaded, blocks, 16, exact=True)


def test_loading_asks_cuda_nothing(tiny_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has asked may not fork workers that compute there."""
    asked: list[str] = []
    for name in ("is_available", "device_count", "init", "_lazy_init"):
        monkeypatch.setattr(torch.cuda, name, lambda name=name: asked.append(name) or False)
    load(tiny_path, "bfloat16", by_torch=True)
    assert asked == []
