"""Which models the paged pool and its kernels can carry, judged from config.json alone.

What a configuration can't tell is found out when the model is loaded (`selfcheck`).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping
from typing import Any

from splitserve.errors import ModelUnavailable, UnsupportedModel

_SPELLINGS = {
    "hidden_size": ("n_embd", "n_embed", "d_model"),
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "n_kv_heads"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "max_sequence_length"),
}
_REQUIRED = (
    "hidden_size",
    "num_attention_heads",
    "num_hidden_layers",
    "vocab_size",
    "max_position_embeddings",
)

_COUNTS = ("num_key_value_heads", "head_dim", "v_head_dim")

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope", "su")

_RECURRENT_KEYS = (
    "ssm_cfg",
    "mamba_d_state",
    "mamba_expand",
    "state_size",
    "conv_L_cache",
    "lru_width",
)
_RECURRENT_CLASSES = {
    "mamba": "MambaMixer",
    "mamba2": "Mamba2Mixer",
    "falcon_mamba": "FalconMambaMixer",
    "jamba": "JambaMambaMixer",
    "bamba": "BambaMixer",
    "nemotron_h": "NemotronHMamba2Mixer",
    "recurrent_gemma": "RecurrentGemmaRecurrentBlock",
    "rwkv": "RwkvSelfAttention",
    "xlstm": "xLSTMLayer",
}
"""By model type: the class that has a state in place of KV."""

_REASONS = {
    "cross_attention_layers": "cross-attention",
    "add_cross_attention": "cross-attention",
    "alibi": "ALiBi position biases",
    "index_topk": "attention to picked positions",
    "quantization_config": "weights that stay quantized",
}
_ALIBI_TYPES = ("bloom", "mpt")

_ATTENTION_KINDS = ("full_attention", "sliding_attention", "attention")
_KV_SHAPE_KEYS = ("head_dim", "num_key_value_heads", "v_head_dim")


def setting(config: Mapping[str, Any], name: str) -> Any:
    """A setting under any of its spellings, None where it is missing."""
    for spelling in (name, *_SPELLINGS.get(name, ())):
        if config.get(spelling) is not None:
            return config[spelling]
    return None


def rope_parameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings in one form, whichever transformers version wrote the configuration.

    Models with a rotation per kind of layer have one mapping for each.
    """
    if isinstance(written := config.get("rope_parameters"), Mapping):
        parameters = dict(written)
    else:
        parameters = dict(config.get("rope_scaling") or {})
        if "type" in parameters:
            parameters.setdefault("rope_type", parameters.pop("type"))
    for key in ("rope_theta", "rope_local_base_freq"):
        if key not in parameters and config.get(key) is not None:
            parameters[key] = config[key]
    parameters.setdefault("rope_type", "default")
    if config.get("partial_rotary_factor") is not None:
        parameters.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    return parameters


def head_dim(config: Mapping[str, Any]) -> int:
    """Width of one query head, and of one K head, before any padding."""
    if config.get("kv_lora_rank"):
        return int(config["qk_nope_head_dim"]) + int(config["qk_rope_head_dim"])
    if config.get("head_dim"):
        return int(config["head_dim"])
    return int(setting(config, "hidden_size")) // int(setting(config, "num_attention_heads"))


def kv_width(config: Mapping[str, Any]) -> int:
    """Width of a slot in the pool: the wider of K and V, up to a multiple of 8."""
    widest = max(head_dim(config), int(config.get("v_head_dim") or 0))
    return -(-widest // 8) * 8


def num_kv_heads(config: Mapping[str, Any]) -> int:
    """KV heads of one layer."""
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    heads = setting(config, "num_key_value_heads") or setting(config, "num_attention_heads")
    return int(heads)


def require_supported(config: Mapping[str, Any]) -> None:
    """Raise UnsupportedModel that names the model type and everything the engine can't carry, and
    ModelUnavailable for sizes that are none."""
    for name in (*_REQUIRED, *_COUNTS):
        size = setting(config, name)
        if size is not None and (type(size) is not int or size < 1):
            raise ModelUnavailable(
                f"config.json has {name} = {json.dumps(size)[:60]}; it must be an integer of at "
                "least 1."
            )
    reasons = list(dict.fromkeys(_reasons(config)))
    missing = [name for name in _REQUIRED if setting(config, name) is None]
    if not reasons and missing:
        reasons.append(f"its configuration lacks {', '.join(missing)}")
    if reasons:
        kind = config.get("model_type", "without a model_type")
        raise UnsupportedModel(f"Models of type {kind} can't be served: {'; '.join(reasons)}.")


def _reasons(config: Mapping[str, Any]) -> Iterable[str]:
    if config.get("is_encoder_decoder"):
        yield "encoder-decoder"
    inner = config.get("text_config")
    if "text_config" in config or "vision_config" in config:
        yield "more than one modality"
    if isinstance(inner, Mapping):
        yield from _reasons(inner)
    if config.get("model_type") in _ALIBI_TYPES:
        yield _REASONS["alibi"]
    yield from (why for key, why in _REASONS.items() if config.get(key))
    yield from _recurrent(config)
    yield from _unlike_layers(config)
    for kind in sorted(_rope_types(config).intersection(_LENGTH_DEPENDENT_ROPE)):
        yield f"rotary type {kind}, which depends on the length of the sequence"


def _recurrent(config: Mapping[str, Any]) -> Iterable[str]:
    """Layers with a state in place of KV, and the class or the setting that tells so."""
    told_by = _RECURRENT_CLASSES.get(str(config.get("model_type")))
    told_by = told_by or next((key for key in _RECURRENT_KEYS if config.get(key)), None)
    if told_by is None:
        return
    num_layers = int(setting(config, "num_hidden_layers") or 0)
    layers = [i for i in range(num_layers) if not _attends(config, i)]
    yield f"{layer_names(layers) if layers else 'its layers'} ({told_by}): recurrent"


def _attends(config: Mapping[str, Any], layer: int) -> bool:
    """Whether a layer of a model that has recurrent ones is attention and nothing else."""
    if period := config.get("attn_layer_period"):  # Jamba
        return layer % int(period) == int(config.get("attn_layer_offset") or 0)
    if (indices := config.get("attn_layer_indices")) is not None:  # Bamba
        return layer in indices
    if pattern := config.get("hybrid_override_pattern"):  # Nemotron-H: M is Mamba, - an MLP
        return bool(pattern[layer] != "M")
    if kinds := config.get("block_types"):  # RecurrentGemma, repeated
        return bool(kinds[layer % len(kinds)] == "attention")
    kinds = config.get("layers_block_type") or config.get("layer_types") or ()
    return layer < len(kinds) and kinds[layer] in _ATTENTION_KINDS


def _unlike_layers(config: Mapping[str, Any]) -> Iterable[str]:
    """Layers that differ from the others in what they keep of the past."""
    kinds = list(config.get("layer_types") or config.get("layers_block_type") or ())
    for other in sorted(set(kinds) - set(_ATTENTION_KINDS)):
        yield f"{layer_names(i for i, kind in enumerate(kinds) if kind == other)} of type {other}"
    if shared := int(config.get("num_kv_shared_layers") or 0):
        last = int(setting(config, "num_hidden_layers") or shared)
        yield f"{layer_names(range(last - shared, last))} share the KV of earlier ones"
    per_layer = config.get("per_layer_config") or {}
    unlike = [int(i) for i, own in per_layer.items() if set(own).intersection(_KV_SHAPE_KEYS)]
    if unlike:
        yield f"{layer_names(unlike)} with KV of another shape than the rest"
    elif config.get("global_head_dim", config.get("head_dim")) != config.get("head_dim"):
        yield "full-attention layers with KV of another shape than the rest"


def layer_names(layers: Iterable[int]) -> str:
    """For messages: 'layer 3', or 'layers 0-2, 5'."""
    runs: list[tuple[int, int]] = []
    for _, group in itertools.groupby(enumerate(sorted(layers)), lambda pair: pair[1] - pair[0]):
        members = [layer for _, layer in group]
        runs.append((members[0], members[-1]))
    named = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
    return f"layer{'s' if len(runs) > 1 or runs[0][0] < runs[0][1] else ''} {named}"


def _rope_types(config: Mapping[str, Any]) -> set[str]:
    """All rotary types that a model uses."""
    parameters = rope_parameters(config)
    nested = [one for one in parameters.values() if isinstance(one, Mapping)]
    return {str(one.get("rope_type", "default")) for one in (parameters, *nested)}
