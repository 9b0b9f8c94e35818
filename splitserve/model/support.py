"""Which models the paged pool and its kernels can carry, judged from config.json alone.

What a configuration can't tell, whether attention goes through transformers' attention interface,
is tried out when the model is loaded (`loader`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from splitserve.errors import UnsupportedModel

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")

_RECURRENT_KEYS = (
    "ssm_cfg",
    "mamba_d_state",
    "mamba_expand",
    "state_size",
    "conv_L_cache",
    "lru_width",
)

_COUPLED_KEYS = {
    "kv_lora_rank": "latent attention, whose K and V differ in width",
    "qk_rope_head_dim": "latent attention, whose K and V differ in width",
    "attn_logit_softcapping": "softcapping of attention scores",
    "num_kv_shared_layers": "layers that share their KV",
    "cross_attention_layers": "cross-attention",
    "alibi": "ALiBi position biases",
}

_KNOWN_TYPES = {
    "gpt_oss": "attention sinks",
    "bloom": "ALiBi position biases",
    "mpt": "ALiBi position biases",
    "rwkv": "recurrent layers",
    "mamba": "recurrent layers",
    "mamba2": "recurrent layers",
    "recurrent_gemma": "recurrent layers",
}


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings in one form, whichever transformers version wrote the configuration."""
    if isinstance(written := config.get("rope_parameters"), Mapping):
        parameters = dict(written)
    else:
        parameters = dict(config.get("rope_scaling") or {})
        if "type" in parameters:
            parameters.setdefault("rope_type", parameters.pop("type"))
    if "rope_theta" not in parameters and config.get("rope_theta") is not None:
        parameters["rope_theta"] = config["rope_theta"]
    parameters.setdefault("rope_type", "default")
    if config.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return parameters


def active_window(config: Mapping[str, Any]) -> int | None:
    """The sliding window in tokens if it can ever hide a position, else None."""
    window = config.get("sliding_window")
    if not isinstance(window, int) or config.get("use_sliding_window") is False:
        return None
    layer_types = config.get("layer_types")
    if layer_types is not None and "sliding_attention" not in layer_types:
        return None
    return window if window < int(config.get("max_position_embeddings", 0)) else None


def head_dim(config: Mapping[str, Any]) -> int:
    """Width of one head."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def require_supported(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel that names the model type and everything the engine can't carry."""
    reasons = list(_reasons(config))
    if reasons:
        kind = config.get("model_type", "without a model_type")
        raise UnsupportedModel(f"Models of type {kind} can't be served: {'; '.join(reasons)}.")


def _reasons(config: Mapping[str, Any]) -> list[str]:
    reasons = []
    if config.get("is_encoder_decoder"):
        reasons.append("encoder-decoder")
    if "text_config" in config or "vision_config" in config:
        reasons.append("more than one modality")
    if config.get("model_type") in _KNOWN_TYPES:
        reasons.append(_KNOWN_TYPES[config["model_type"]])
    reasons += [why for key, why in _COUPLED_KEYS.items() if config.get(key)]
    if any(config.get(key) for key in _RECURRENT_KEYS):
        reasons.append("recurrent layers")
    others = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if others:
        reasons.append(f"layers of type {', '.join(sorted(others))}")
    if (window := active_window(config)) is not None:
        reasons.append(f"a sliding window of {window} tokens")
    value_dim = config.get("v_head_dim")
    if value_dim and "num_attention_heads" in config and value_dim != head_dim(config):
        reasons.append(f"K heads of width {head_dim(config)} and V heads of width {value_dim}")
    rope_type = _rope_type(config)
    if rope_type in _LENGTH_DEPENDENT_ROPE:
        reasons.append(f"rotary type {rope_type}, which depends on the length of the sequence")
    required = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
    missing = [key for key in (*required, "max_position_embeddings") if key not in config]
    if missing:
        reasons.append(f"its configuration lacks {', '.join(missing)}")
    elif head_dim(config) % 8:
        reasons.append(f"heads of width {head_dim(config)}, not a multiple of 8")
    return list(dict.fromkeys(reasons))


def _rope_type(config: Mapping[str, Any]) -> str:
    return str(rope_parameters(config)["rope_type"])
