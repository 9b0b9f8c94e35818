"""Fused decoder layers: which models get them, that they are right, and that wrong ones go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from splitserve.model import rows
from splitserve.model.fused import FusedLayer
from splitserve.model.linear import PackedLinear
from splitserve.model.loader import LoadedModel, load
from tests.model.families import CARRIED, build


def num_fused(loaded: LoadedModel) -> int:
    return sum(isinstance(one, FusedLayer) for one in loaded.module.modules())


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "gemma2", "gpt2"])
def test_layers_of_llamas_shape_are_fused(tmp_path: Path, tiny_path: Path, name: str) -> None:
    kind, changes = CARRIED[name]
    build(tmp_path, tiny_path, kind, "float32", **changes)
    loaded = load(tmp_path)  # which checks the logits
    assert num_fused(loaded) == (0 if name in ("gemma2", "gpt2") else 2)


@pytest.mark.parametrize(
    "change", [{"hidden_act": "gelu"}, {"head_dim": 24}, {"attention_bias": True}]
)
def test_variants_of_llama(tmp_path: Path, tiny_path: Path, change: dict[str, Any]) -> None:
    build(tmp_path, tiny_path, "llama", "float32", **change)
    assert num_fused(load(tmp_path)) == (2 if "attention_bias" in change else 0)


def test_a_layer_that_computes_something_else_is_put_back(
    tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, tiny_path, "llama", "float32")
    original = LlamaDecoderLayer.forward

    def doubled(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        return original(self, hidden_states, **kwargs) + hidden_states

    monkeypatch.setattr(LlamaDecoderLayer, "forward", doubled)
    loaded = load(tmp_path)
    assert num_fused(loaded) == 0
    packed = [one for one in loaded.module.modules() if isinstance(one, PackedLinear)]
    assert set(loaded.packing.layers) == set(packed)


def test_int8_weights_are_made_for_the_fused_layers_alone(tiny_path: Path) -> None:
    loaded = load(tiny_path)
    loaded.packing.quantize()
    (first, *_) = (one for one in loaded.module.modules() if isinstance(one, FusedLayer))
    assert first._qkv.levels is not None
    assert first.original.self_attn.q_proj.levels is None
    assert np.shares_memory(first.original.self_attn.q_proj.panels, first._qkv.panels)


def test_norm_and_gate_are_torchs() -> None:
    generator = torch.Generator().manual_seed(0)
    x, delta = torch.randn(2, 5, 64, generator=generator)
    weight = torch.randn(64, generator=generator)
    expected = torch.nn.functional.rms_norm(x + delta, (64,), weight, 1e-5)
    flat, normed = x.flatten().numpy(), np.empty(5 * 64, np.float32)
    rows.add_and_norm(flat, delta.flatten().numpy(), weight.numpy(), normed, 5, 1e-5)
    np.testing.assert_allclose(normed, expected.flatten(), rtol=1e-5, atol=1e-6)
    before = flat.copy()
    rows.add_and_norm(flat, np.empty(0, np.float32), weight.numpy(), normed, 5, 1e-5)
    np.testing.assert_array_equal(flat, before)

    both = torch.randn(3, 2 * 16, generator=generator) * 40  # far into both tails
    both[0, :2] = torch.tensor([-200.0, 200.0])
    gated = np.empty(3 * 16, np.float32)
    rows.gate(both.flatten().numpy(), gated, 3, 16)
    expected = torch.nn.functional.silu(both[:, :16]) * both[:, 16:]
    np.testing.assert_allclose(gated.reshape(3, 16), expected, rtol=2e-6, atol=1e-30)
