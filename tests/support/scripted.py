"""A small HTTP server that answers as vLLM does (tests/support/vllm_replies.py), but for what it is
told to do wrong.

Its "model" is a function of all tokens so far, so that an answer that is gone on with elsewhere is
the right one or is not. A token whose number is divisible by 5 has no text of its own: it comes
with that of the next one, as an incomplete character does.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import itertools
import json
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

from tests.support import vllm_replies as replies

MODEL = "smol"


@dataclass(frozen=True)
class Fault:
    """What one generating request meets. kind: die (the connection), hang, error (inside the reply,
    with a status), refuse (with a status), lie ([DONE] in the middle), garble, abort (the reason).
    after: events of a stream; 0: before anything."""

    kind: str
    after: int = 0
    status: int = 500


def tokenize(text: str) -> list[int]:
    return [1 + sum(map(ord, word)) % 997 for word in text.split()] or [1]


def next_token(ids: list[int]) -> int:
    return 1 + (sum((i + 1) * x for i, x in enumerate(ids)) * 31 + 7) % 997


def generate(ids: list[int], num: int) -> list[int]:
    out: list[int] = []
    for _ in range(num):
        out.append(next_token(ids + out))
    return out


def text_of(ids: list[int], is_last: bool = True) -> str:
    """Of tokens whose last one is an answer's last."""
    return "".join(f" t{x}" for x in ids)


class ScriptedServer:
    """Used as `async with`. requests: bodies of generating requests, in order; faults: of those to
    come. `violations` says what no client of vLLM may do."""

    kept: ClassVar[dict[str, int]] = {}  # tokens whose KV waits, by request id; of all servers

    def __init__(self, model: str = MODEL) -> None:
        self.model = model
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.faults: deque[Fault] = deque()
        self.violations: list[str] = []
        self.num_aborted = 0
        self.num_connections = 0
        self.offers = True
        self.health = 200
        self.step_s = 0.0
        self.hold: asyncio.Event | None = None  # leg 1 waits for it before it answers
        self._numbers = itertools.count()
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> ScriptedServer:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.stop()

    async def start(self, port: int = 0) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", port)
        self.port: int = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """As a killed process: connections break."""
        self._server.close()
        for writer in list(self._writers):
            writer.transport.abort()
        await asyncio.sleep(0)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writers.add(writer)
        self.num_connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                line, *rest = head.split("\r\n")
                headers = dict(x.lower().split(": ", 1) for x in rest if x)
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                await self._answer(line.split()[1], headers, body, reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError, _Died):
            pass
        finally:
            self._writers.discard(writer)
            writer.transport.abort()

    async def _answer(
        self,
        path: str,
        headers: dict[str, str],
        raw: bytes,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        if path == "/health":
            self._whole(writer, self.health, b"")
        elif path == "/metrics":
            self._whole(writer, 200, replies.METRICS.replace(b"} 2.0", b"} 0.0"))
        elif path == "/v1/models":
            models = copy.deepcopy(replies.MODELS)
            models["data"][0]["id"] = self.model
            self._whole(writer, 200, json.dumps(models).encode())
        else:
            body = json.loads(raw)
            self.requests.append(body)
            self.headers.append(headers)
            work = asyncio.create_task(self._generate(path, headers, body, writer))
            gone = asyncio.create_task(self._gone(reader))
            await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.num_aborted += 1
                work.cancel()
                raise _Died
            if gone.done():
                raise _Died
            gone.cancel()
            await asyncio.gather(gone, return_exceptions=True)
            work.result()

    @staticmethod
    async def _gone(reader: asyncio.StreamReader) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read(1)

    async def _generate(
        self, path: str, headers: dict[str, str], body: dict[str, Any], writer: asyncio.StreamWriter
    ) -> None:
        fault = self.faults.popleft() if self.faults else Fault("none")
        params = body.get("kv_transfer_params") or {}
        is_chat = path.endswith("/chat/completions")
        ids = self._ids(body, params, is_chat)
        if params.get("do_remote_prefill"):
            self._fetch(params, len(ids))
        if fault.kind == "hang" and not fault.after:
            await asyncio.Event().wait()
        if fault.kind == "die" and not fault.after:
            raise _Died
        if fault.kind == "refuse":
            error = copy.deepcopy(replies.ERROR)
            error["error"]["code"] = fault.status
            self._whole(writer, fault.status, json.dumps(error).encode())
            return
        prefix = "chatcmpl" if is_chat else "cmpl"
        answer_id = f"{prefix}-{headers['x-request-id']}"
        if params.get("do_remote_decode"):
            if self.hold is not None:
                await self.hold.wait()
            self._leg_one(writer, body, answer_id, ids, is_chat)
        elif body["stream"]:
            await self._stream(writer, body, answer_id, ids, is_chat, fault)
        else:
            self._reply(writer, body, answer_id, ids, is_chat)

    def _ids(self, body: dict[str, Any], params: dict[str, Any], is_chat: bool) -> list[int]:
        if not is_chat:
            prompt = body["prompt"]
            return tokenize(prompt) if isinstance(prompt, str) else prompt
        if params.get("prompt_token_ids"):
            return list(params["prompt_token_ids"])
        return [1, *tokenize(" ".join(message["content"] for message in body["messages"])), 2]

    def _fetch(self, params: dict[str, Any], num_tokens: int) -> None:
        kept = ScriptedServer.kept.pop(params["remote_request_id"], None)
        if kept is None:
            self.violations.append("KV that is not there any more was asked for")
        elif kept != num_tokens:
            self.violations.append(f"KV of {kept} tokens for a prompt of {num_tokens}")

    def _leg_one(
        self,
        writer: asyncio.StreamWriter,
        body: dict[str, Any],
        answer_id: str,
        ids: list[int],
        is_chat: bool,
    ) -> None:
        wrong = [
            name
            for name, right in (("max_tokens", 1), ("n", 1), ("stream", False))
            if body.get(name) != right
        ]
        if wrong or body.get("min_tokens", 0) > 1:
            self.violations.append(f"leg 1 with another {wrong or 'min_tokens'}")
        reply = self._body(body, answer_id, ids, is_chat)
        if self.offers:
            request_id = f"{answer_id}-{id(self)}-{next(self._numbers)}"
            ScriptedServer.kept[request_id] = len(ids)
            reply["kv_transfer_params"] = {
                **replies.OFFER,
                "remote_request_id": request_id,
                "remote_num_tokens": len(ids),
            }
        self._whole(writer, 200, json.dumps(reply).encode())

    def _reply(
        self,
        writer: asyncio.StreamWriter,
        body: dict[str, Any],
        answer_id: str,
        ids: list[int],
        is_chat: bool,
    ) -> None:
        reply = self._body(body, answer_id, ids, is_chat)
        self._whole(writer, 200, json.dumps(reply).encode())

    def _body(
        self, body: dict[str, Any], answer_id: str, ids: list[int], is_chat: bool
    ) -> dict[str, Any]:
        reply = copy.deepcopy(replies.CHAT if is_chat else replies.COMPLETION)
        out = generate(ids, self._num_output(body))
        choice = reply["choices"][0]
        choice["token_ids"] = out if body.get("return_token_ids") else None
        if is_chat:
            choice["message"]["content"] = text_of(out)
        else:
            choice["text"] = text_of(out)
        where = reply if is_chat else choice
        where["prompt_token_ids"] = ids if body.get("return_token_ids") else None
        reply["choices"] = [{**choice, "index": i} for i in range(body.get("n", 1))]
        reply["id"] = answer_id
        reply["usage"] = {
            **replies.USAGE,
            "prompt_tokens": len(ids),
            "completion_tokens": len(out),
            "total_tokens": len(ids) + len(out),
        }
        return reply

    @staticmethod
    def _num_output(body: dict[str, Any]) -> int:
        return int(body.get("max_completion_tokens") or body.get("max_tokens") or 16)

    async def _stream(
        self,
        writer: asyncio.StreamWriter,
        body: dict[str, Any],
        answer_id: str,
        ids: list[int],
        is_chat: bool,
        fault: Fault,
    ) -> None:
        head = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
        writer.write(f"{head}transfer-encoding: chunked\r\n\r\n".encode())
        for num_sent, event in enumerate(self._events(body, answer_id, ids, is_chat)):
            if num_sent == fault.after:
                await self._fail(writer, fault)
                if fault.kind == "hang":
                    await asyncio.Event().wait()
                if fault.kind in ("lie", "error"):
                    return
            self._event(writer, event)
            await asyncio.sleep(self.step_s)
        self._event(writer, "[DONE]")
        writer.write(b"0\r\n\r\n")

    async def _fail(self, writer: asyncio.StreamWriter, fault: Fault) -> None:
        if fault.kind == "die":
            await asyncio.sleep(0.02)  # a reset may overtake what was sent before it
            raise _Died
        if fault.kind == "garble":
            self._event(writer, '{"choices":[{"text":')
        if fault.kind == "abort":
            chunk = copy.deepcopy(replies.COMPLETION_CHUNK)
            chunk["choices"][0].update(text="", token_ids=[], finish_reason="abort")
            self._event(writer, chunk)
        if fault.kind == "error":
            error = copy.deepcopy(replies.LOST_KV)
            error["error"]["code"] = fault.status
            self._event(writer, error)
        if fault.kind in ("error", "lie"):
            self._event(writer, "[DONE]")
            writer.write(b"0\r\n\r\n")

    def _events(
        self, body: dict[str, Any], answer_id: str, ids: list[int], is_chat: bool
    ) -> list[dict[str, Any]]:
        wants_ids = body.get("return_token_ids")
        events = []
        if is_chat:
            role = copy.deepcopy(replies.CHAT_ROLE_CHUNK)
            role["prompt_token_ids"] = ids if wants_ids else None
            events.append(role)
        out = generate(ids, self._num_output(body))
        held: list[int] = []
        for i, token_id in enumerate(out):
            held.append(token_id)
            is_last = i == len(out) - 1
            text = "" if token_id % 5 == 0 and not is_last else text_of(held)
            if text:
                held = []
            chunk = copy.deepcopy(replies.CHAT_CHUNK if is_chat else replies.COMPLETION_CHUNK)
            choice = chunk["choices"][0]
            if is_chat:
                choice["delta"]["content"] = text
            else:
                choice["text"] = text
                choice["prompt_token_ids"] = ids if wants_ids and i == 0 else None
            choice["token_ids"] = [token_id] if wants_ids else None
            choice["finish_reason"] = "length" if is_last else None
            events.append(chunk)
        if (body.get("stream_options") or {}).get("include_usage"):
            usage = copy.deepcopy(replies.USAGE_CHUNK)
            usage["object"] = events[0]["object"]
            usage["usage"].update(
                prompt_tokens=len(ids),
                completion_tokens=len(out),
                total_tokens=len(ids) + len(out),
            )
            events.append(usage)
        for event in events:
            event["id"] = answer_id
        return events

    @staticmethod
    def _event(writer: asyncio.StreamWriter, event: dict[str, Any] | str) -> None:
        text = event if isinstance(event, str) else json.dumps(event, separators=(",", ":"))
        data = f"data: {text}\n\n".encode()
        writer.write(b"%x\r\n%s\r\n" % (len(data), data))

    @staticmethod
    def _whole(writer: asyncio.StreamWriter, status: int, body: bytes) -> None:
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)


class _Died(Exception):
    """The connection breaks."""
