"""Server-sent events of an adopted server: where they end, and what of them has to be known.

The bytes go to the client as they came. Decoded is only what the journey needs.
"""

from __future__ import annotations

from typing import Any

import msgspec

DONE = b"[DONE]"
MAX_EVENT_BYTES = 1 << 24


class Malformed(Exception):
    """What came is not what such a server sends."""


class Splitter:
    """Cuts a stream into the data of its events."""

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The data of each event that is complete, in order. Raise Malformed."""
        if self._rest:
            data = self._rest + data
        if b"\r" in data:  # never within JSON, which escapes it
            data = data.replace(b"\r\n", b"\n")
        *blocks, self._rest = data.split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise Malformed(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return [_data(block) for block in blocks if b"data:" in block]


def _data(block: bytes) -> bytes:
    if block.startswith(b"data: ") and b"\n" not in block:
        return block[6:]
    lines = [line[5:].lstrip(b" ") for line in block.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class Delta(msgspec.Struct):
    """The news of a chat's choice. What only a parser of the server can write is kept raw."""

    content: str | None = None
    reasoning: msgspec.Raw = msgspec.Raw(b"null")
    reasoning_content: msgspec.Raw = msgspec.Raw(b"null")
    tool_calls: msgspec.Raw = msgspec.Raw(b"null")

    @property
    def is_parsed(self) -> bool:
        raw = (self.reasoning, self.reasoning_content, self.tool_calls)
        return any(bytes(x) not in (b"null", b"[]") for x in raw)


class ChunkChoice(msgspec.Struct):
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None
    text: str | None = None
    delta: Delta | None = None

    @property
    def news(self) -> str:
        """The text of the chunk."""
        if self.delta is not None:
            return self.delta.content or ""
        return self.text or ""


class TokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class UsageBody(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0
    prompt_tokens_details: TokensDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        details = self.prompt_tokens_details
        return None if details is None else details.cached_tokens


class ErrorBody(msgspec.Struct):
    message: str = ""
    type: str | None = None
    param: str | None = None
    code: int | str | None = None


class Chunk(msgspec.Struct):
    choices: list[ChunkChoice] = []
    prompt_token_ids: list[int] | None = None
    usage: UsageBody | None = None
    error: ErrorBody | None = None


_decode = msgspec.json.Decoder(Chunk).decode
_error = msgspec.json.Decoder(Chunk)


def read_chunk(data: bytes) -> Chunk:
    """What has to be known of an event. Raise Malformed."""
    try:
        return _decode(data)
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise Malformed(f"an event that can't be read: {error}") from None


def read_error(status: int, body: bytes) -> ErrorBody:
    """The error of a whole reply; of a plain body, its text."""
    try:
        found = _error.decode(body).error
    except (msgspec.MsgspecError, UnicodeError):
        found = None
    text = body[:500].decode("utf-8", "replace").strip()
    return found or ErrorBody(text or f"HTTP status {status}", code=status)


_TOKEN_IDS = b',"token_ids":['
_PROMPT_IDS = b',"prompt_token_ids":['
_NO_PROMPT_IDS = b',"prompt_token_ids":null'


def without_ids(data: bytes) -> bytes:
    """An event without the token ids that the client did not ask for.

    Cut out of the bytes: within a JSON string no quotation mark stands unescaped, so a key with the
    comma before it is nothing else.
    """
    for key in (_TOKEN_IDS, _PROMPT_IDS):
        at = data.rfind(key)
        if at >= 0:
            data = data[:at] + data[data.index(b"]", at) + 1 :]
    return data.replace(_NO_PROMPT_IDS, b"")


def rewritten(data: bytes, changes: dict[str, Any], first: int, keep_ids: bool) -> bytes:
    """An event with other fields of its own. first: the number of its prompt's first choice."""
    body = msgspec.json.decode(data)
    body.update(changes)
    if not keep_ids:
        body.pop("prompt_token_ids", None)
    for choice in body.get("choices", ()):
        choice["index"] = first + choice.get("index", 0)
        if not keep_ids:
            choice.pop("token_ids", None)
            choice.pop("prompt_token_ids", None)
    return msgspec.json.encode(body)
