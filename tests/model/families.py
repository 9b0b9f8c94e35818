"""The model families that tests carry and refuse, as tiny random models on disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

COMMON: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_NO_GROUPS = {"num_key_value_heads": None, "head_dim": None}
_TIED = {**_NO_GROUPS, "tie_word_embeddings": True}
_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}
_MLA = {
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
    "head_dim": 8,
    "first_k_dense_replace": 2,
}
_SLIDING = {"sliding_window": 12, "layer_types": ["sliding_attention", "full_attention"]}

CARRIED: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", _MOE),
    "mistral": ("mistral", {"sliding_window": 12}),
    "gemma": ("gemma", {}),
    "gemma2": ("gemma2", {**_SLIDING, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0}),
    "gemma3_text": ("gemma3_text", {**_SLIDING, "query_pre_attn_scalar": 20}),
    "phi3": ("phi3", {"sliding_window": 12}),
    "olmo": ("olmo", {}),
    "olmo2": ("olmo2", {}),
    "granite": ("granite", {"attention_multiplier": 0.1}),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 256, **_TIED}),
    "opt": ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64, **_NO_GROUPS}),
    "gpt_neox": ("gpt_neox", _NO_GROUPS),
    "gpt_oss": ("gpt_oss", {**_SLIDING, **_OSS}),
    "deepseek_v3": ("deepseek_v3", _MLA),
    "starcoder2": ("starcoder2", {"sliding_window": 12}),
    "smollm3": ("smollm3", {}),
}
"""Name of a directory: model type and changes to COMMON."""

MIXTURES = ("qwen3_moe", "gpt_oss")

REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "mamba": ("mamba", {}, "layers 0-1 (MambaMixer): recurrent"),
    "jamba": (
        "jamba",
        {
            **_MOE,
            "mamba_d_state": 8,
            "use_mamba_kernels": False,
            "num_hidden_layers": 4,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
        },
        "layers 0-1, 3 (JambaMambaMixer): recurrent",
    ),
    "t5": ("t5", {"d_model": 64, "d_ff": 128, "d_kv": 16, **_NO_GROUPS}, "encoder-decoder"),
    "gemma3n_text": (
        "gemma3n_text",
        {
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_hidden_layers": 4,
            "num_kv_shared_layers": 2,
            "vocab_size_per_layer_input": 300,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 8,
            "activation_sparsity_pattern": None,
            "intermediate_size": [128] * 4,
        },
        "layers 2-3 share the KV of earlier ones",
    ),
    "bloom": ("bloom", {}, "ALiBi position biases"),
    "falcon": ("falcon", _NO_GROUPS, "attention is not replaceable"),
    "stablelm": ("stablelm", {}, "attention is not replaceable"),
    "nemotron": ("nemotron", {}, "do not pass our arguments on"),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}, "layer 0 of type conv"),
}
"""Name of a directory: model type, changes to COMMON, and what the refusal says."""


def build(path: Path, tiny_path: Path, kind: str, dtype: str = "float32", **changes: Any) -> Any:
    """A random model of a family, saved with the tiny model's tokenizer; in float32 in memory."""
    torch.manual_seed(0)
    settings = {key: one for key, one in {**COMMON, **changes}.items() if one is not None}
    config = AutoConfig.for_model(kind, **settings)
    auto = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    module = auto.from_config(config, attn_implementation="eager").eval()
    wide = 0.02 if config.tie_word_embeddings else 1.0  # tied and wide, each token repeats itself
    for name, weights in module.named_parameters():
        if weights.dim() >= 2:
            weights.data.normal_(0, wide if "embed" in name or "wte" in name else 0.2)
        elif name.endswith("sinks"):
            weights.data.normal_(0, 1)
    module.to(getattr(torch, dtype)).save_pretrained(path)
    shutil.copy(tiny_path / "tokenizer.json", path)
    return module.float()


def generated(module: Any, prompt_ids: list[int], num_outputs: int) -> list[int]:
    """transformers' own greedy answer; no token ends it."""
    output: list[int] = module.generate(
        torch.tensor([prompt_ids]),
        attention_mask=torch.ones(1, len(prompt_ids), dtype=torch.long),
        max_new_tokens=num_outputs,
        do_sample=False,
        eos_token_id=None,
    )[0, len(prompt_ids) :].tolist()
    return output
