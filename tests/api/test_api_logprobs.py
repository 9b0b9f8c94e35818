"""Log-probabilities as completions tell them: one key per token."""

from __future__ import annotations

from splitserve.api.logprobs import LogprobWriter
from splitserve.sampling import Logprobs
from splitserve.text.tokenizer import Tokenizer

BYTES = {1: b"a", 2: b"\xf0\x9f", 3: b"\x98", 4: b"\x80", 5: b"a", 6: "\ufffd".encode()}


class ByteTokenizer:
    """Decodes each id as its bytes, what is no character as U+FFFD."""

    def decode(self, ids: list[int], *, skip_special_tokens: bool) -> str:
        return b"".join(BYTES[one] for one in ids).decode(errors="replace")


def writer() -> LogprobWriter:
    tokenizer: Tokenizer = ByteTokenizer()  # type: ignore[assignment]
    return LogprobWriter("completion", tokenizer, BYTES.__getitem__)


def test_parts_of_a_character_are_told_apart_by_their_bytes() -> None:
    told = writer().take([2], [Logprobs(-1.0, [2, 3, 4, 1], [-1.0, -2.0, -3.0, -4.0])])
    assert told["tokens"] == ["bytes:\\xf0\\x9f"]
    assert told["top_logprobs"] == [
        {"bytes:\\xf0\\x9f": -1.0, "bytes:\\x98": -2.0, "bytes:\\x80": -3.0, "a": -4.0}
    ]


def test_of_tokens_with_one_text_the_likeliest_is_told() -> None:
    told = writer().take([6], [Logprobs(-0.5, [6, 1, 5], [-0.5, -1.0, -2.0])])
    assert told["top_logprobs"] == [{"\ufffd": -0.5, "a": -1.0}]
