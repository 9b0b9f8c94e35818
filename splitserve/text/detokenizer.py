"""Token ids of one stream to text, as it becomes final.

Two implementations of one contract: `push` returns the text that no later token can change, and
all pushes plus `finish` equal `Tokenizer.decode` of all ids. Byte-level vocabularies (GPT-2's
alphabet: Llama 3, Qwen, SmolLM, …) map every token to bytes, so UTF-8 decoding is all that is left
to do: exact for every sequence of ids, and a fraction of the time. All others go through
`tokenizers.decoders.DecodeStream`.
"""

from __future__ import annotations

import codecs
from typing import Protocol

from tokenizers import decoders

from splitserve.text.tokenizer import Tokenizer

_MAX_PENDING = 64
"""Tokens without final text after which DecodeStream's window, decoded anew with every token, is
given up: without a bound a model that emits invalid bytes makes each step slower than the last."""


class Detokenizer(Protocol):
    """One stream's text. Not thread-safe; one per choice."""

    def push(self, token_id: int) -> str:
        """Text that became final with this token; empty while a character is incomplete."""
        ...

    def finish(self) -> str:
        """The rest, with a replacement character for what stayed incomplete. Called once."""
        ...


class DetokenizerFactory:
    """Makes the detokenizers of one tokenizer; holds what they share."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._table = ByteTable(tokenizer) if is_byte_level(tokenizer) else None

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for; a special token's are those of its name."""
        found = self._table[token_id] if self._table is not None else b""
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return found or text.encode("utf-8")

    def new(self) -> Detokenizer:
        if self._table is not None:
            return ByteLevelDetokenizer(self._table)
        return StreamDetokenizer(self._tokenizer)


def is_byte_level(tokenizer: Tokenizer) -> bool:
    """Whether the decoder is ByteLevel and nothing else."""
    return isinstance(tokenizer.raw.decoder, decoders.ByteLevel)


class ByteTable(dict[int, bytes]):
    """Token id to the bytes that it stands for, filled as ids occur; special and unknown: b""."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._special = tokenizer.special_ids()
        self._byte_of = _byte_alphabet()

    def __missing__(self, token_id: int) -> bytes:
        token = self._tokenizer.token(token_id)
        if token is None:
            return b""  # not kept: there are 2**64 of them
        if token_id in self._special:
            value = b""
        else:
            try:
                value = bytes(self._byte_of[char] for char in token)
            except KeyError:  # an added token outside the alphabet stands for itself
                value = token.encode("utf-8")
        self[token_id] = value
        return value


class ByteLevelDetokenizer:
    """Detokenizer over a ByteTable."""

    __slots__ = ("_decode", "_table")

    def __init__(self, table: ByteTable) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token_id: int) -> str:
        return self._decode(self._table[token_id])

    def finish(self) -> str:
        return self._decode(b"", True)


class StreamDetokenizer:
    """Detokenizer over DecodeStream.

    A decoder that judges whole runs of tokens (ByteFallback over invalid bytes) may want to take
    back text that was already given; then the stream goes on from there, and equality with
    `Tokenizer.decode` ends at that point.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._stream = decoders.DecodeStream(skip_special_tokens=True)
        self._context: list[int] = []
        self._pending: list[int] = []

    def push(self, token_id: int) -> str:
        if self._tokenizer.token(token_id) is None:
            return ""
        self._pending.append(token_id)
        try:
            text: str | None = self._stream.step(self._tokenizer.raw, token_id)
        except Exception:  # `tokenizers` raises plain Exception: the window's prefix changed
            return self._restart()
        if text is not None:
            self._context, self._pending = self._pending, []
            return text
        if len(self._pending) > _MAX_PENDING:
            return self._restart()
        return ""

    def finish(self) -> str:
        return self._rest()

    def _rest(self) -> str:
        """Text of the pending ids, decoded after those before them: a decoder may strip the
        leading space of the first token that it sees."""
        if not self._pending:
            return ""
        before = self._tokenizer.decode(self._context)
        text = self._tokenizer.decode(self._context + self._pending)
        if text.startswith(before):
            return text[len(before) :]
        return self._tokenizer.decode(self._pending)

    def _restart(self) -> str:
        text = self._rest()
        self._context, self._pending = self._pending, []
        # a window that ends inside a character would be given a second time
        seed = [] if text.endswith("\ufffd") else self._context
        self._stream = decoders.DecodeStream(ids=seed, skip_special_tokens=True)
        return text


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's printable alphabet for the 256 bytes: the printable Latin-1 characters stand for
    themselves, the others for characters from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + n): byte for n, byte in enumerate(others)})
    return alphabet
