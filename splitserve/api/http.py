"""Small pieces of HTTP over raw ASGI: bodies in, bodies out."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from splitserve.api.responses import error_object
from splitserve.errors import BodyTimeout, BodyTooLarge, SlowClient, SplitserveError

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

JSON = b"application/json"
EVENTS = b"text/event-stream; charset=utf-8"


class ClientGone(Exception):
    """The client closed the connection."""


async def read_body(scope: Scope, receive: Receive, max_bytes: int, limit_s: float) -> bytes:
    """The whole body; raise BodyTooLarge as soon as that is known, BodyTimeout, ClientGone."""
    too_large = BodyTooLarge(f"The body is larger than {max_bytes} bytes.")
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit() and int(value) > max_bytes:
            raise too_large
    pieces = []
    size = 0
    try:
        async with asyncio.timeout(limit_s):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGone
                piece = message.get("body", b"")
                size += len(piece)
                if size > max_bytes:
                    raise too_large
                pieces.append(piece)
                if not message.get("more_body", False):
                    return b"".join(pieces)
    except TimeoutError:
        raise BodyTimeout(f"The body did not arrive within {limit_s:g} s.") from None


async def send_body(
    send: Send,
    status: int,
    body: bytes,
    content_type: bytes = JSON,
    headers: tuple[tuple[bytes, bytes], ...] = (),
) -> None:
    """One whole response."""
    length = str(len(body)).encode()
    all_headers = [(b"content-type", content_type), (b"content-length", length), *headers]
    await send({"type": "http.response.start", "status": status, "headers": all_headers})
    await send({"type": "http.response.body", "body": body})


async def send_error(
    send: Send, error: SplitserveError, headers: tuple[tuple[bytes, bytes], ...] = ()
) -> None:
    """An OpenAI-style error body with the error's status."""
    if error.retry_after_s is not None:
        headers = (*headers, (b"retry-after", str(max(1, round(error.retry_after_s))).encode()))
    if error.status in (408, 413):
        # the rest of the body was not read: the connection can't be used again
        headers = (*headers, (b"connection", b"close"))
    await send_body(send, error.status, error_object(error), headers=headers)


class EventWriter:
    """A server-sent event stream; each write waits for the client, up to a limit."""

    def __init__(
        self, send: Send, limit_s: float, headers: tuple[tuple[bytes, bytes], ...] = ()
    ) -> None:
        self._send = send
        self._limit_s = limit_s
        self._headers = headers
        self.is_started = False

    async def write(self, data: bytes) -> None:
        """Send events; the first one sends the status. Raise SlowClient past the limit."""
        try:
            async with asyncio.timeout(self._limit_s):
                if not self.is_started:
                    self.is_started = True
                    headers = [
                        (b"content-type", EVENTS),
                        (b"cache-control", b"no-cache"),
                        *self._headers,
                    ]
                    await self._send(
                        {"type": "http.response.start", "status": 200, "headers": headers}
                    )
                await self._send({"type": "http.response.body", "body": data, "more_body": True})
        except TimeoutError:
            raise SlowClient(
                f"The client did not read its stream for {self._limit_s:g} s."
            ) from None

    async def end(self) -> None:
        await self._send({"type": "http.response.body", "body": b"", "more_body": False})


async def until_gone(receive: Receive) -> None:
    """Return when the client has closed the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
