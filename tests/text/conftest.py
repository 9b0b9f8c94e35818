"""Small tokenizers made here, so that these tests need no model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from splitserve.text.tokenizer import Tokenizer

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps.",
    "naïve café — “quotes” … 日本語のテキスト и русский текст",
    "emoji: 😀👍🏽👩‍👩‍👧‍👦 and more words, more words",
]


def byte_level() -> tokenizers.Tokenizer:
    """Byte-level BPE over all 256 bytes, with three special tokens."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator(CORPUS, trainer)
    raw.add_tokens([tokenizers.AddedToken("日本 added", normalized=False)])
    return raw


def byte_fallback() -> tokenizers.Tokenizer:
    """SentencePiece-like: ▁ for spaces, <0xNN> tokens for what is not in the vocabulary; adds a
    BOS by default."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2}
    for byte in range(256):
        vocab[f"<0x{byte:02X}>"] = len(vocab)
    for char in "▁abcdefghijklmnopqrstuvwxyzé":
        vocab[char] = len(vocab)
    for pair in ("▁a", "▁b", "he", "▁t"):
        vocab[pair] = len(vocab)
    merges = [("▁", "a"), ("▁", "b"), ("h", "e"), ("▁", "t")]
    raw = tokenizers.Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    raw.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return raw


@pytest.fixture(scope="session")
def byte_level_tokenizer() -> Tokenizer:
    return Tokenizer(byte_level(), digest="byte-level")


@pytest.fixture(scope="session")
def byte_fallback_tokenizer() -> Tokenizer:
    return Tokenizer(byte_fallback(), digest="byte-fallback")


@pytest.fixture
def model_dir(tmp_path: Path) -> Path:
    """A directory with the byte-level tokenizer and its configuration, no template."""
    byte_level().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": "<|im_start|>", "eos_token": {"content": "<|im_end|>"}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path
