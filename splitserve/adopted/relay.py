"""An answer on its way from a server to the client: what goes on, and what is kept of it.

Of a stream each event goes on as it came, but for token ids that only the gateway asked for. The
usage and the end of the stream are left to whoever joins the answers of several prompts.
"""

from __future__ import annotations

from typing import Any

import msgspec

from splitserve.adopted.asked import Asked
from splitserve.adopted.dialect import Prompt
from splitserve.adopted.events import (
    DONE,
    Chunk,
    ErrorBody,
    Malformed,
    Splitter,
    UsageBody,
    read_chunk,
    rewritten,
    without_ids,
)

_SERVERS_OWN = ("kv_transfer_params", "ec_transfer_params", "prompt_text", "metrics")
_END_REASONS = {"length": "length"}  # all others are a stop
_FAILED_REASONS = ("abort", "error")


class ServerError(Exception):
    """An error inside a stream whose status was 200."""

    def __init__(self, error: ErrorBody) -> None:
        super().__init__(error.message)
        self.error = error

    @property
    def status(self) -> int:
        return self.error.code if isinstance(self.error.code, int) else 500


class StreamRelay:
    """One answer over all its attempts.

    The ids of the answer that a resume may build upon end where text came last: the text of later
    ones was still held back, and they are computed again.
    """

    def __init__(self, asked: Asked, prompt: Prompt, index: int, response_id: str | None) -> None:
        """response_id: of several prompts' answers, whose events get one; None: they keep the
        server's, which was told the request's id."""
        self.started = False  # something was given to the client
        self.end_reason: str | None = None
        self.usage: UsageBody | None = None
        self.is_resumed = False
        self.failure: Malformed | ServerError | None = None
        self.is_parsed = False  # the server parses the answer: no text to go on from
        self.num_output = 0  # tokens, or events where no ids come
        self.head: dict[str, Any] = {}  # id, created and model of the first event
        self._asked = asked
        self._prompt = prompt
        self._index = index
        self._response_id = response_id
        self._splitter = Splitter()
        self._held = b""  # the role: it goes with the first token
        self._pending: list[int] = []
        self._is_over = False
        self._is_rewritten = response_id is not None
        self._num_ended = 0  # choices

    @property
    def can_resume(self) -> bool:
        return (
            self._asked.restartable
            and not self.is_parsed
            and self._prompt.ids is not None
            and self._asked.max_tokens is not None
            and len(self._prompt.output_ids) < self._asked.max_tokens
        )

    def begin(self) -> None:
        """Another attempt."""
        self.failure = None
        self._splitter = Splitter()
        self._pending.clear()
        self._held = b""
        self._is_over = False
        if self.started:
            self.is_resumed = self._is_rewritten = True
            self.num_output = len(self._prompt.output_ids)
        else:
            self.head = {}
            self._num_ended = self.num_output = 0

    def feed(self, data: bytes) -> bytes:
        """What of it goes to the client. If then nothing good comes any more, see `failure`: what
        came before it is the client's all the same, for a resume counts upon it."""
        out = []
        try:
            for data_of_event in self._splitter.feed(data):
                out.append(self._event(data_of_event))
        except (Malformed, ServerError) as error:
            self.failure = error
        result = b"".join(out)
        self.started = self.started or bool(result)
        return result

    def finish(self) -> None:
        """The stream has ended; raise Malformed unless the answer has."""
        if not self.is_whole:
            raise Malformed("ended its stream in the middle of the answer")

    @property
    def is_whole(self) -> bool:
        """Each choice has come to its end."""
        return self._num_ended >= self._asked.n

    @property
    def is_over(self) -> bool:
        """[DONE] was there: nothing comes any more."""
        return self._is_over

    def _event(self, data: bytes) -> bytes:
        if data == DONE:
            self._is_over = True
            return b""
        chunk = read_chunk(data)
        if chunk.error is not None:
            raise ServerError(chunk.error)
        if chunk.usage is not None:
            self.usage = chunk.usage
        if not chunk.choices:
            return b""
        if not self.head:
            body = msgspec.json.decode(data)
            self.head = {name: body.get(name) for name in ("id", "created", "model")}
            if self._response_id is not None:
                self.head["id"] = self._response_id
        return self._choice(chunk, data)

    def _choice(self, chunk: Chunk, data: bytes) -> bytes:
        choice = chunk.choices[0]
        if choice.finish_reason in _FAILED_REASONS:
            raise ServerError(ErrorBody(f"finish_reason {choice.finish_reason}", code=500))
        if self._prompt.ids is None:
            self._prompt.ids = chunk.prompt_token_ids or choice.prompt_token_ids
        ids, text = choice.token_ids or [], choice.news
        is_parsed = choice.delta is not None and choice.delta.is_parsed
        self.is_parsed = self.is_parsed or is_parsed
        is_opening = not (ids or text or is_parsed or choice.finish_reason)
        if not is_opening:
            self.num_output += len(ids) or 1
        self._pending += ids
        if text:
            self._prompt.output_ids += self._pending
            self._pending.clear()
        if choice.finish_reason is not None:
            self._num_ended += 1
            self.end_reason = _END_REASONS.get(choice.finish_reason, "stop")
        event = b"data: " + self._forwarded(data) + b"\n\n"
        if is_opening:
            # of a resumed answer the client has it
            self._held += b"" if self.is_resumed else event
            return b""
        held, self._held = self._held, b""
        return held + event

    def _forwarded(self, data: bytes) -> bytes:
        if self._is_rewritten:
            return rewritten(data, self.head, self._index * self._asked.n, self._asked.keeps_ids)
        if self._asked.restartable and not self._asked.keeps_ids:
            return without_ids(data)
        return data


def whole_answer(body: bytes, asked: Asked, response_id: str | None) -> dict[str, Any]:
    """An answer that was not streamed, as the client gets it. Raise Malformed, ServerError."""
    try:
        answer = msgspec.json.decode(body, type=dict[str, Any])
        choices = answer["choices"]
        for choice in choices:
            if choice["finish_reason"] in (None, *_FAILED_REASONS):
                reason = choice["finish_reason"]
                raise ServerError(ErrorBody(f"finish_reason {reason}", code=500))
            if not asked.keeps_ids:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
        if not choices or not isinstance(answer["usage"], dict):
            raise Malformed("a reply without choices or usage")
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
        raise Malformed(f"a reply that can't be read: {error!r}") from None
    for name in _SERVERS_OWN if asked.keeps_ids else (*_SERVERS_OWN, "prompt_token_ids"):
        answer.pop(name, None)
    if response_id is not None:
        answer["id"] = response_id
    return answer
