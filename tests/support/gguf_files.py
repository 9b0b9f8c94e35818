"""GGUF files as llama.cpp's convert_hf_to_gguf.py writes them, from a transformers module.

Tensors are named by the table of the `gguf` package; settings and changes to the weights follow the
class of each architecture in that script (its TextModel, LlamaModel, Gemma2Model, ...).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from numpy.typing import NDArray

PIECES = {
    "llama": (
        "▁s er ▁t de he re ve ▁f ▁b ode ll ▁o ck ers ▁n le ps wo um ca ▁ca ▁fo ix ▁six eps ▁sle "
        "▁sleeps ▁m odel ▁model ne ow own umb ▁br ▁one ▁numb ▁brown ▁numbers az ▁l azy ▁lazy ▁the "
        "llo ▁he ▁hello ves ▁ser ▁serves fi ld ▁p rld ▁wo fill ▁pre ▁world ▁prefill hre ▁ e o s l "
        "r n a c d i t f h m w u v b p k x g 3 4 5 y z 6 7 8 9 q . é ? 1 2 ï ! j"
    ),
    "gemma": (
        "er ▁s ▁t de he re ve ▁f ode ll ck ers le ps wo um ▁o ▁b ca ▁n ▁fo ▁ca ix fi eps leeps "
        "mode model ne ow own umb rown umbers az azy lazy llo hello ves erves ▁six ▁one ld pre rld "
        "fill world ▁lazy prefill ▁numbers hre hree lo lock qu ick ▁ e o s l r n a c d i t f h m w "
        "u v b p k x g 3 4 5 y z 6 7 8 9 q . é ? 1 2 ï ! j"
    ),
}
"""What sentencepiece learned, as BPE of 360 pieces, from some text: with a dummy prefix (llama) and
without (gemma). The rest of each vocabulary is special tokens and bytes."""

SPECIAL = {
    "llama": ["<unk>", "<s>", "</s>"],
    "gemma": ["<pad>", "</s>", "<s>", "<unk>", "<start_of_turn>", "<end_of_turn>"],
}
BYTE_LEVEL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>"]


def add_sentencepiece(writer: gguf.GGUFWriter, kind: str, special: list[str] | None = None) -> None:
    """special: instead of the kind's own, in as many tokens."""
    special, pieces = special or SPECIAL[kind], PIECES[kind].split(" ")
    tokens = special + [f"<0x{byte:02X}>" for byte in range(256)] + pieces
    scores = [0.0] * (len(special) + 256) + [-float(rank) for rank in range(len(pieces))]
    control, unknown, byte, normal = 3, 2, 6, 1
    types = [unknown if one == "<unk>" else control for one in special]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types + [byte] * 256 + [normal] * len(pieces))
    writer.add_bos_token_id(tokens.index("<s>"))
    writer.add_eos_token_id(tokens.index("</s>"))
    writer.add_unk_token_id(tokens.index("<unk>"))
    writer.add_add_bos_token(True)
    if kind == "gemma":
        writer.add_add_space_prefix(False)


def add_byte_level(
    writer: gguf.GGUFWriter, pre: str, vocab: list[str], merges: list[str], unused: int = 0
) -> None:
    """BYTE_LEVEL_TOKENS, then `vocab`, then `unused` rows that are there to fill up."""
    tokens = BYTE_LEVEL_TOKENS + vocab
    types = [3, 3, 3, 4] + [1] * len(vocab) + [5] * unused
    tokens = tokens + [f"[PAD{len(tokens) + n}]" for n in range(unused)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def write_gguf(path: Path, module: Any, add_tokenizer: Callable[[gguf.GGUFWriter], object]) -> None:
    """`module` in float32, with whatever tokenizer and settings `add_tokenizer` writes."""
    config = module.config
    architecture = config.model_type.removesuffix("_text").replace("mistral", "llama")
    writer = gguf.GGUFWriter(path, architecture)
    _add_settings(writer, config, architecture)
    add_tokenizer(writer)
    (kind,) = (key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture)
    names = gguf.get_tensor_name_map(kind, config.num_hidden_layers)
    tied = config.tie_word_embeddings
    for name, values in module.state_dict().items():
        if tied and name == "lm_head.weight":
            continue
        as_written = _modify(name, values.numpy(), config, architecture)
        writer.add_tensor(
            names.get_name(name, try_suffixes=(".weight", ".bias")),
            np.ascontiguousarray(as_written),
        )
    if config.rope_parameters.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_divisors(config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_settings(writer: gguf.GGUFWriter, config: Any, architecture: str) -> None:
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    if architecture not in ("gemma", "gemma2"):
        writer.add_rope_freq_base(rope["rope_theta"])
    if architecture != "phi3":
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    if rope["rope_type"] in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
    if rope["rope_type"] == "yarn":
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if architecture == "llama":
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(head_dim)
    if architecture == "phi3":
        writer.add_rope_scaling_orig_ctx_len(config.max_position_embeddings)
        writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
        writer.add_sliding_window(config.sliding_window or 0)
    if architecture == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if architecture in ("gemma2", "gemma3"):
        writer.add_sliding_window(config.sliding_window)


def _modify(
    name: str, values: NDArray[np.float32], config: Any, architecture: str
) -> NDArray[np.float32]:
    if architecture == "llama" and ".q_proj." in name:
        return permute(values, config.num_attention_heads)
    if architecture == "llama" and ".k_proj." in name:
        return permute(values, config.num_key_value_heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return values + 1
    return values


def permute(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    half = values.shape[0] // num_heads // 2
    halves = values.reshape(num_heads, 2, half, *values.shape[1:])
    return halves.swapaxes(1, 2).reshape(values.shape)


def _llama3_divisors(config: Any) -> NDArray[np.float32]:
    rope, original = (
        config.rope_parameters,
        config.rope_parameters["original_max_position_embeddings"],
    )
    low, high = rope["low_freq_factor"], rope["high_freq_factor"]
    divisors = []
    for frequency in 1 / rope["rope_theta"] ** (
        torch.arange(0, config.head_dim, 2, dtype=torch.float32) / config.head_dim
    ):
        wavelength = 2 * math.pi / float(frequency)
        if wavelength < original / high:
            divisors.append(1.0)
        elif wavelength > original / low:
            divisors.append(rope["factor"])
        else:
            smooth = (original / wavelength - low) / (high - low)
            divisors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(divisors, np.float32)
