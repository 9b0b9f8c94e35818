"""What llama.cpp's converter does to each family of models, to be undone: names and settings.

What a file leaves to llama.cpp's source (the pattern of Gemma's windows, the scale of its 27B
models) is as it is there. A setting that a file has and that nothing here reads is refused, not
ignored: it may change the answers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from splitserve.errors import ModelUnavailable

GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_ATTENTION = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
_MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
_FFN_NORM = {"ffn_norm": "post_attention_layernorm"}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_FUSED = {
    "attn_norm": "input_layernorm",
    "attn_qkv": "self_attn.qkv_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_up": "mlp.gate_up_proj",
    "ffn_down": "mlp.down_proj",
}
_HARMLESS = ("vocab_size", "tensor_data_layout", "rope.scaling.finetuned")


class Settings:
    """One architecture's settings in a file's metadata, which remembers what was read of them.

    rope_freqs: the file's tensor of divisors of the rotation's frequencies, [head_dim / 2], if any.
    """

    def __init__(
        self,
        architecture: str,
        meta: Mapping[str, Any],
        rope_freqs: NDArray[np.float32] | None = None,
    ) -> None:
        prefix = f"{architecture}."
        self._values = {
            name.removeprefix(prefix): value
            for name, value in meta.items()
            if name.startswith(prefix)
        }
        self._prefix = prefix
        self._read = set(_HARMLESS)
        self.rope_freqs = rope_freqs

    def get(self, name: str, default: Any = None) -> Any:
        """Floats come as the shortest decimal that is the same float32."""
        self._read.add(name)
        value = self._values.get(name, default)
        return float(str(np.float32(value))) if isinstance(value, float) else value

    def need(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelUnavailable(f"The GGUF file does not tell {self._prefix}{name}.")
        return value

    def count(self, name: str) -> int:
        """A number that is the same in all layers."""
        value = self.need(name)
        if isinstance(value, list):
            if len(set(value)) != 1:
                raise ModelUnavailable(f"{self._prefix}{name} differs between layers.")
            value = value[0]
        return int(value)

    def expect(self, name: str, *allowed: Any) -> None:
        """Refuse a value that no model of this family is known to have."""
        value = self.get(name, allowed[0])
        if value not in allowed:
            raise ModelUnavailable(f"{self._prefix}{name} = {value} can't be converted.")

    def refuse_unread(self) -> None:
        if unread := sorted(self._values.keys() - self._read):
            names = ", ".join(self._prefix + name for name in unread)
            raise ModelUnavailable(
                f"The GGUF file has settings of no known meaning here: {names}.",
                advice="Use a safetensors model.",
            )


class Family(msgspec.Struct, frozen=True):
    """How one architecture's files differ from the Hugging Face model.

    layer_names: llama.cpp's name of each tensor of a layer, to transformers'.
    config: what its config.json has besides `common_config`, and instead of it.
    norm_offset: what was added to the weights of all norms.
    permuted: the rows of Q and K are in the order of llama.cpp's rotation.
    biases: tensors that all have biases, or none; in `always_biased` families all.
    """

    model_type: str
    architecture: str
    layer_names: Mapping[str, str]
    config: Callable[[Settings, int], dict[str, Any]]
    norm_offset: float = 0.0
    permuted: bool = False
    biases: frozenset[str] = frozenset(("attn_q", "attn_k", "attn_v", "attn_output"))
    always_biased: bool = False


def hf_config(family: Family, settings: Settings) -> dict[str, Any]:
    """config.json but for what the tensors and the tokenizer tell. Raises ModelUnavailable."""
    hidden, num_heads = settings.count("embedding_length"), settings.count("attention.head_count")
    head_dim = settings.get("attention.key_length", hidden // num_heads)
    settings.expect("attention.value_length", head_dim)
    settings.expect("attention.causal", True)
    config = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": settings.count("feed_forward_length"),
        "max_position_embeddings": settings.need("context_length"),
        "num_attention_heads": num_heads,
        "num_hidden_layers": settings.need("block_count"),
        "num_key_value_heads": settings.count("attention.head_count_kv"),
        "rms_norm_eps": settings.need("attention.layer_norm_rms_epsilon"),
        **family.config(settings, head_dim),
    }
    if "rope_parameters" not in config:
        settings.expect("rope.dimension_count", head_dim)
        config["rope_parameters"] = _rope(settings, head_dim)
    settings.refuse_unread()
    return config


def _rope(settings: Settings, head_dim: int) -> dict[str, Any]:
    theta = settings.get("rope.freq_base", 10000.0)
    kind = settings.get("rope.scaling.type", "none")
    if settings.rope_freqs is not None:
        return _llama3_rope(settings.rope_freqs, theta, head_dim)
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    if kind not in ("linear", "yarn"):
        raise ModelUnavailable(
            f"The GGUF file scales its rotation by {kind}, which can't be converted.",
            advice="Use a safetensors model.",
        )
    rope = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": settings.need("rope.scaling.factor"),
    }
    if kind == "yarn":
        original = settings.need("rope.scaling.original_context_length")
        rope["original_max_position_embeddings"] = original
    return rope


def _llama3_rope(divisors: NDArray[np.float32], theta: float, head_dim: int) -> dict[str, Any]:
    """Llama 3.1 and later: the file has the divisors, transformers wants what they are made of.

    Of that all published models share all but the factor, so it is checked, not solved for.
    """
    low, high, original = 1.0, 4.0, 8192
    factor = float(divisors.max())
    wavelengths = 2 * np.pi * theta ** (np.arange(0, head_dim, 2) / head_dim)
    smooth = np.clip((original / wavelengths - low) / (high - low), 0.0, 1.0)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-4):
        raise ModelUnavailable(
            "The GGUF file's rope_freqs are not those of Llama 3.",
            advice="Use a safetensors model.",
        )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _llama(settings: Settings, head_dim: int) -> dict[str, Any]:
    head_dim = settings.get("rope.dimension_count", head_dim)
    rope = _rope(settings, head_dim)
    return {"head_dim": head_dim, "mlp_bias": False, "rope_parameters": rope}


def _qwen2(settings: Settings, head_dim: int) -> dict[str, Any]:
    return {"use_sliding_window": False}


def _gemma(settings: Settings, head_dim: int) -> dict[str, Any]:
    return {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}


def _gemma2(settings: Settings, head_dim: int) -> dict[str, Any]:
    return {
        **_gemma(settings, head_dim),
        "attn_logit_softcapping": settings.get("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": settings.get("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _query_scalar(settings, head_dim, layers_of_27b=46),
        "sliding_window": settings.need("attention.sliding_window"),
        "layer_types": _layer_types(settings, every=2),
    }


def _gemma3(settings: Settings, head_dim: int) -> dict[str, Any]:
    settings.expect("rope.dimension_count", head_dim)
    local_theta = settings.get("rope.freq_base_swa", 10000.0)
    settings.get("rope.freq_base", 1e6)
    return {
        **_gemma(settings, head_dim),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": settings.get("final_logit_softcapping"),
        "query_pre_attn_scalar": _query_scalar(settings, head_dim, layers_of_27b=62),
        "sliding_window": settings.need("attention.sliding_window"),
        "layer_types": _layer_types(settings, every=6),
        "rope_parameters": {
            "full_attention": _rope(settings, head_dim),
            "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
        },
    }


def _query_scalar(settings: Settings, head_dim: int, layers_of_27b: int) -> int:
    """llama.cpp knows the largest Gemma 2 and 3 by their number of layers."""
    if settings.need("block_count") == layers_of_27b:
        return settings.count("embedding_length") // settings.count("attention.head_count")
    return head_dim


def _layer_types(settings: Settings, every: int) -> list[str]:
    """Each `every`th layer sees all, unless the file says which do."""
    pattern = settings.get("attention.sliding_window_pattern", every)
    num_layers = settings.need("block_count")
    if not isinstance(pattern, list):
        pattern = [(n + 1) % pattern != 0 for n in range(num_layers)]
    return ["sliding_attention" if one else "full_attention" for one in pattern[:num_layers]]


def _phi3(settings: Settings, head_dim: int) -> dict[str, Any]:
    settings.expect("rope.scaling.attn_factor", 1.0)
    context = settings.need("context_length")
    settings.expect("rope.scaling.original_context_length", context)
    rotated = settings.get("rope.dimension_count", head_dim)
    return {
        "original_max_position_embeddings": context,
        "pad_token_id": None,
        "sliding_window": settings.get("attention.sliding_window", 0) or None,
        "rope_parameters": {
            **_rope(settings, head_dim),
            "partial_rotary_factor": rotated / head_dim,
        },
    }


FAMILIES: Mapping[str, Family] = {
    "llama": Family(
        "llama", "LlamaForCausalLM", _ATTENTION | _FFN_NORM | _MLP, _llama, permuted=True
    ),
    "qwen2": Family(
        "qwen2",
        "Qwen2ForCausalLM",
        _ATTENTION | _FFN_NORM | _MLP,
        _qwen2,
        biases=frozenset(("attn_q", "attn_k", "attn_v")),
        always_biased=True,
    ),
    "qwen3": Family("qwen3", "Qwen3ForCausalLM", _ATTENTION | _QK_NORMS | _FFN_NORM | _MLP, _qwen2),
    "gemma": Family(
        "gemma", "GemmaForCausalLM", _ATTENTION | _FFN_NORM | _MLP, _gemma, norm_offset=1.0
    ),
    "gemma2": Family(
        "gemma2", "Gemma2ForCausalLM", _ATTENTION | _FOUR_NORMS | _MLP, _gemma2, norm_offset=1.0
    ),
    "gemma3": Family(
        "gemma3_text",
        "Gemma3ForCausalLM",
        _ATTENTION | _QK_NORMS | _FOUR_NORMS | _MLP,
        _gemma3,
        norm_offset=1.0,
    ),
    "phi3": Family("phi3", "Phi3ForCausalLM", _FUSED | _FFN_NORM, _phi3, biases=frozenset()),
}
"""By the architecture that a file names. Mistral's files name llama."""


def family_of(architecture: str, file_name: str) -> Family:
    if architecture not in FAMILIES:
        raise ModelUnavailable(
            f"{file_name} is of the architecture {architecture}; only {', '.join(FAMILIES)} can "
            "be converted.",
            advice="Use a safetensors model.",
        )
    return FAMILIES[architecture]
