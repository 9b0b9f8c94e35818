"""The tokenizer in a GGUF file's metadata, to tokenizer.json.

Byte-level BPE is written out here: a file names its pre-tokenizer, and the name stands for a
regular expression, whether the text is normalized, and whether a word that is a token needs no
merges; all as in the tokenizer.json of the models that the name was given for. transformers has
such a table too, but without the last two, and without SmolLM's split at digits: spaces before a
number then become other tokens than those that the model was trained on. Its reading of
SentencePiece vocabularies is used; merges are found there from scores.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import processors

from splitserve.errors import ModelUnavailable
from splitserve.model.gguf_families import FAMILIES

_NORMAL, _CONTROL_TOKEN, _USER_DEFINED, _UNUSED = 1, 3, 4, 5
_ENDS = frozenset(
    ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>", "<|endoftext|>")
)
"""Control tokens that end an answer in whatever model has them; files name only one of them."""

_PHI3_KEEPING = ("<unk>", "<s>", "<|endoftext|>")
_BYTE_LEVEL = {
    "type": "ByteLevel",
    "add_prefix_space": False,
    "trim_offsets": True,
    "use_regex": True,
}
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Pre(msgspec.Struct, frozen=True):
    """What a pre-tokenizer's name stands for. adds_bos: where the file does not say."""

    steps: tuple[dict[str, Any], ...]
    normalizer: str | None = None
    ignore_merges: bool = False
    adds_bos: bool = False


def _split(pattern: str) -> tuple[dict[str, Any], ...]:
    split = {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }
    return split, {**_BYTE_LEVEL, "use_regex": False}


_PRE_TOKENIZERS: Mapping[str, _Pre] = {
    "gpt-2": _Pre((_BYTE_LEVEL,)),
    "smollm": _Pre(({"type": "Digits", "individual_digits": True}, _BYTE_LEVEL)),
    "qwen2": _Pre(_split(_WORDS % ""), normalizer="NFC"),
    "llama-bpe": _Pre(_split(_WORDS % "{1,3}"), ignore_merges=True, adds_bos=True),
    "dbrx": _Pre(_split(_WORDS % "{1,3}")),
    "tekken": _Pre(_split(_TEKKEN), ignore_merges=True, adds_bos=True),
}


class Vocabulary(msgspec.Struct, frozen=True):
    """What the file tells of its tokens.

    ids: of the special tokens bos, eos, unk and pad, those that there are.
    """

    meta: Mapping[str, Any]
    tokens: list[str]
    types: list[int]
    ids: dict[str, int]
    adds_bos: bool

    def token_settings(self) -> dict[str, Any]:
        """For config.json and generation_config.json."""
        ids: dict[str, Any] = {
            f"{name}_token_id": self.ids[name] for name in ("bos", "eos", "pad") if name in self.ids
        }
        return ids

    def end_ids(self) -> list[int]:
        """Tokens that end an answer, first the one that the file names."""
        named = [self.meta.get(f"tokenizer.ggml.{one}_token_id") for one in ("eos", "eot", "eom")]
        found = [int(one) for one in named if one is not None]
        found += [i for i in self.of_type(_CONTROL_TOKEN) if self.tokens[i] in _ENDS]
        return list(dict.fromkeys(found))

    def of_type(self, kind: int) -> list[int]:
        return [i for i, one in enumerate(self.types) if one == kind]


def read_vocabulary(meta: Mapping[str, Any]) -> Vocabulary:
    """Raises ModelUnavailable for a tokenizer that can't be written as tokenizer.json."""
    model, pre = meta.get("tokenizer.ggml.model"), str(meta.get("tokenizer.ggml.pre"))
    if model == "llama":
        adds_bos = True
    elif model == "gpt2" and pre in _PRE_TOKENIZERS:
        adds_bos = _PRE_TOKENIZERS[pre].adds_bos
    else:
        raise ModelUnavailable(
            f"The GGUF file's tokenizer ({model}, {pre}) can't be converted; only llama can, and "
            f"gpt2 with {', '.join(_PRE_TOKENIZERS)}.",
            advice="Use a safetensors model.",
        )
    tokens: list[str] = meta["tokenizer.ggml.tokens"]
    keys = (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    ids = {
        name: int(meta[f"tokenizer.ggml.{key}_token_id"])
        for name, key in keys
        if f"tokenizer.ggml.{key}_token_id" in meta
    }
    adds_bos = bool(meta.get("tokenizer.ggml.add_bos_token", adds_bos)) and "bos" in ids
    types = meta.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    return Vocabulary(meta, tokens, types, ids, adds_bos)


def write_tokenizer(vocabulary: Vocabulary, max_length: int, out_dir: Path) -> None:
    """tokenizer.json, tokenizer_config.json and, if there is one, the chat template."""
    meta, tokens = vocabulary.meta, vocabulary.tokens
    is_byte_level = meta["tokenizer.ggml.model"] == "gpt2"
    raw = (_byte_level if is_byte_level else _sentencepiece)(vocabulary)
    if vocabulary.adds_bos:
        bos_id = vocabulary.ids["bos"]
        raw.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos_id]} $A", special_tokens=[(tokens[bos_id], bos_id)]
        )
    else:
        raw.post_processor = None
    raw.save(str(out_dir / "tokenizer.json"))
    config = {
        **{f"{name}_token": tokens[token_id] for name, token_id in vocabulary.ids.items()},
        "add_bos_token": vocabulary.adds_bos,
        "clean_up_tokenization_spaces": False,
        "model_max_length": max_length,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (out_dir / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", "utf-8")
    if template := meta.get("tokenizer.chat_template"):
        (out_dir / "chat_template.jinja").write_text(template, "utf-8")


def _byte_level(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    meta, tokens = vocabulary.meta, vocabulary.tokens
    pre = _PRE_TOKENIZERS[meta["tokenizer.ggml.pre"]]
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = dict.fromkeys(vocabulary.of_type(_CONTROL_TOKEN), True)
    added |= dict.fromkeys(vocabulary.of_type(_USER_DEFINED), False)
    unused = set(vocabulary.of_type(_UNUSED))  # rows that only fill up the embedding
    description = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": i, "content": tokens[i], **flags, "special": special}
            for i, special in sorted(added.items())
        ],
        "normalizer": pre.normalizer and {"type": pre.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": list(pre.steps)},
        "post_processor": None,
        "decoder": {**_BYTE_LEVEL, "add_prefix_space": True},
        "model": {
            "type": "BPE",
            "ignore_merges": pre.ignore_merges,
            "vocab": {token: i for i, token in enumerate(tokens) if i not in unused},
            "merges": [merge.split(" ") for merge in meta["tokenizer.ggml.merges"]],
        },
    }
    return tokenizers.Tokenizer.from_str(json.dumps(description))


def _sentencepiece(vocabulary: Vocabulary) -> tokenizers.Tokenizer:
    from transformers.integrations.gguf import convert_gguf_tokenizer

    meta = vocabulary.meta
    architecture = meta["general.architecture"]
    has_prefix = not FAMILIES[architecture].model_type.startswith("gemma")
    if (stated := meta.get("tokenizer.ggml.add_space_prefix", has_prefix)) != has_prefix:
        raise ModelUnavailable(
            f"add_space_prefix = {stated} in a {architecture} GGUF file can't be converted.",
            advice="Use a safetensors model.",
        )
    names = ("tokens", "scores", "token_type", "merges")
    description = {
        name: meta[f"tokenizer.ggml.{name}"] for name in names if f"tokenizer.ggml.{name}" in meta
    }
    # its shape for Phi-3 is what sentencepiece does for all: a space goes before whatever text,
    # where its shape for Llama leaves it out if the text has one
    shape = "phi3" if has_prefix else architecture
    raw, _ = convert_gguf_tokenizer(shape, {"tokenizer_type": "llama", **description})
    written = json.loads(raw.to_str())
    if architecture == "phi3":  # its chat tokens swallow the line's end after them; no file says so
        for token in written["added_tokens"]:
            token["rstrip"] = token["special"] and token["content"] not in _PHI3_KEEPING
    return tokenizers.Tokenizer.from_str(json.dumps(written))
