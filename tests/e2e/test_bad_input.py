"""Whatever a client sends: an error in words with the right status, and a server that goes on.

After each test the workers are idle, none was restarted, and the answer to a plain request is what
it was before. Long because every field and every way to send it wrong is one line of one table,
against servers that are started once.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import openai
import pytest

from splitserve.api import protocol
from tests.e2e.conftest import BODY_S, CONTEXT, POOL_BLOCKS
from tests.support.cluster import until
from tests.support.served import Reply, Served

pytestmark = pytest.mark.processes

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
PLAIN = {"model": "tiny", "prompt": "still here?", "temperature": 0, "max_tokens": 4}
MESSAGES = [{"role": "user", "content": "hello"}]
POOL_TOKENS = POOL_BLOCKS * 16
MAX_BODY_BYTES = 8 << 20

on_one_server = pytest.mark.parametrize("server", ["split"], indirect=True)
"""For what is refused before any worker is asked."""


@pytest.fixture(autouse=True)
def unharmed(server: Served) -> Iterator[None]:
    expected = server.post(COMPLETION, PLAIN).json()["choices"]
    yield
    assert server.post(COMPLETION, PLAIN).json()["choices"] == expected


def refused(reply: Reply, status: int, code: str, *, param: str | None = None) -> str:
    """Check an error reply; return its message."""
    assert reply.status == status, reply.body
    error = reply.error
    assert error["code"] == code, error
    assert error["param"] == param, error
    assert reply.headers["content-type"] == "application/json"
    assert reply.headers["x-request-id"]
    assert error["message"]
    message: str = error["message"]
    return message


def completion(server: Served, **fields: object) -> Reply:
    return server.post(COMPLETION, {"model": "tiny", "prompt": "a"} | fields)


def chat(server: Served, **fields: object) -> Reply:
    return server.post(CHAT, {"model": "tiny", "messages": MESSAGES} | fields)


# --- bodies that are no requests


@on_one_server
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"{",
        b"nonsense",
        b'{"model": "tiny", "prompt": "a",}',
        b'{"model": "tiny", "prompt": "a"} {}',
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": Infinity}',
        b'{"model": "tiny", "prompt": "\xff\xfe"}',
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "\\udfff", "prompt": "a"}',
        b"\xff\xfe{\x00}\x00",
        b"\x1f\x8b\x08\x00 not even gzip",
        b"[]",
        b"null",
        b'"a"',
        b"7",
        b"[" * 10_000 + b"]" * 10_000,
        b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
        b'{"model": "tiny", "prompt": ' + b"[" * 10_000,
        b"model=tiny&prompt=a",
        b"0" * 100_000,
    ],
    ids=lambda body: repr(body[:24]),
)
@pytest.mark.parametrize("path", [CHAT, COMPLETION])
def test_no_json_object(server: Served, path: str, body: bytes) -> None:
    message = refused(server.post(path, body), 400, "malformed_json")
    assert "Send a JSON object" in message


@on_one_server
@pytest.mark.parametrize("number", ["1e999", "-1e999", "9" * 400, "1" + "0" * 5000])
def test_numbers_that_no_float_holds(server: Served, number: str) -> None:
    body = f'{{"model": "tiny", "prompt": "a", "temperature": {number}}}'
    reply = server.post(COMPLETION, body.encode())
    assert reply.status == 400
    assert reply.error["code"] in ("invalid_value", "malformed_json")


def test_the_content_type_is_not_asked_for(server: Served) -> None:
    """What the body is decides: curl -d sends x-www-form-urlencoded with JSON in it."""
    for content_type in ("text/plain", "application/x-www-form-urlencoded", "image/png", "§"):
        headers = {"content-type": content_type.encode("latin-1").decode("latin-1")}
        assert server.post(COMPLETION, PLAIN, headers).status == 200


def test_duplicate_keys_mean_the_last(server: Served) -> None:
    """As every JSON reader of Python has it; what counts is checked."""
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 1, "max_tokens": 2}'
    assert server.post(COMPLETION, body).json()["usage"]["completion_tokens"] in (1, 2)
    body = b'{"model": "tiny", "prompt": "a", "max_tokens": 1, "max_tokens": 0}'
    refused(server.post(COMPLETION, body), 400, "invalid_value", param="max_tokens")


# --- values


def test_unknown_model(server: Served) -> None:
    for name in ("gpt-4", "TINY", "tiny ", "../tiny", "x" * 10_000, "\0"):
        message = refused(completion(server, model=name), 404, "model_not_found", param="model")
        assert "GET /v1/models lists" in message
        assert len(message) < 1000
    refused(chat(server, model="gpt-4"), 404, "model_not_found", param="model")
    refused(completion(server, model=""), 400, "invalid_value", param="model")
    refused(server.post(COMPLETION, {"prompt": "a"}), 400, "invalid_value", param="model")


@on_one_server
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", 7),
        ("prompt", 7),
        ("prompt", {}),
        ("prompt", []),
        ("prompt", [[]]),
        ("prompt", None),
        ("prompt", ["a", [1]]),
        ("prompt", [1, "a"]),
        ("prompt", [1.0, 2.0]),
        ("prompt", [True]),
        ("prompt", [-1]),
        ("prompt", ["a"] * 65),
        ("max_tokens", 0),
        ("max_tokens", -1),
        ("max_tokens", "16"),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("max_tokens", -(10**30)),
        ("temperature", "hot"),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", 10**400),
        ("temperature", True),
        ("temperature", [1]),
        ("top_p", 0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 2),
        ("seed", "1"),
        ("seed", 1.5),
        ("seed", 2**64),
        ("seed", -(2**63) - 1),
        ("stop", 7),
        ("stop", ""),
        ("stop", [""]),
        ("stop", [7]),
        ("stop", ["x"] * 17),
        ("stop", "x" * 1025),
        ("stop_token_ids", 2),
        ("stop_token_ids", ["2"]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [512]),
        ("stop_token_ids", [2**70]),
        ("stop_token_ids", list(range(257))),
        ("stream", "yes"),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("ignore_eos", "no"),
        ("logprobs", 21),
        ("logprobs", -1),
        ("logprobs", True),
        ("n", 0),
        ("n", 65),
        ("n", "2"),
        ("min_tokens", -1),
        ("min_tokens", 2**70),
        ("min_tokens", 1.5),
        ("presence_penalty", 2.1),
        ("frequency_penalty", "a"),
        ("repetition_penalty", 0),
        ("logit_bias", [1]),
        ("logit_bias", {"a": 1}),
        ("logit_bias", {"1": "b"}),
        ("logit_bias", {"1": 101}),
        ("logit_bias", {"-1": 1}),
        ("logit_bias", {"512": 1}),
        ("logit_bias", {"9" * 30: 1}),
        ("user", 7),
        ("metadata", []),
        ("metadata", {"a": 1}),
    ],
    ids=lambda x: x if isinstance(x, str) and len(x) < 20 else repr(x)[:20],
)
def test_wrong_types_and_ranges(server: Served, field: str, value: object) -> None:
    reply = completion(server, **{field: value})
    assert reply.status == 400, reply.body
    assert reply.error["code"] == "invalid_value"
    assert reply.error["param"].startswith(field)
    assert field in reply.error["message"]
    assert len(reply.error["message"]) < 500


@on_one_server
@pytest.mark.parametrize(
    ("messages", "code"),
    [
        ([], "invalid_value"),
        (None, "invalid_value"),
        ("hello", "invalid_value"),
        ({}, "invalid_value"),
        (["hello"], "invalid_value"),
        ([{}], "invalid_value"),
        ([{"role": "user"}], "invalid_value"),
        ([{"role": "user", "content": None}], "invalid_value"),
        ([{"role": "user", "content": 7}], "invalid_value"),
        ([{"role": "user", "content": []}], "invalid_value"),
        ([{"role": "user", "content": [{"type": "text"}]}], "invalid_value"),
        ([{"role": "user", "content": ["hello"]}], "invalid_value"),
        ([{"role": "robot", "content": "a"}], "invalid_value"),
        ([{"role": ["user"], "content": "a"}], "invalid_value"),
        ([{"role": "user", "content": "a"}] * 10_001, "invalid_value"),
        ([{"role": "tool", "content": "a"}], "unsupported_field"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "unsupported_field"),
        ([{"role": "assistant", "content": "a", "tool_calls": [{}]}], "unsupported_field"),
        ([{"role": "user", "content": "a", "color": "red"}], "unknown_field"),
    ],
    ids=lambda x: repr(x)[:40],
)
def test_messages(server: Served, messages: object, code: str) -> None:
    reply = chat(server, messages=messages)
    assert (reply.status, reply.error["code"]) == (400, code)
    assert reply.error["param"].startswith("messages")


# --- fields


@on_one_server
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("response_format", {"type": "json_object"}),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "auto"),
        ("guided_json", {}),
        ("kv_transfer_params", {"do_remote_decode": True}),
        ("do_remote_prefill", True),
        ("bootstrap_room", 1),
        ("data_parallel_rank", 0),
    ],
)
def test_fields_that_are_not_honoured_are_refused_by_name(
    server: Served, field: str, value: object
) -> None:
    message = refused(chat(server, **{field: value}), 400, "unsupported_field", param=field)
    assert field in message
    with pytest.raises(openai.BadRequestError) as caught:
        server.client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,  # type: ignore[arg-type]
            extra_body={field: value},
        )
    assert caught.value.code == "unsupported_field"
    assert caught.value.param == field


def test_kv_transfer_params_never_reach_a_worker(server: Served) -> None:
    """Not from a client's body, whatever is in it, nor from headers (design 5.8)."""
    for value in ({}, [], None, {"remote_block_ids": [0, 1], "lease_id": "x"}, "x" * 1000):
        reply = completion(server, kv_transfer_params=value)
        refused(reply, 400, "unsupported_field", param="kv_transfer_params")
    headers = {"x-kv-transfer-params": "{}", "x-prefiller-host-port": "127.0.0.1:1"}
    assert server.post(COMPLETION, PLAIN, headers).status == 200


def test_unknown_fields(server: Served) -> None:
    message = refused(chat(server, temprature=1), 400, "unknown_field", param="temprature")
    assert "Did you mean temperature?" in message
    refused(chat(server, prompt="a"), 400, "unknown_field", param="prompt")
    reply = completion(server, **{"x" * 5000: 1, "\0\n\r": 2})
    assert (reply.status, reply.error["code"]) == (400, "unknown_field")


# --- sizes


def limit_of(server: Served) -> int:
    """Tokens of prompt and output together: the pool's, or the model's."""
    return POOL_TOKENS if server.lab.runtime.config.num_decode else CONTEXT


def test_a_prompt_longer_than_the_context_or_the_pool(server: Served) -> None:
    limit = limit_of(server)
    for size in (limit, limit + 1, 5 * limit):
        reply = completion(server, prompt=[5] * size)
        message = refused(reply, 400, "context_length_exceeded", param="prompt")
        assert str(size) in message
        assert str(limit) in message
        assert "Shorten the prompt." in message
    text = chat(server, messages=[{"role": "user", "content": "hello there " * 2000}])
    refused(text, 400, "context_length_exceeded", param="messages")


def test_max_tokens_up_to_the_last_place(server: Served) -> None:
    """Prompt and output fill context or pool to the last token; one more is refused."""
    limit = limit_of(server)
    for size in (limit - 1, limit - 2, limit - 40):
        room = limit - size
        reply = completion(server, prompt=[5] * size, max_tokens=room, ignore_eos=True)
        assert reply.json()["usage"]["total_tokens"] == limit
        reply = completion(server, prompt=[5] * size, max_tokens=room + 1)
        message = refused(reply, 400, "context_length_exceeded", param="max_tokens")
        assert "lower max_tokens" in message
    refused(
        completion(server, max_tokens=10**30), 400, "context_length_exceeded", param="max_tokens"
    )


def test_several_that_fill_the_pool_each(server: Served) -> None:
    """They can't run beside each other: all are answered, one after the other."""
    size = limit_of(server) - 24
    prompts = [[5 + i] * size for i in range(4)]
    reply = completion(server, prompt=prompts, max_tokens=24, ignore_eos=True)
    assert reply.json()["usage"]["completion_tokens"] == 4 * 24


def test_a_body_of_100_megabytes(server: Served) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        server.client.completions.create(model="tiny", prompt="x" * 100_000_000)
    assert caught.value.status_code == 413
    assert caught.value.code == "body_too_large"
    assert caught.value.request_id


def test_a_body_of_8_megabytes(server: Served) -> None:
    for prompt in ("x" * (MAX_BODY_BYTES - 200), "the " * 2_000_000):
        refused(completion(server, prompt=prompt), 400, "context_length_exceeded", param="prompt")
    ids = server.post(COMPLETION, b'{"model":"tiny","prompt":[' + b"5," * 3_000_000 + b"5]}")
    refused(ids, 400, "context_length_exceeded", param="prompt")


def test_out_of_vocabulary_ids(server: Served) -> None:
    for bad in (512, 2**31, 2**63, 2**64, 10**40):
        message = refused(completion(server, prompt=[5, bad]), 400, "invalid_value", param="prompt")
        assert str(bad)[:30] in message
        assert "0 to 511" in message


# --- odd, and fine


@pytest.mark.parametrize(
    "prompt",
    [
        [5],
        [0],
        [2],
        [511],
        [0, 1, 2, 1, 0],
        "<|im_start|><|im_end|><|endoftext|>",
        "<|im_start|>" * 100,
        "a",
        "\0",
        "a\0b\0" * 20,
        "\r\n\t\x0b\x1b[31m",
        "\U0010ffff\ufffe\ufeff",
        "👩‍👩‍👧‍👦" * 20,
        "e" + "\u0301" * 500,
        "{{ 7 * 7 }}{% raw %}",
    ],
    ids=lambda prompt: repr(prompt)[:20],
)
def test_odd_prompts(server: Served, prompt: object) -> None:
    reply = completion(server, prompt=prompt, max_tokens=8, seed=1)
    assert reply.status == 200, reply.body
    assert reply.json()["usage"]["completion_tokens"] >= 1
    if isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt, "name": prompt}]
        assert chat(server, messages=messages, max_tokens=8, seed=1).status == 200


def test_an_empty_text_is_no_prompt(server: Served) -> None:
    message = refused(completion(server, prompt=""), 400, "invalid_value", param="prompt")
    assert "empty" in message
    assert chat(server, messages=[{"role": "user", "content": ""}], max_tokens=2).status == 200


@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 1e-300},
        {"temperature": 5e-324, "top_p": 5e-324, "min_p": 1},
        {"temperature": 2, "top_k": 2**31 - 1},
        {"top_k": -1},
        {"top_p": 1e-300},
        {"min_p": 1.0},
        {"seed": 2**64 - 1},
        {"seed": -(2**63)},
        {"stop": ["x"] * 16},
        {"stop": "aab" * 300},
        {"stop": "\0"},
        {"stop_token_ids": list(range(256))},
        {"metadata": {"a" * 1000: "b"}, "user": "\0"},
        {"stream": None, "max_tokens": None, "n": 1, "logit_bias": {}},
    ],
    ids=lambda settings: repr(settings)[:30],
)
def test_extreme_settings(server: Served, settings: dict[str, object]) -> None:
    reply = completion(server, **{"max_tokens": 8} | settings)
    assert reply.status == 200, reply.body


# --- the wire


@contextlib.contextmanager
def raw(server: Served) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", server.port), timeout=30) as connection:
        yield connection


def read_all(connection: socket.socket) -> bytes:
    """Until the server closes, or resets because it has not read all that was sent."""
    received = b""
    with contextlib.suppress(ConnectionResetError):
        while piece := connection.recv(65536):
            received += piece
    return received


def head(*lines: str, path: str = COMPLETION, version: str = "1.1") -> bytes:
    return "\r\n".join([f"POST {path} HTTP/{version}", "host: x", *lines, "", ""]).encode()


def test_a_chunked_body(server: Served) -> None:
    body = json.dumps(PLAIN).encode()
    with raw(server) as connection:
        connection.sendall(head("transfer-encoding: chunked", "connection: close"))
        for i in range(0, len(body), 7):
            piece = body[i : i + 7]
            connection.sendall(b"%x\r\n%s\r\n" % (len(piece), piece))
        connection.sendall(b"0\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_a_chunked_body_without_end(server: Served) -> None:
    """No length is told: it is refused when it has become too large."""
    chunk = b"10000\r\n" + b" " * 65536 + b"\r\n"
    with raw(server) as connection:
        connection.sendall(head("transfer-encoding: chunked"))
        with contextlib.suppress(ConnectionError):
            for _ in range(MAX_BODY_BYTES // 65536 + 20):
                connection.sendall(chunk)
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in received
    assert b"connection: close" in received


@on_one_server
def test_a_body_that_does_not_come(server: Served) -> None:
    """Its deadline is short here; other requests are answered meanwhile."""
    with raw(server) as slow, raw(server) as half:
        slow.sendall(head("content-length: 100"))
        half.sendall(head("content-length: 100") + b'{"model": ')
        assert server.post(COMPLETION, PLAIN).status == 200
        for connection in (slow, half):
            received = read_all(connection)
            assert received.startswith(b"HTTP/1.1 408")
            assert b"body_timeout" in received
            assert f"within {BODY_S:g} s".encode() in received


def test_clients_that_leave_in_the_middle_of_their_request(server: Served) -> None:
    pieces = [b"", b"POST", head("content-length: 100")[:-2], head("content-length: 9") + b"{"]
    for piece in pieces:
        with raw(server) as connection:
            connection.sendall(piece)
    whole = json.dumps(PLAIN | {"max_tokens": 500}).encode()
    for _ in range(5):
        with raw(server) as connection:
            connection.sendall(head(f"content-length: {len(whole)}") + whole)
    server.do(until(lambda: server.lab.service.num_inflight == 0, "given up"))


@on_one_server
@pytest.mark.parametrize(
    "garbage",
    [
        b"\0" * 1000,
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x55" * 64,
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 1e3\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
        b"POST /v1/completions HTTP/1.1\r\nbad header\r\n\r\n",
        b"GET \xff\xfe HTTP/1.1\r\nhost: x\r\n\r\n",
        b"GET /%zz%80%ff HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET http://[::1 HTTP/1.1\r\nhost: x\r\n\r\n",
        b"OPTIONS * HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"CONNECT evil:443 HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        b"GET /health HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\nconnection: upgrade, close\r\n\r\n",
    ],
    ids=lambda data: repr(data[:60]),
)
def test_what_is_no_http(server: Served, garbage: bytes) -> None:
    with raw(server) as connection:
        connection.sendall(garbage)
        connection.shutdown(socket.SHUT_WR)
        received = read_all(connection)
    assert not received or received.startswith(b"HTTP/1.1 ")
    assert b" 500 " not in received.split(b"\r\n")[0]


def test_a_websocket_is_not_spoken(server: Served) -> None:
    upgrade = "upgrade: websocket", "connection: upgrade", "sec-websocket-version: 13"
    key = "sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ=="
    lines = ["GET /v1/realtime HTTP/1.1", "host: x", *upgrade, key, "", ""]
    with raw(server) as connection:
        connection.sendall("\r\n".join(lines).encode())
        status = connection.recv(65536).split(b"\r\n")[0]
    assert status == b"HTTP/1.1 404 Not Found"


@pytest.mark.parametrize("stream", [False, True])
def test_http_1_0(server: Served, stream: bool) -> None:
    """Reverse proxies speak it. A stream comes in chunks all the same: uvicorn knows no other
    way, and proxies understand it."""
    body = json.dumps(PLAIN | {"stream": stream}).encode()
    with raw(server) as connection:
        connection.sendall(head(f"content-length: {len(body)}", version="1.0") + body)
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 200")
    assert b"connection: close" in received
    assert (b"data: [DONE]" if stream else b'"usage"') in received


def test_pipelined_requests(server: Served) -> None:
    """Answered in their order on one connection."""
    one = json.dumps(PLAIN | {"max_tokens": 5}).encode()
    two = json.dumps(PLAIN | {"max_tokens": 1}).encode()
    with raw(server) as connection:
        for body, keep in ((one, "keep-alive"), (b"{", "keep-alive"), (two, "close")):
            lines = f"content-length: {len(body)}", f"connection: {keep}"
            connection.sendall(head(*lines) + body)
        received = read_all(connection)
    assert re.findall(rb"HTTP/1.1 (\d+) ", received) == [b"200", b"400", b"200"]
    assert received.index(b'"completion_tokens":5') < received.index(b'"completion_tokens":1')


def test_a_pipelining_client_that_leaves(server: Served) -> None:
    body = json.dumps(PLAIN | {"max_tokens": 900, "stream": True, "ignore_eos": True}).encode()
    request = head(f"content-length: {len(body)}") + body
    worker = "decode-0" if server.lab.runtime.config.num_decode else "mixed-0"
    service = server.lab.service
    with server.lab.hold("step", worker):
        with raw(server) as connection:
            connection.sendall(request * 3)
            server.do(until(lambda: service.num_inflight, "in flight"))
            (journey,) = service._tasks.values()
            server.do(until(lambda: journey.output_ids, "decoding"))
        server.do(until(lambda: service.num_inflight == 0, "given up"))
    assert len(journey.output_ids) < 900


def test_oversize_headers(server: Served) -> None:
    """A header section has a limit, reached in one line or in many."""
    for headers in ([f"x-large: {'x' * 100_000}"], [f"x-{i}: {'x' * 100}" for i in range(1000)]):
        with raw(server) as connection:
            connection.sendall(head(*headers, "content-length: 0"))
            received = read_all(connection)
        assert received.startswith(b"HTTP/1.1 431 ")
        assert b"headers_too_large" in received
    with raw(server) as connection:
        connection.sendall(f"GET /{'x' * 100_000} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        assert read_all(connection).startswith(b"HTTP/1.1 431 ")


def test_headers_without_end(server: Served) -> None:
    with raw(server) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nx: ")
        with contextlib.suppress(ConnectionError):
            for _ in range(1000):
                connection.sendall(b"y" * 65536)
        assert read_all(connection).startswith(b"HTTP/1.1 431 ")


def test_many_bad_requests_at_once(server: Served) -> None:
    bad = [
        PLAIN | {"max_tokens": 0},
        PLAIN | {"prompt": [512]},
        PLAIN | {"best_of": 3},
        PLAIN | {"prompt": [5] * 9000},
        b"{",
        PLAIN,
    ]
    with ThreadPoolExecutor(16) as pool:
        replies = list(pool.map(lambda body: server.post(COMPLETION, body), bad * 20))
    assert [reply.status for reply in replies] == [400, 400, 400, 400, 400, 200] * 20


def test_a_connection_that_never_sends_a_request_is_closed(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "HEAD_S", 0.3)
    with raw(server) as silent, raw(server) as slow:
        slow.sendall(b"GET /health HTTP/1.1\r\nx: ")
        for connection in (silent, slow):
            assert connection.recv(100) == b""
