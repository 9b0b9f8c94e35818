"""What is refused: at loading, by the name of the model type or the layer."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral

from splitserve.errors import UnsupportedModel
from splitserve.model import selfcheck
from splitserve.model.loader import LoadedModel, load
from splitserve.model.support import require_supported
from tests.model.families import REFUSED, build


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(tmp_path: Path, tiny_path: Path, name: str) -> None:
    kind, changes, reason = REFUSED[name]
    build(tmp_path, tiny_path, kind, **changes)
    with pytest.raises(UnsupportedModel) as refusal:
        load(tmp_path)
    assert f"type {kind} can't be served" in refusal.value.message
    assert reason in refusal.value.message


def test_recurrent_layers_are_named_before_weights_are_read(
    tmp_path: Path, tiny_path: Path
) -> None:
    kind, changes, reason = REFUSED["jamba"]
    build(tmp_path, tiny_path, kind, **changes)
    (tmp_path / "model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=re.escape(reason)):
        load(tmp_path)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"model_type": "bamba", "attn_layer_indices": [1]}, "layers 0, 2-3 (BambaMixer)"),
        ({"model_type": "jamba", "num_hidden_layers": None}, "its layers (JambaMambaMixer)"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-*M"}, "layers 0, 3 (Nemo"),
        (
            {"model_type": "recurrent_gemma", "block_types": ["recurrent", "attention"]},
            "layers 0, 2 (RecurrentGemmaRecurrentBlock)",
        ),
        ({"lru_width": 8, "layer_types": ["conv", *["attention"] * 3]}, "layer 0 (lru_width)"),
    ],
)
def test_which_layers_are_recurrent(config: dict[str, Any], told: str) -> None:
    with pytest.raises(UnsupportedModel, match=re.escape(told)):
        require_supported({"num_hidden_layers": 4, **config})


def test_kv_of_another_shape_than_the_configuration_tells(tmp_path: Path, tiny_path: Path) -> None:
    build(tmp_path, tiny_path, "gpt_neox")
    with pytest.raises(UnsupportedModel, match=r"Layer 0 \(GPTNeoX.*: 4 KV heads where 2"):
        load(tmp_path)


def patched(monkeypatch: pytest.MonkeyPatch, kind: Any, change: dict[str, Any]) -> None:
    """Let attention modules of a class give more arguments to the attention interface."""
    plain = kind.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return plain(self, *args, **kwargs, **change)

    monkeypatch.setattr(kind, "forward", forward)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention_bias": 1.0}, r"Layer 0 \(LlamaAttention\).*the argument attention_bias"),
        ({"sliding_window": 8}, r"Layer 0 \(LlamaAttention\) has a mask of all tokens.*of 8"),
        ({"softcap": 0.5}, "logits differ from the model's own by .* after 16 tokens"),
        ({"s_aux": torch.ones(4)}, "logits differ from the model's own by"),
    ],
)
def test_arguments_that_are_not_what_the_model_itself_does(
    tmp_path: Path,
    tiny_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    reason: str,
) -> None:
    """The eager attention of Llama ignores them all."""
    build(tmp_path, tiny_path, "llama")
    patched(monkeypatch, modeling_llama.LlamaAttention, change)
    with pytest.raises(UnsupportedModel, match=f"type llama can't be served: .*{reason}"):
        load(tmp_path)


def test_a_window_that_only_the_mask_knows(
    tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Longer than the 48 tokens of the check, so that no logit tells."""
    build(tmp_path, tiny_path, "mistral", sliding_window=100)
    source = modeling_mistral.create_sliding_window_causal_mask
    monkeypatch.setattr(modeling_llama, "create_causal_mask", source)
    path = tmp_path / "llama"
    build(path, tiny_path, "llama", sliding_window=100)
    with pytest.raises(UnsupportedModel, match=r"Layer 0 \(LlamaAttention\) has a mask of 100 "):
        load(path)


def test_a_layer_that_never_attends_is_named(
    tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, tiny_path, "llama", num_hidden_layers=3)
    plain = modeling_llama.LlamaAttention.forward

    def forward(self: Any, hidden_states: torch.Tensor, **kwargs: Any) -> Any:
        if self.layer_idx == 1:
            return hidden_states, None
        return plain(self, hidden_states, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", forward)
    with pytest.raises(UnsupportedModel, match="layer 1 never attend"):
        load(tmp_path)


def test_a_layer_that_looks_ahead(
    tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, tiny_path, "llama")
    patched(monkeypatch, modeling_llama.LlamaAttention, {"is_causal": False})
    with pytest.raises(UnsupportedModel, match="attention that is not causal"):
        load(tmp_path)


def test_positions_that_restart_with_each_chunk(
    tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(tmp_path, tiny_path, "llama")
    plain = modeling_llama.LlamaRotaryEmbedding.forward

    def forward(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return plain(self, x, torch.arange(position_ids.shape[1])[None])

    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", forward)
    with pytest.raises(UnsupportedModel, match=r"differ .* after 47 tokens.*2e-04 is allowed"):
        load(tmp_path)


def test_the_tolerance_is_far_from_both_sides(
    tmp_path: Path, tiny_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding stays 50 times below it, a scale that is 0.2 % off is above."""
    differences = []
    plain = selfcheck._require_equal

    def note(loaded: LoadedModel, rows: Any, expected: Any) -> None:
        differences.append(np.abs(rows - expected).max() / np.abs(expected).max())
        plain(loaded, rows, expected)

    monkeypatch.setattr(selfcheck, "_require_equal", note)
    build(tmp_path, tiny_path, "llama", num_hidden_layers=8)
    load(tmp_path)
    assert len(differences) == 3  # by the kernel, by torch, with fused layers
    assert max(differences) < selfcheck.TOLERANCE / 50
    forward = modeling_llama.LlamaAttention.forward

    def scaled(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.scaling = 16**-0.5 * (1 if self.config._attn_implementation == "eager" else 1.002)
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(modeling_llama.LlamaAttention, "forward", scaled)
    with pytest.raises(UnsupportedModel, match="logits differ"):
        load(tmp_path)
