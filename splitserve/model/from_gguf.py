"""A llama-architecture GGUF file to a Hugging Face model directory, in float32.

Format: ggml's docs/gguf.md. Names and the permutation of Q and K are those of llama.cpp's
convert_hf_to_gguf.py, undone. transformers can load such a file as well, but in 4 times the time,
and it gives SmolLM2 a pre-tokenizer without the split at digits: spaces before a number then become
other tokens than those that the model was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from splitserve.errors import ModelUnavailable

_CONTROL_TOKEN = 3
_GLOBAL_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_PRE_TOKENIZERS: dict[str, dict[str, Any]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
}


def convert(gguf_file: Path, out_dir: Path, progress: Callable[[str], None]) -> None:
    """Write config, generation config, tokenizer, chat template and weights into out_dir.

    Raises ModelUnavailable for another architecture or tokenizer than this reads.
    """
    import gguf

    reader = gguf.GGUFReader(gguf_file)
    meta = {
        name: field.contents()
        for name, field in reader.fields.items()
        if not name.startswith("GGUF.")
    }
    if meta.get("general.architecture") != "llama":
        raise ModelUnavailable(
            f"{gguf_file.name} is of the architecture {meta.get('general.architecture')}; "
            "only llama can be converted.",
            advice="Use a safetensors model.",
        )
    _write_tokenizer(meta, out_dir)
    tied = all(tensor.name != "output.weight" for tensor in reader.tensors)
    _write_configs(meta, tied, out_dir)
    _write_weights(reader.tensors, meta, out_dir, progress)


def _write_weights(
    tensors: Any, meta: dict[str, Any], out_dir: Path, progress: Callable[[str], None]
) -> None:
    import gguf
    from safetensors.numpy import save_file

    heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    weights: dict[str, NDArray[np.float32]] = {}
    shown = 0
    for n, tensor in enumerate(tensors):
        values = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            values = unpermute(values, heads[kind])
        weights[hf_name(tensor.name)] = np.ascontiguousarray(values)
        if (percent := 100 * (n + 1) // len(tensors)) >= shown + 25:
            shown = percent
            progress(f"Converting: {percent} %")
    save_file(weights, out_dir / "model.safetensors", metadata={"format": "pt"})
    (out_dir / "model.safetensors").chmod(0o644)  # save_file makes it private


def hf_name(name: str) -> str:
    """The transformers name of llama.cpp's tensor `name`."""
    parts = name.split(".")
    try:
        if parts[0] == "blk":
            return f"model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}"
        return f"{_GLOBAL_NAMES[parts[0]]}.{parts[1]}"
    except (KeyError, IndexError):
        raise ModelUnavailable(f"The GGUF file holds a tensor of no known use: {name}.") from None


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of Q or K from llama.cpp's order (pairs of rotary dimensions adjacent) to that of
    transformers (first halves, then second halves, per head). Shape [rows, columns] stays."""
    rows, columns = weight.shape
    half = rows // num_heads // 2
    return weight.reshape(num_heads, half, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _write_configs(meta: dict[str, Any], tied: bool, out_dir: Path) -> None:
    ids = {
        name: int(meta[f"tokenizer.ggml.{key}_token_id"])
        for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in meta
    }
    id_settings = {f"{name}_token_id": token_id for name, token_id in ids.items()}
    hidden, num_heads = meta["llama.embedding_length"], meta["llama.attention.head_count"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "float32",
        "head_dim": meta.get("llama.rope.dimension_count", hidden // num_heads),
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": num_heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "rms_norm_eps": _float32(meta["llama.attention.layer_norm_rms_epsilon"]),
        "rope_theta": meta["llama.rope.freq_base"],
        "tie_word_embeddings": tied,
        "vocab_size": len(meta["tokenizer.ggml.tokens"]),
        **id_settings,
    }
    _write_json(out_dir / "config.json", config)
    _write_json(out_dir / "generation_config.json", id_settings)


def _write_tokenizer(meta: dict[str, Any], out_dir: Path) -> None:
    model, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if model != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ModelUnavailable(f"The GGUF file's tokenizer ({model}, {pre}) can't be converted.")
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    types: list[int] = meta["tokenizer.ggml.token_type"]
    special = [n for n, kind in enumerate(types) if kind == _CONTROL_TOKEN]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": n, "content": tokens[n], **flags, "special": True} for n in special
        ],
        "normalizer": None,
        "pre_tokenizer": _PRE_TOKENIZERS[pre],
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "vocab": {token: n for n, token in enumerate(tokens)},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }
    raw = tokenizers.Tokenizer.from_str(json.dumps(description))
    raw.save(str(out_dir / "tokenizer.json"))
    names = {
        f"{name}_token": tokens[int(meta[f"tokenizer.ggml.{key}_token_id"])]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{key}_token_id" in meta
    }
    config = {
        **names,
        "add_bos_token": bool(meta.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    _write_json(out_dir / "tokenizer_config.json", config)
    if template := meta.get("tokenizer.chat_template"):
        (out_dir / "chat_template.jinja").write_text(template, "utf-8")


def _float32(value: float) -> float:
    """The shortest decimal that is the same float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", "utf-8")
