"""Streamed answers as server-sent events.

Each event is one OpenAI chunk. All of a chunk but the new text is the same for every token, so a
stream builds it once and per token only encodes the text between two constant pieces.
"""

from __future__ import annotations

import abc
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


class EventStream(abc.ABC):
    """The chunks of one stream, with any number of choices.

    In order: `first` for each choice of a chat; for each choice any number of `delta`, then `last`,
    choices interleaved as they come; then `usage` if include_usage, then DONE.
    """

    __slots__ = ("_around", "_body", "_include_usage")

    object: str

    def __init__(
        self,
        request_id: str,
        created: int,
        model: str,
        include_usage: bool,
        num_choices: int = 1,
    ) -> None:
        self._include_usage = include_usage
        self._body = {"id": request_id, "object": self.object, "created": created, "model": model}
        self._around = [_around(self._chunk(self._text(_MARK), i)) for i in range(num_choices)]

    def first(self, index: int = 0) -> bytes:
        """What opens a choice, before any text; may be empty."""
        return b""

    def delta(self, text: str, index: int = 0, logprobs: dict[str, Any] | None = None) -> bytes:
        if logprobs is not None:
            return event(self._chunk(self._text(text), index, logprobs=logprobs))
        prefix, suffix = self._around[index]
        return prefix + _encode(text) + suffix

    def last(
        self, reason: FinishReason, index: int = 0, logprobs: dict[str, Any] | None = None
    ) -> bytes:
        return event(self._chunk(self._text(None), index, reason, logprobs))

    def usage(self, usage: Usage) -> bytes:
        return event({**self._body, "choices": [], "usage": usage.body()})

    @abc.abstractmethod
    def _text(self, text: str | None) -> dict[str, Any]:
        """The part of a choice that holds text; None in its last chunk."""

    def _chunk(
        self,
        text: dict[str, Any],
        index: int,
        reason: FinishReason | None = None,
        logprobs: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        choice = {"index": index, **text, "logprobs": logprobs, "finish_reason": reason}
        body = {**self._body, "choices": [choice]}
        if self._include_usage:
            body["usage"] = None
        return body


class ChatStream(EventStream):
    """/v1/chat/completions: a choice opens with its role."""

    __slots__ = ()

    object = "chat.completion.chunk"

    def first(self, index: int = 0) -> bytes:
        return event(self._chunk({"delta": {"role": "assistant", "content": ""}}, index))

    def _text(self, text: str | None) -> dict[str, Any]:
        return {"delta": {} if text is None else {"content": text}}


class CompletionStream(EventStream):
    """/v1/completions."""

    __slots__ = ()

    object = "text_completion"

    def _text(self, text: str | None) -> dict[str, Any]:
        return {"text": text or ""}


_MARK = "\x00"
"""Stands for the text while a chunk is split around it. No other field can hold its encoding: the
id, object and model names come from the server."""


def _around(body: dict[str, Any]) -> tuple[bytes, bytes]:
    # from the right: whatever the model is called, the text comes after its name
    prefix, _, suffix = event(body).rpartition(_encode(_MARK))
    return prefix, suffix
