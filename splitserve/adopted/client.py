"""The HTTP/1.1 client to adopted servers: one write per request, bodies as they arrive.

On the token path, so it is no more than httptools on an asyncio Protocol: keep-alive connections
per server, no redirects, no cookies, no content encodings (none is asked for).
"""

from __future__ import annotations

import asyncio
import ssl
from typing import cast
from urllib.parse import urlsplit

import httptools

from splitserve.errors import ConfigError

IDLE_S = 3.0  # vLLM closes an idle connection after 5 s
HIGH_BYTES = 1 << 18  # received and not yet read, beyond which the server is made to wait
MAX_BODY_BYTES = 1 << 26


class ConnectFailed(Exception):
    """No connection: nothing of the request was sent. is_refused: nobody listens there."""

    def __init__(self, message: str, is_refused: bool = False) -> None:
        super().__init__(message)
        self.is_refused = is_refused


class ConnectionLost(Exception):
    """The connection ended before the reply did."""


class TooSlow(Exception):
    """The limit passed."""


class Pool:
    """Connections to one server. `headers` go with each request."""

    def __init__(self, url: str, headers: dict[str, str] | None = None) -> None:
        """url: http[s]://host:port, nothing else; raise ConfigError."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.username:
            raise ConfigError(f"{url} is not the URL of a server.", advice="http://HOST:PORT")
        if parts.path not in ("", "/") or parts.query or parts.fragment:
            raise ConfigError(
                f"{url}: give a server without a path.", advice="/v1/… is added to it."
            )
        self.url = f"{parts.scheme}://{parts.netloc}"
        try:
            self._address = parts.hostname, parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            raise ConfigError(f"{url} has no valid port.") from None
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None
        lines = [f"host: {parts.netloc}", *(f"{k}: {v}" for k, v in (headers or {}).items())]
        self._head = "".join(f"{line}\r\n" for line in lines).encode("latin-1")
        self._idle: list[Connection] = []
        self._busy: set[Connection] = set()

    @property
    def num_busy(self) -> int:
        return len(self._busy)

    async def get(self, path: str, limit_s: float) -> tuple[int, bytes]:
        """(status, body) within the limit."""
        reply = await self.send("GET", path, b"", b"", limit_s)
        try:
            return await reply.head(limit_s), await reply.body(limit_s)
        finally:
            reply.close()

    async def send(
        self, method: str, path: str, headers: bytes, body: bytes, connect_s: float
    ) -> Reply:
        """Send a request. headers: more lines, each with its end. Raise ConnectFailed."""
        length = b"content-length: %d\r\n" % len(body) if body else b""
        data = b"".join(
            (f"{method} {path} HTTP/1.1\r\n".encode(), self._head, headers, length, b"\r\n", body)
        )
        connection = self._take_idle()
        if connection is None:
            connection = await self._connect(connect_s)
        reply = Reply(self, connection)
        connection.begin(data)
        self._busy.add(connection)
        return reply

    def abort(self) -> None:
        """Break all connections: the server is lost. Their readers hear of it."""
        for connection in [*self._busy, *self._idle]:
            connection.abort()
        self._idle.clear()

    def give_back(self, connection: Connection) -> None:
        """The reply is over, or nobody wants the rest of it: then the connection is closed, which
        is how a server learns that its client is gone."""
        self._busy.discard(connection)
        if connection.is_reusable:
            connection.idle_since_s = asyncio.get_running_loop().time()
            self._idle.append(connection)
        else:
            connection.abort()

    def _take_idle(self) -> Connection | None:
        now_s = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable and now_s - connection.idle_since_s < IDLE_S:
                return connection
            connection.abort()
        return None

    async def _connect(self, limit_s: float) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limit_s):
                _, connection = await loop.create_connection(
                    Connection, *self._address, ssl=self._ssl
                )
        except TimeoutError:
            raise ConnectFailed(f"no connection within {limit_s:g} s") from None
        except OSError as error:
            is_refused = isinstance(error, ConnectionRefusedError)
            raise ConnectFailed(f"no connection: {error.strerror or error}", is_refused) from None
        return connection


class Reply:
    """What comes back of one request. `close` it in any case; unfinished, that aborts it."""

    def __init__(self, pool: Pool, connection: Connection) -> None:
        self.connection = connection
        self._pool = pool
        self._closed = False

    async def head(self, limit_s: float) -> int:
        """The status. Raise ConnectionLost, TooSlow.

        Nothing is sent again by itself when a kept connection turns out to be closed: the server
        may have read the request, and what it fetches can be fetched once.
        """
        return await self.connection.head(limit_s)

    async def read(self, limit_s: float) -> bytes:
        """What has arrived of the body, at least a byte; empty at its end."""
        return await self.connection.read(limit_s)

    async def body(self, limit_s: float) -> bytes:
        """All of the body; the limit is for all of it."""
        loop = asyncio.get_running_loop()
        until_s = loop.time() + limit_s
        pieces, size = [], 0
        while piece := await self.connection.read(until_s - loop.time()):
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise ConnectionLost(f"sent more than {MAX_BODY_BYTES} bytes")
        return b"".join(pieces)

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            self._pool.give_back(self.connection)


class Connection(asyncio.Protocol):
    """One request at a time. Waiting costs no timer per read: one timer looks at the limit."""

    def __init__(self) -> None:
        self.idle_since_s = 0.0
        self.headers: list[tuple[bytes, bytes]] = []
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._lost: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._limit_s = 0.0
        self._reset()

    def _reset(self) -> None:
        self._parser = httptools.HttpResponseParser(self)
        self._status: int | None = None
        self._pieces: list[bytes] = []
        self._num_waiting = 0
        self._is_paused = False
        self._is_complete = True
        self._keeps_alive = True

    @property
    def is_reusable(self) -> bool:
        return (
            self._lost is None and self._is_complete and self._keeps_alive and not self._num_waiting
        )

    def begin(self, data: bytes) -> None:
        self._reset()
        self._is_complete = False
        if self._transport is not None and self._lost is None:
            self._transport.write(data)

    def abort(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._transport is not None:
            self._transport.abort()
        self._lose("was closed")

    async def head(self, limit_s: float) -> int:
        while self._status is None:
            await self._wait(limit_s)
        return self._status

    async def read(self, limit_s: float) -> bytes:
        while not self._pieces:
            if self._is_complete:
                return b""
            await self._wait(limit_s)
        data = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._num_waiting = 0
        if self._is_paused and self._transport is not None and self._lost is None:
            self._is_paused = False
            self._transport.resume_reading()
        return data

    async def _wait(self, limit_s: float) -> None:
        if self._lost is not None:
            raise ConnectionLost(self._lost)
        if limit_s <= 0:
            raise TooSlow
        self._limit_s = self._loop.time() + limit_s
        if self._timer is None or self._timer.when() > self._limit_s:
            self._arm()
        self._waiter = self._loop.create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _arm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_at(self._limit_s, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._waiter is None or self._waiter.done():
            return  # armed again by who waits next
        if self._loop.time() < self._limit_s:
            self._arm()
        else:
            self._waiter.set_exception(TooSlow())

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _lose(self, reason: str) -> None:
        if self._lost is None:
            self._lost = reason
            self._wake()

    # --- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is no subclass

    def data_received(self, data: bytes) -> None:
        if self._is_complete:
            self.abort()  # nobody asked
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self.abort()
            self._lost = f"sent what is not HTTP: {error}"
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self._is_complete and self._status is not None and self._ends_with_connection:
            self._is_complete = True
        self._lose(f"was lost: {exc}" if exc else "was closed by the server")

    # --- called by the parser

    def on_message_begin(self) -> None:
        self.headers = []
        self._ends_with_connection = True

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))
        if name.lower() in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200:
            self._status = status

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._num_waiting += len(body)
        if self._num_waiting > HIGH_BYTES and not self._is_paused and self._transport is not None:
            self._is_paused = True
            self._transport.pause_reading()

    def on_message_complete(self) -> None:
        if self._status is not None:
            self._keeps_alive = self._parser.should_keep_alive()
            self._is_complete = True
