"""Streamed answers as server-sent events.

Each event is one OpenAI chunk. All of a chunk but the new text is the same for every token, so a
stream builds it once and per token only encodes the text between two constant pieces.
"""

from __future__ import annotations

from typing import Any

import msgspec

from splitserve.api.responses import FinishReason, Usage
from splitserve.errors import SplitserveError

DONE = b"data: [DONE]\n\n"
HEARTBEAT = b": \n\n"
"""A comment: clients skip it; it keeps idle connections open."""

_encode = msgspec.json.Encoder().encode


def event(body: Any) -> bytes:
    """One event with a JSON body."""
    return b"data: " + _encode(body) + b"\n\n"


def error_event(error: SplitserveError) -> bytes:
    """An error after the first byte: the status is already sent, so it comes as an event. No
    DONE follows it."""
    return event(error.body())


class ChatStream:
    """The chunks of one /v1/chat/completions stream.

    In order: `first`, any number of `delta`, `last`, then `usage` if include_usage, then DONE.
    """

    __slots__ = ("_body", "_include_usage", "_prefix", "_suffix")

    def __init__(self, request_id: str, created: int, model: str, include_usage: bool) -> None:
        self._include_usage = include_usage
        self._body = {
            "id": request_id,
            "object": "chat.completion.chunk",
            "created": created,
            "model": model,
        }
        self._prefix, self._suffix = _around(self._chunk({"content": _MARK}, None))

    def first(self) -> bytes:
        """The chunk that opens the message: the role, no text."""
        return event(self._chunk({"role": "assistant", "content": ""}, None))

    def delta(self, text: str, logprobs: dict[str, Any] | None = None) -> bytes:
        if logprobs is not None:
            return event(self._chunk({"content": text}, None, logprobs))
        return self._prefix + _encode(text) + self._suffix

    def last(self, finish_reason: FinishReason, logprobs: dict[str, Any] | None = None) -> bytes:
        return event(self._chunk({}, finish_reason, logprobs))

    def usage(self, usage: Usage) -> bytes:
        return event({**self._body, "choices": [], "usage": usage.body()})

    def _chunk(
        self,
        delta: dict[str, str],
        finish_reason: FinishReason | None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        body = {**self._body, "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return body


class CompletionStream:
    """The chunks of one /v1/completions stream, with one choice per prompt.

    In order: for each choice any number of `delta`, then `last`, choices interleaved as they
    come; then `usage` if include_usage, then DONE.
    """

    __slots__ = ("_around", "_body", "_include_usage")

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        include_usage: bool,
        num_choices: int = 1,
    ) -> None:
        self._include_usage = include_usage
        self._body = {
            "id": request_id,
            "object": "text_completion",
            "created": created,
            "model": model,
        }
        self._around = [_around(self._chunk(_MARK, i, None)) for i in range(num_choices)]

    def delta(self, text: str, index: int = 0, logprobs: dict[str, Any] | None = None) -> bytes:
        if logprobs is not None:
            return event(self._chunk(text, index, None, logprobs))
        prefix, suffix = self._around[index]
        return prefix + _encode(text) + suffix

    def last(
        self,
        finish_reason: FinishReason,
        index: int = 0,
        logprobs: dict[str, Any] | None = None,
    ) -> bytes:
        return event(self._chunk("", index, finish_reason, logprobs))

    def usage(self, usage: Usage) -> bytes:
        return event({**self._body, "choices": [], "usage": usage.body()})

    def _chunk(
        self,
        text: str,
        index: int,
        finish_reason: FinishReason | None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        body = {**self._body, "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return body


_MARK = "\x00"
"""Stands for the text while a chunk is split around it. No other field can hold its encoding: the
id, object and model names come from the server."""


def _around(body: dict[str, Any]) -> tuple[bytes, bytes]:
    # from the right: whatever the model is called, the text comes after its name
    prefix, _, suffix = event(body).rpartition(_encode(_MARK))
    return prefix, suffix
