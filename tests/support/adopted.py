"""A gateway over scripted servers, all in the test's event loop, and a client of it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from splitserve.adopted.client import Pool, Reply
from splitserve.cluster.adopting import AdoptingRuntime
from splitserve.config import AdoptConfig, Deadlines, GatewayConfig, SplitMode
from splitserve.wire import Role
from tests.support.scripted import MODEL, ScriptedServer

LIMIT_S = 30.0
PATHS = {"completion": "/v1/completions", "chat": "/v1/chat/completions"}
PROMPT = "one two three four five six seven eight"


class Answer:
    """A reply that was read to its end."""

    def __init__(self, status: int, raw: bytes) -> None:
        self.status = status
        self.raw = raw
        self.is_stream = raw.startswith(b"data: ")
        events = [x.removeprefix(b"data: ") for x in raw.split(b"\n\n") if x]
        self.is_done = events[-1:] == [b"[DONE]"]
        bodies = events[:-1] if self.is_done else events
        self.events: list[dict[str, Any]] = [json.loads(x) for x in bodies]

    def json(self) -> Any:
        return json.loads(self.raw)

    @property
    def error(self) -> dict[str, Any] | None:
        return self.events[-1].get("error")

    def text(self, index: int = 0) -> str:
        choices = [c for e in self.events for c in e.get("choices", []) if c["index"] == index]
        return "".join(_text(choice) for choice in choices)

    @property
    def usage(self) -> dict[str, Any]:
        return self.events[-1]["usage"]


def _text(choice: dict[str, Any]) -> str:
    if "text" in choice:
        return choice["text"]
    return (choice.get("delta") or choice["message"]).get("content") or ""


class Rig:
    """Used as `async with`. servers by id: prefill-0, decode-0, …"""

    def __init__(
        self,
        prefill: int = 1,
        decode: int = 1,
        mixed: int = 0,
        split: SplitMode = SplitMode.ALWAYS,
        lease_s: float = 30.0,
        key: str | None = None,
        **deadlines: float,
    ) -> None:
        numbers = ((Role.PREFILL, prefill), (Role.DECODE, decode), (Role.MIXED, mixed))
        self.servers = {
            f"{role.value}-{i}": ScriptedServer() for role, num in numbers for i in range(num)
        }
        self._numbers = numbers
        self._split = split
        self._lease_s = lease_s
        self._key = key
        self._deadlines = deadlines
        ScriptedServer.kept.clear()

    async def __aenter__(self) -> Rig:
        for server in self.servers.values():
            await server.start()
        urls = iter(self.servers.values())
        config = AdoptConfig(
            servers=tuple((role, next(urls).url) for role, n in self._numbers for _ in range(n)),
            port=0,
            kv_lease_s=self._lease_s,
            gateway=GatewayConfig(split=self._split, deadlines=Deadlines(**self._deadlines)),
        )
        self.runtime = AdoptingRuntime(config, self._key, lambda line: None)
        await self.runtime.start()
        self.client = Pool(self.runtime.url, {"authorization": "Bearer the-client's"})
        return self

    async def __aexit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.client.abort()
        await self.runtime.stop(drain_s=0.0)
        for server in self.servers.values():
            await server.stop()
        if kind is None:
            assert not any(x.num_legs or x.pending_tokens for x in self.adopted.values())
            for name, server in self.servers.items():
                assert not server.violations, (name, server.violations)

    @property
    def adopted(self) -> Any:
        return self.runtime.fleet.servers

    @property
    def counts(self) -> Any:
        return self.runtime._setting.counts

    @property
    def prefill(self) -> ScriptedServer:
        return self.servers["prefill-0"]

    @property
    def decode(self) -> ScriptedServer:
        return self.servers["decode-0"]

    async def open(self, kind: str = "completion", **fields: Any) -> Reply:
        """A request whose reply is the caller's to read and close."""
        body = {"model": MODEL, "temperature": 0, "max_tokens": 12, **fields}
        if kind == "completion":
            body.setdefault("prompt", PROMPT)
        else:
            body.setdefault("messages", [{"role": "user", "content": PROMPT}])
        raw = json.dumps({k: v for k, v in body.items() if v is not ...}).encode()
        return await self.client.send("POST", PATHS[kind], b"", raw, LIMIT_S)

    async def ask(self, kind: str = "completion", **fields: Any) -> Answer:
        reply = await self.open(kind, **fields)
        try:
            return Answer(await reply.head(LIMIT_S), await reply.body(LIMIT_S))
        finally:
            reply.close()

    async def get(self, path: str) -> tuple[int, bytes]:
        return await self.client.get(path, LIMIT_S)

    def notes(self) -> list[str]:
        """Of the last request."""
        recent = self.runtime.service.recent
        return recent[next(reversed(recent))].notes


async def until(condition: Callable[[], object], what: str) -> None:
    try:
        async with asyncio.timeout(LIMIT_S):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
    except TimeoutError:
        raise AssertionError(f"in vain: {what}") from None
