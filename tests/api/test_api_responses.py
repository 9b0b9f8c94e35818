"""Every object is read back with the OpenAI client's own types."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from splitserve.api import responses, sse
from splitserve.api.responses import Choice, ModelCard, Usage
from splitserve.errors import WorkerLost

USAGE = Usage(prompt_tokens=20, completion_tokens=5, cached_tokens=16)
USAGE_BODY = {
    "prompt_tokens": 20,
    "completion_tokens": 5,
    "total_tokens": 25,
    "prompt_tokens_details": {"cached_tokens": 16},
}


def body_of(event: bytes) -> dict[str, object]:
    assert event.startswith(b"data: ")
    assert event.endswith(b"\n\n")
    assert event.count(b"\n") == 2
    body: dict[str, object] = json.loads(event[6:])
    return body


def test_chat_completion() -> None:
    raw = responses.chat_completion("chatcmpl-1", 123, "m", [Choice("Hi", "stop")], USAGE)
    answer = ChatCompletion.model_validate_json(raw)
    assert answer.choices[0].message.content == "Hi"
    assert answer.choices[0].finish_reason == "stop"
    assert json.loads(raw)["usage"] == USAGE_BODY
    assert json.loads(raw)["object"] == "chat.completion"


def test_text_completion_with_two_choices() -> None:
    choices = [Choice("a", "stop"), Choice("b", "length")]
    answer = Completion.model_validate_json(
        responses.text_completion("cmpl-1", 123, "m", choices, USAGE)
    )
    assert [(c.index, c.text, c.finish_reason) for c in answer.choices] == [
        (0, "a", "stop"),
        (1, "b", "length"),
    ]


@pytest.mark.parametrize("include_usage", [True, False])
def test_chat_stream(include_usage: bool) -> None:
    stream = sse.ChatStream("chatcmpl-1", 123, 'a "model"\x00', include_usage)
    events = [stream.first(), stream.delta("He"), stream.delta("y\n"), stream.last("length")]
    chunks = [ChatCompletionChunk.model_validate(body_of(e)) for e in events]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].delta.content for c in chunks] == ["", "He", "y\n", None]
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, None, "length"]
    assert {(c.id, c.created, c.model) for c in chunks} == {("chatcmpl-1", 123, 'a "model"\x00')}
    assert all(("usage" in body_of(e)) == include_usage for e in events)
    last = body_of(stream.usage(USAGE))
    assert (last["choices"], last["usage"]) == ([], USAGE_BODY)


@pytest.mark.parametrize("include_usage", [True, False])
def test_completion_stream(include_usage: bool) -> None:
    stream = sse.CompletionStream("cmpl-1", 123, "m", include_usage, num_choices=2)
    events = [stream.delta("a", 0), stream.delta("b", 1), stream.last("stop", 1)]
    chunks = [Completion.construct(**body_of(e)) for e in events]  # as the client does
    assert [(c.choices[0].index, c.choices[0].text) for c in chunks] == [
        (0, "a"),
        (1, "b"),
        (1, ""),
    ]
    assert body_of(events[0])["choices"][0]["finish_reason"] is None  # type: ignore[index]
    assert body_of(events[2])["choices"][0]["finish_reason"] == "stop"  # type: ignore[index]
    assert all(("usage" in body_of(e)) == include_usage for e in events)
    assert body_of(stream.usage(USAGE))["usage"] == USAGE_BODY


@given(st.text())
def test_any_text_survives(text: str) -> None:
    chat = sse.ChatStream("c", 1, "m", False).delta(text)
    assert body_of(chat)["choices"][0]["delta"]["content"] == text  # type: ignore[index]
    completion = sse.CompletionStream("c", 1, "m", True).delta(text)
    assert body_of(completion)["choices"][0]["text"] == text  # type: ignore[index]


def test_models() -> None:
    card = ModelCard("m", 123, max_model_len=8192)
    listed = json.loads(responses.model_list([card]))
    assert listed["object"] == "list"
    assert listed["data"] == [json.loads(responses.model_object(card))]
    assert Model.model_validate(listed["data"][0]).id == "m"


def test_errors_in_and_outside_a_stream() -> None:
    error = WorkerLost("The worker died.")
    assert json.loads(responses.error_object(error)) == error.body()
    assert body_of(sse.error_event(error)) == error.body()
    assert sse.DONE == b"data: [DONE]\n\n"
