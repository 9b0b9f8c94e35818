from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.text.detokenizer import (
    ByteLevelDetokenizer,
    Detokenizer,
    DetokenizerFactory,
    StreamDetokenizer,
    is_byte_level,
)
from splitserve.text.tokenizer import Tokenizer

any_ids = st.lists(st.integers(0, 450), max_size=40)  # both vocabularies are smaller


def run(detokenizer: Detokenizer, ids: list[int]) -> tuple[list[str], str]:
    pushed = [detokenizer.push(i) for i in ids]
    return pushed, "".join(pushed) + detokenizer.finish()


def both_kinds(tokenizer: Tokenizer) -> list[Detokenizer]:
    return [DetokenizerFactory(tokenizer).new(), StreamDetokenizer(tokenizer)]


def test_the_factory_knows_byte_level_tokenizers(
    byte_level_tokenizer: Tokenizer, byte_fallback_tokenizer: Tokenizer
) -> None:
    assert is_byte_level(byte_level_tokenizer)
    assert not is_byte_level(byte_fallback_tokenizer)
    assert isinstance(DetokenizerFactory(byte_level_tokenizer).new(), ByteLevelDetokenizer)
    assert isinstance(DetokenizerFactory(byte_fallback_tokenizer).new(), StreamDetokenizer)


@given(st.text())
@settings(max_examples=150, deadline=None)
def test_text_comes_back_whole(
    byte_level_tokenizer: Tokenizer, byte_fallback_tokenizer: Tokenizer, text: str
) -> None:
    for tokenizer in (byte_level_tokenizer, byte_fallback_tokenizer):
        ids = tokenizer.encode(text, add_special_tokens=False)
        for detokenizer in both_kinds(tokenizer):
            assert run(detokenizer, ids)[1] == tokenizer.decode(ids)


@given(any_ids)
@settings(max_examples=250, deadline=None)
def test_any_ids_of_a_byte_level_vocabulary(
    byte_level_tokenizer: Tokenizer, ids: list[int]
) -> None:
    for detokenizer in both_kinds(byte_level_tokenizer):
        assert run(detokenizer, ids)[1] == byte_level_tokenizer.decode(ids)


@given(any_ids)
@settings(max_examples=150, deadline=None)
def test_any_ids_of_a_byte_fallback_vocabulary_do_not_crash(
    byte_fallback_tokenizer: Tokenizer, ids: list[int]
) -> None:
    run(StreamDetokenizer(byte_fallback_tokenizer), ids)


def test_a_character_appears_with_its_last_byte(
    byte_level_tokenizer: Tokenizer, byte_fallback_tokenizer: Tokenizer
) -> None:
    for tokenizer in (byte_level_tokenizer, byte_fallback_tokenizer):
        raw_bytes = "😀".encode()
        if tokenizer is byte_level_tokenizer:
            alphabet = "ðŁĺĢ"
            ids = [tokenizer.token_id(c) for c in alphabet]
        else:
            ids = [tokenizer.token_id(f"<0x{b:02X}>") for b in raw_bytes]
        assert None not in ids
        for detokenizer in both_kinds(tokenizer):
            pushed, whole = run(detokenizer, [i for i in ids if i is not None])
            assert pushed == ["", "", "", "😀"]
            assert whole == "😀"


def test_an_incomplete_character_ends_as_a_replacement(byte_level_tokenizer: Tokenizer) -> None:
    token_id = byte_level_tokenizer.token_id("ð")
    assert token_id is not None
    for detokenizer in both_kinds(byte_level_tokenizer):
        pushed, whole = run(detokenizer, [token_id])
        assert (pushed, whole) == ([""], "�")


def test_leading_spaces_stay(byte_fallback_tokenizer: Tokenizer) -> None:
    ids = byte_fallback_tokenizer.encode(" a b the", add_special_tokens=False)
    pushed, whole = run(StreamDetokenizer(byte_fallback_tokenizer), ids)
    assert whole == byte_fallback_tokenizer.decode(ids) == " a b the"
    assert len([p for p in pushed if p]) > 3


@pytest.mark.parametrize("token_id", [-1, 10**6, 2**32, 2**64])
def test_ids_out_of_range_are_skipped(byte_level_tokenizer: Tokenizer, token_id: int) -> None:
    fox = byte_level_tokenizer.encode("fox")
    for detokenizer in both_kinds(byte_level_tokenizer):
        assert run(detokenizer, [*fox, token_id, *fox])[1] == "foxfox"


def test_a_taken_back_run_goes_on_instead_of_failing(byte_fallback_tokenizer: Tokenizer) -> None:
    token = byte_fallback_tokenizer.token_id
    ids = [token(t) for t in ("<0xE2>", "<0x82>", "<0xAC>", "<0xFF>", "a", "b", "▁a")]
    whole = run(StreamDetokenizer(byte_fallback_tokenizer), [i for i in ids if i is not None])[1]
    assert whole.startswith("€")
    assert whole.endswith("ab a")


def test_endless_invalid_bytes_cost_the_same_per_token(byte_fallback_tokenizer: Tokenizer) -> None:
    token_id = byte_fallback_tokenizer.token_id("<0xFF>")
    assert token_id is not None
    detokenizer = StreamDetokenizer(byte_fallback_tokenizer)
    start = time.perf_counter()
    text = "".join(detokenizer.push(token_id) for _ in range(5000)) + detokenizer.finish()
    assert time.perf_counter() - start < 3
    assert text == "�" * 5000
