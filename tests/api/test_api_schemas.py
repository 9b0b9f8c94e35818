from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splitserve.api.fields import HONOURED, INTERNAL, NEUTRAL
from splitserve.api.schemas import ParsedRequest, parse_chat, parse_completion
from splitserve.errors import (
    InvalidRequest,
    InvalidValue,
    MalformedJSON,
    SplitserveError,
    UnknownField,
    UnsupportedField,
)

PARSERS = {"chat": parse_chat, "completion": parse_completion}
MINIMAL: dict[str, dict[str, Any]] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "Hi"}]},
    "completion": {"model": "m", "prompt": "Hi"},
}


def parse(kind: str, **fields: object) -> ParsedRequest:
    return PARSERS[kind](json.dumps({**MINIMAL[kind], **fields}).encode())


def refused(kind: str, expected: type[SplitserveError], **fields: object) -> SplitserveError:
    with pytest.raises(expected) as caught:
        parse(kind, **fields)
    assert caught.value.status == 400
    return caught.value


both = pytest.mark.parametrize("kind", ["chat", "completion"])


@both
def test_nothing_given_leaves_everything_open(kind: str) -> None:
    parsed = parse(kind)
    assert parsed.model == "m"
    assert not parsed.stream
    assert parsed.temperature is parsed.top_p is parsed.seed is parsed.max_tokens is None
    assert parsed.stop == parsed.stop_token_ids == ()


@both
def test_what_is_given_arrives(kind: str) -> None:
    parsed = parse(
        kind,
        stream=True,
        stream_options={"include_usage": True},
        temperature=0,
        top_p=0.9,
        top_k=-1,
        min_p=0.1,
        seed=-1,
        max_tokens=5,
        stop="###",
        stop_token_ids=[7, 7, 8],
        ignore_eos=True,
        user="u",
        metadata={"a": "b"},
    )
    assert parsed.stream
    assert parsed.include_usage
    assert (parsed.temperature, parsed.top_p, parsed.top_k, parsed.min_p) == (0.0, 0.9, 0, 0.1)
    assert (parsed.seed, parsed.max_tokens, parsed.ignore_eos) == (2**64 - 1, 5, True)
    assert (parsed.stop, parsed.stop_token_ids) == (("###",), (7, 8))
    assert (parsed.user, parsed.metadata) == ("u", {"a": "b"})


@both
def test_null_is_as_if_not_given(kind: str) -> None:
    names = (HONOURED[kind] | NEUTRAL[kind].keys()) - {"model", "messages", "prompt"}
    assert parse(kind, **dict.fromkeys(names)) == parse(kind)


@both
def test_neutral_values_pass_and_others_are_refused_by_name(kind: str) -> None:
    for name, neutral in NEUTRAL[kind].items():
        for value in neutral:
            assert parse(kind, **{name: value}) == parse(kind)
        error = refused(kind, UnsupportedField, **{name: "something"})
        assert error.param == name
        assert name in error.message


def test_json_true_is_not_one() -> None:
    refused("chat", InvalidValue, n=True)
    refused("completion", UnsupportedField, echo=0)


@both
def test_transfer_fields_never_come_from_a_client(kind: str) -> None:
    for name in INTERNAL:
        for value in (None, {}, {"do_remote_prefill": True}):
            error = refused(kind, UnsupportedField, **{name: value})
            assert error.param == name
            assert "servers only" in error.message


def test_unknown_fields_are_named_with_the_nearest_known() -> None:
    error = refused("chat", UnknownField, temprature=1)
    assert error.param == "temprature"
    assert "Did you mean temperature?" in error.message
    assert "Did you mean" not in refused("chat", UnknownField, zzz=1).message
    assert "/v1/completions" in refused("chat", UnknownField, suffix="x").message
    assert "/v1/chat/completions" in refused("completion", UnknownField, messages=[]).message


RANGES: list[tuple[str, list[object], list[object]]] = [
    ("temperature", [0, 2, 0.5], [-0.1, 2.1, "1", True, [1], 10**400]),
    ("top_p", [1, 0.01], [0, 1.01, "x", False]),
    ("top_k", [-1, 0, 50], [-2, 1.5, True, "5", 2**40]),
    ("min_p", [0, 1], [-1, 1.1]),
    ("max_tokens", [1, 10**9], [0, -1, 1.0, True, "5"]),
    ("seed", [0, -(2**63), 2**64 - 1], [2**64, -(2**63) - 1, 1.5, True, "0"]),
    ("stream", [True, False], ["true", 1, 0]),
    ("stop", ["a", [], ["a"] * 16], ["", [""], [1], 5, ["a"] * 17, ["a" * 2000]]),
    ("stop_token_ids", [[], [0, 5]], [[-1], ["a"], [True], 5, [1.0], list(range(300))]),
    ("ignore_eos", [True], ["yes", 1]),
    ("user", ["someone"], [5, {}]),
    ("metadata", [{}, {"k": "v"}], [[], {"k": 1}, {str(i): "" for i in range(17)}]),
    ("stream_options", [], [5, [], {"include_usage": True}]),
    ("model", ["x"], [None, "", 5]),
]


@both
@pytest.mark.parametrize(("name", "good", "bad"), RANGES, ids=[r[0] for r in RANGES])
def test_types_and_ranges(kind: str, name: str, good: list[object], bad: list[object]) -> None:
    for value in good:
        parse(kind, **{name: value})
    for value in bad:
        error = refused(kind, InvalidValue, **{name: value})
        assert error.param == name or value == 10**400  # beyond JSON's numbers: no field known


def test_stream_options_is_strict() -> None:
    refused("chat", UnsupportedField, stream=True, stream_options={"continuous_usage_stats": True})
    refused("chat", UnsupportedField, stream=True, stream_options={"usage": True})
    refused("chat", InvalidValue, stream=True, stream_options={"include_usage": 1})
    parsed = parse("chat", stream=True, stream_options={"include_obfuscation": False})
    assert not parsed.include_usage


def test_the_two_names_of_max_tokens() -> None:
    assert parse("chat", max_completion_tokens=7).max_tokens == 7
    assert parse("chat", max_completion_tokens=7, max_tokens=7).max_tokens == 7
    error = refused("chat", InvalidValue, max_completion_tokens=7, max_tokens=8)
    assert error.param == "max_completion_tokens"
    refused("completion", UnknownField, max_completion_tokens=7)


def messages(*items: object) -> tuple[dict[str, str], ...]:
    return parse("chat", messages=list(items)).messages


def test_messages_become_roles_and_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert messages(
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts, "name": "ann"},
        {"role": "assistant", "content": "", "refusal": None, "tool_calls": []},
    ) == (
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "one\ntwo", "name": "ann"},
        {"role": "assistant", "content": ""},
    )


BAD_MESSAGES: list[tuple[object, type[SplitserveError], str]] = [
    (None, InvalidValue, "messages"),
    ([], InvalidValue, "messages"),
    ("Hi", InvalidValue, "messages"),
    (["Hi"], InvalidValue, "messages[0]"),
    ([{"content": "Hi"}], InvalidValue, "messages[0].role"),
    ([{"role": "robot", "content": "Hi"}], InvalidValue, "messages[0].role"),
    ([{"role": ["user"], "content": "Hi"}], InvalidValue, "messages[0].role"),
    ([{"role": "tool", "content": "Hi"}], UnsupportedField, "messages[0].role"),
    ([{"role": "user"}], InvalidValue, "messages[0].content"),
    ([{"role": "user", "content": []}], InvalidValue, "messages[0].content"),
    ([{"role": "user", "content": 5}], InvalidValue, "messages[0].content"),
    ([{"role": "user", "content": ["x"]}], InvalidValue, "messages[0].content[0]"),
    (
        [{"role": "user", "content": [{"type": "text"}]}],
        InvalidValue,
        "messages[0].content[0].text",
    ),
    ([{"role": "user", "content": [{"text": "x"}]}], InvalidValue, "messages[0].content[0].type"),
    (
        [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
        UnsupportedField,
        "messages[0].content[0].type",
    ),
    (
        [{"role": "user", "content": [{"type": "text", "text": "x", "cache": 1}]}],
        UnknownField,
        "messages[0].content[0].cache",
    ),
    ([{"role": "user", "content": "x", "contents": 1}], UnknownField, "messages[0].contents"),
    (
        [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
        UnsupportedField,
        "messages[0].tool_calls",
    ),
    ([{"role": "user", "content": "x", "name": 5}], InvalidValue, "messages[0].name"),
]


@pytest.mark.parametrize(("value", "kind", "param"), BAD_MESSAGES)
def test_bad_messages(value: object, kind: type[SplitserveError], param: str) -> None:
    assert refused("chat", kind, messages=value).param == param


def test_prompts_in_all_four_forms() -> None:
    assert parse("completion", prompt="a").prompts == ("a",)
    assert parse("completion", prompt=["a", "b"]).prompts == ("a", "b")
    assert parse("completion", prompt=[1, 2]).prompts == ((1, 2),)
    assert parse("completion", prompt=[[1], [2, 3]]).prompts == ((1,), (2, 3))


@pytest.mark.parametrize(
    "prompt",
    [None, [], [[]], 5, {}, ["a", 1], [1, "a"], ["a", [1]], [[1], "a"], [1, -1], [True], [[1.5]]]
    + [["a"] * 65, [None]],
)
def test_bad_prompts(prompt: object) -> None:
    error = refused("completion", InvalidValue, prompt=prompt)
    assert (error.param or "").startswith("prompt")


@both
@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b"[" * 10_000,
        b'{"a":' * 10_000,
        b"[" * 1_000_000,
        b'{"model": "\\ud800"}',
        b'{"model": "\xff"}',
        b'{"model": "\xed\xa0\x80"}',
        b'{"temperature": NaN}',
        b'{"temperature": Infinity}',
    ],
    ids=range(13),
)
def test_what_is_not_json(kind: str, raw: bytes) -> None:
    with pytest.raises(MalformedJSON):
        PARSERS[kind](raw)


@both
def test_a_number_beyond_all_floats(kind: str) -> None:
    with pytest.raises(InvalidValue):
        PARSERS[kind](b'{"temperature": 1e400}')


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
all_names = sorted({n for k in HONOURED for n in (*HONOURED[k], *NEUTRAL[k])} | {"x"})


@both
@given(st.dictionaries(st.sampled_from(all_names), json_values, max_size=3))
@settings(max_examples=150, deadline=None)
def test_any_json_is_parsed_or_refused(kind: str, fields: dict[str, object]) -> None:
    try:
        parse(kind, **fields)
    except InvalidRequest as error:
        json.dumps(error.body())


@both
@given(st.binary(max_size=40))
@settings(deadline=None)
def test_any_bytes_are_parsed_or_refused(kind: str, raw: bytes) -> None:
    with pytest.raises(InvalidRequest):
        PARSERS[kind](raw)
