"""The two generating endpoints over adopted servers: one journey per prompt, joined to a reply."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec

from splitserve.adopted.asked import Asked, read_asked
from splitserve.adopted.events import TokensDetails, UsageBody
from splitserve.adopted.fleet import Fleet
from splitserve.adopted.journey import AdoptedJourney, Setting
from splitserve.api.http import (
    ClientGone,
    EventWriter,
    Receive,
    Scope,
    Send,
    read_body,
    send_body,
    until_gone,
)
from splitserve.api.responses import ModelCard
from splitserve.api.schemas import Kind
from splitserve.api.sse import DONE, error_event, event
from splitserve.errors import ModelNotFound, SlowClient, SplitserveError
from splitserve.gateway.service import Door

_OBJECT = {"chat": "chat.completion.chunk", "completion": "text_completion"}


class Front:
    """Serves POST /v1/chat/completions and /v1/completions."""

    def __init__(self, door: Door, setting: Setting) -> None:
        self._door = door
        self._setting = setting

    def cards(self) -> list[ModelCard]:
        """Of the servers that are up: they serve the same."""
        return cards_of(self._setting.fleet)

    async def handle(
        self, kind: Kind, request_id: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """One request, to its end; raise SplitserveError if nothing was sent yet."""
        config = self._door.config
        body = await read_body(scope, receive, config.max_body_bytes, config.deadlines.body_s)
        asked = read_asked(kind, body)
        if asked[0].model not in [card.id for card in self.cards()]:
            raise ModelNotFound(f"There is no model {asked[0].model[:200]!r} here.", param="model")
        gone = asyncio.create_task(until_gone(receive))
        work = asyncio.create_task(_Call(self._door, self._setting, request_id, asked).run(send))
        try:
            await asyncio.wait([gone, work], return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                await work
        finally:
            gone.cancel()
            work.cancel()
            await asyncio.gather(gone, work, return_exceptions=True)


def cards_of(fleet: Fleet) -> list[ModelCard]:
    up = [server for server in fleet.servers.values() if server.is_up]
    if not up:
        return []
    lengths = {
        model.id: [x.max_model_len for s in up for x in s.models if x.id == model.id]
        for model in up[0].models
    }
    return [
        ModelCard(
            model.id,
            model.created,
            min((x for x in lengths[model.id] if x is not None), default=None),
        )
        for model in up[0].models
    ]


class _Call:
    """One request: its journeys, and how their answers are joined."""

    def __init__(self, door: Door, setting: Setting, request_id: str, asked: list[Asked]) -> None:
        self._door = door
        self._request_id = request_id
        self._asked = asked
        self._headers = (
            (b"x-request-id", request_id.encode()),
            (b"x-splitserve-guarantee", asked[0].guarantee.encode()),
        )
        self._writer: EventWriter | None = None
        self._turn = asyncio.Lock()
        is_one = len(asked) == 1
        self._journeys = [
            AdoptedJourney(request_id, one, i, setting, self._emit, is_one)
            for i, one in enumerate(asked)
        ]

    async def run(self, send: Send) -> None:
        limit_s = self._door.config.deadlines.slow_client_s
        self._writer = EventWriter(send, limit_s, self._headers)
        tasks: list[asyncio.Task[None]] = []
        try:
            for journey in self._journeys:
                tasks.append(await self._door.admit(journey))
            await self._wait(tasks)
            if self._asked[0].stream:
                await self._writer.write(self._usage_event() + DONE)
                await self._writer.end()
            else:
                await send_body(send, 200, self._joined(), headers=self._headers)
        except SplitserveError as error:
            if isinstance(error, SlowClient):
                raise ClientGone from None
            if not self._writer.is_started:
                raise
            await self._writer.write(error_event(error))
            await self._writer.end()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _wait(self, tasks: list[asyncio.Task[None]]) -> None:
        """Until all have ended; the first error is raised, and ends them all."""
        left = set(tasks)
        while left:
            _, left = await asyncio.wait(left, return_when=asyncio.FIRST_COMPLETED)
            for journey in self._journeys:
                if journey.error is not None:
                    raise journey.error

    async def _emit(self, events: bytes) -> None:
        assert self._writer is not None
        async with self._turn:
            await self._writer.write(events)

    def _usage_event(self) -> bytes:
        """Empty unless the client asked for it."""
        if not self._asked[0].include_usage:
            return b""
        journeys = self._journeys
        head = journeys[0].relay.head
        body = {"object": _OBJECT[self._asked[0].kind], **head, "choices": []}
        return event({**body, "usage": _sum([journey.usage() for journey in journeys])})

    def _joined(self) -> bytes:
        """The answers of all prompts as one."""
        answers = [journey.answer for journey in self._journeys if journey.answer is not None]
        first = answers[0]
        if len(answers) == 1:
            return msgspec.json.encode(first)
        choices = [choice for answer in answers for choice in answer["choices"]]
        for i, choice in enumerate(choices):
            choice["index"] = i
        usages = [msgspec.convert(answer["usage"], UsageBody) for answer in answers]
        return msgspec.json.encode({**first, "choices": choices, "usage": _sum(usages)})


def _sum(usages: list[UsageBody]) -> dict[str, Any]:
    prompt = sum(usage.prompt_tokens for usage in usages)
    completion = sum(usage.completion_tokens for usage in usages)
    cached = [usage.cached_tokens for usage in usages if usage.cached_tokens is not None]
    details = TokensDetails(sum(cached)) if cached else None
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": details,
    }
