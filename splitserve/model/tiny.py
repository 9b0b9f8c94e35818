"""A small Llama with random weights, complete with tokenizer and chat template, for tests.

It is a full model directory, so that whatever serves a real model serves this one. The weights are
wide enough that greedy answers wander rather than loop, and that logits are far from tied.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SMALLEST_VOCAB = len(SPECIAL_TOKENS) + 256


def make_tiny(
    path: Path,
    seed: int = 0,
    layers: int = 2,
    hidden: int = 64,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    max_len: int = 8192,
) -> Path:
    """Write the model into `path`, made if need be, and return it.

    hidden / heads must be a multiple of 8, heads of kv_heads, and vocab at least 259.
    """
    if hidden % heads or (hidden // heads) % 8 or heads % kv_heads or vocab < _SMALLEST_VOCAB:
        raise ValueError("hidden, heads, kv_heads or vocab do not fit together")
    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "max_position_embeddings": max_len,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "float32",
    }
    _write_json(path / "config.json", config)
    _write_json(
        path / "generation_config.json",
        {"bos_token_id": 1, "eos_token_id": [2, 0], "do_sample": True, "temperature": 0.8},
    )
    _write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "bos_token": SPECIAL_TOKENS[1],
            "eos_token": SPECIAL_TOKENS[2],
            "chat_template": CHAT_TEMPLATE,
        },
    )
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    _tokenizer(vocab).save(str(path / "tokenizer.json"))
    weights = _weights(config, np.random.default_rng(seed))
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _tokenizer(vocab: int) -> Tokenizer:
    """Byte-level BPE: special tokens, the 256 bytes, then merges of letters up to `vocab`."""
    entries = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    space = "Ġ"
    pairs = [a + b for a, b in product(ascii_lowercase, repeat=2)]
    for left, right in _merges(space, pairs):
        if len(entries) >= vocab:
            break
        entries.append(left + right)
        merges.append((left, right))
    ids = {token: i for i, token in enumerate(entries)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(one, special=True) for one in SPECIAL_TOKENS])
    return tokenizer


def _merges(space: str, pairs: list[str]) -> list[tuple[str, str]]:
    """Merges in order of rank: a space and a letter, two letters, three, four."""
    common = sorted(ascii_lowercase, key="etaoinshrdlucmfwypvbgkjxqz".index)
    words = [(space, letter) for letter in common]
    words += [(a, b) for a, b in product(common, repeat=2)]
    words += [(pair, letter) for pair in pairs for letter in ascii_lowercase]
    words += [(first, second) for first in pairs for second in pairs]
    return words


def _weights(
    config: dict[str, Any], rng: np.random.Generator
) -> dict[str, npt.NDArray[np.float32]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kv_width = config["num_key_value_heads"] * config["head_dim"]

    def linear(rows: int, columns: int, gain: float = 1.0) -> npt.NDArray[np.float32]:
        return rng.normal(0, gain * columns**-0.5, (rows, columns)).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": rng.normal(0, 1, (config["vocab_size"], hidden)).astype("f4"),
        "model.norm.weight": np.ones(hidden, np.float32),
        "lm_head.weight": linear(config["vocab_size"], hidden, 3.0),
    }
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        weights |= {
            f"{layer}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{layer}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{layer}.self_attn.q_proj.weight": linear(hidden, hidden, 1.5),
            f"{layer}.self_attn.k_proj.weight": linear(kv_width, hidden, 1.5),
            f"{layer}.self_attn.v_proj.weight": linear(kv_width, hidden, 2.0),
            f"{layer}.self_attn.o_proj.weight": linear(hidden, hidden, 2.0),
            f"{layer}.mlp.gate_proj.weight": linear(inner, hidden, 2.0),
            f"{layer}.mlp.up_proj.weight": linear(inner, hidden, 2.0),
            f"{layer}.mlp.down_proj.weight": linear(hidden, inner, 2.0),
        }
    return weights
