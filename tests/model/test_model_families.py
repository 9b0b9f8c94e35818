"""Model families beyond Llama: right where they are accepted, refused at loading where not."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from splitserve.engine.step import Draw, PlanItem, StepPlan
from splitserve.errors import UnsupportedModel
from splitserve.model.forward import Forward
from splitserve.model.loader import load
from splitserve.sampling import Sampling

COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def build(path: Path, tiny_path: Path, kind: str, **changes: Any) -> torch.nn.Module:
    """A random model of a family, saved with the tiny model's tokenizer."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **{**COMMON, **changes})
    module: torch.nn.Module = AutoModelForCausalLM.from_config(config).float().eval()
    for weights in module.parameters():
        if weights.dim() >= 2:
            weights.data.normal_(0, 0.2)
    module.save_pretrained(path)  # type: ignore[operator]
    shutil.copy(tiny_path / "tokenizer.json", path)
    return module


@pytest.mark.parametrize("torch_attention", [False, True])
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("qwen2", {}),
        ("qwen3", {}),
        ("mistral", {"sliding_window": None}),
        ("phi3", {}),
        ("gemma", {}),
        ("olmo2", {}),
        ("granite", {"attention_multiplier": 0.1}),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}),
    ],
)
def test_chunks_and_company_give_the_familys_logits(
    tmp_path: Path, tiny_path: Path, kind: str, changes: dict[str, Any], torch_attention: bool
) -> None:
    module = build(tmp_path, tiny_path, kind, **changes)
    loaded = load(tmp_path)
    blocks = np.empty((16, loaded.kv_format(16).block_bytes), np.uint8)
    blocks.view(np.float32)[:] = np.nan
    ids = [int(one) for one in np.random.default_rng(0).integers(3, 300, 60)]
    with torch.inference_mode():
        expected = module(torch.tensor([ids])).logits[0, 59].numpy()
    forward = Forward(loaded, blocks, 16, torch_attention=torch_attention)
    table, other, draw = [5, 2, 7, 1], [9, 10, 11], Draw(Sampling(seed=0, max_tokens=1), [], [])
    forward.logits(StepPlan([PlanItem("a", ids[:30], 0, table, None)]))
    beside = PlanItem("b", ids[:20], 0, other, None)
    forward.logits(StepPlan([PlanItem("a", ids[30:59], 30, table, None), beside]))
    beside = PlanItem("b", ids[20:40], 20, other, draw)
    logits = forward.logits(StepPlan([beside, PlanItem("a", ids[59:], 59, table, draw)]))
    np.testing.assert_allclose(logits[1], expected, atol=2e-5 * float(np.abs(expected).max()))


@pytest.mark.parametrize(
    ("kind", "changes", "reason"),
    [
        ("mistral", {"sliding_window": 128}, "sliding window of 128"),
        ("gemma2", {}, "softcapping"),
        ("stablelm", {}, "attention is not replaceable"),
        ("nemotron", {}, "do not pass our arguments on"),
        ("gpt_neox", {}, "4 KV heads where 2 were expected"),
        ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4}, "lacks hidden_size"),
        ("mamba", {}, "recurrent"),
    ],
)
def test_refused_by_name(
    tmp_path: Path, tiny_path: Path, kind: str, changes: dict[str, Any], reason: str
) -> None:
    build(tmp_path, tiny_path, kind, **changes)
    with pytest.raises(UnsupportedModel, match=reason):
        load(tmp_path)
