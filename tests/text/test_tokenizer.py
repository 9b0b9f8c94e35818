from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from splitserve.errors import ModelUnavailable
from splitserve.text.tokenizer import Tokenizer


def test_round_trip_and_special_tokens(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    text = "The quick fox — 日本 😀"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.encode("<|im_end|>") == [tokenizer.token_id("<|im_end|>")]
    assert tokenizer.vocab_size == len(tokenizer.raw.get_vocab(with_added_tokens=True))


def test_default_special_tokens_are_the_tokenizers_own(byte_fallback_tokenizer: Tokenizer) -> None:
    with_bos = byte_fallback_tokenizer.encode("a b")
    without = byte_fallback_tokenizer.encode("a b", add_special_tokens=False)
    assert with_bos == [1, *without]


def test_a_saved_truncation_is_ignored(model_dir: Path) -> None:
    tokenizer = Tokenizer.load(model_dir)
    tokenizer.raw.enable_truncation(max_length=3)
    tokenizer.raw.enable_padding(length=8)
    tokenizer.raw.save(str(model_dir / "tokenizer.json"))
    again = Tokenizer.load(model_dir)
    text = "The quick brown fox jumps over the lazy dog"
    assert again.decode(again.encode(text)) == text


def test_digest_names_the_file(model_dir: Path) -> None:
    first = Tokenizer.load(model_dir).digest
    assert first == Tokenizer.load(model_dir).digest
    tokenizer = Tokenizer.load(model_dir)
    tokenizer.raw.add_tokens(["another"])
    tokenizer.raw.save(str(model_dir / "tokenizer.json"))
    assert Tokenizer.load(model_dir).digest != first


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**32, 2**64])
def test_unknown_ids_decode_to_nothing(byte_level_tokenizer: Tokenizer, token_id: int) -> None:
    assert byte_level_tokenizer.token(token_id) is None
    assert byte_level_tokenizer.decode([token_id]) == ""


def test_missing_and_broken_files(tmp_path: Path) -> None:
    with pytest.raises(ModelUnavailable, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ModelUnavailable, match="can't be read"):
        Tokenizer.load(tmp_path)


def test_text_and_api_import_neither_torch_nor_transformers() -> None:
    code = (
        "import pkgutil, importlib, sys, splitserve.text, splitserve.api\n"
        "for package in (splitserve.text, splitserve.api):\n"
        "    for m in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):\n"
        "        importlib.import_module(m.name)\n"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_least_number_of_tokens(
    byte_level_tokenizer: Tokenizer, byte_fallback_tokenizer: Tokenizer
) -> None:
    for text in ("", "a", "The quick brown fox jumps", "<|im_start|>" * 9, "日本語" * 50):
        least = byte_level_tokenizer.min_tokens(text)
        assert least <= len(byte_level_tokenizer.encode(text, add_special_tokens=False))
        assert bool(least) == bool(text)
        assert byte_fallback_tokenizer.min_tokens(text) == 0
