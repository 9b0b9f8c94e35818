"""uvicorn's HTTP protocol, with what a server that faces strangers needs besides.

The header section has a limit in size and time; what is no HTTP gets an error like any other; no
request outlives its client, however many it has sent down one connection.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)

from splitserve.api.http import JSON
from splitserve.api.responses import error_object
from splitserve.errors import HeadersTooLarge, MalformedHTTP, SplitserveError

MAX_HEAD_BYTES = 1 << 16
HEAD_S = 30.0  # for the header section of a connection's first request, and of each later one


class Protocol(HttpToolsProtocol):
    """One connection."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = False
        self._head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._refusal: SplitserveError = MalformedHTTP("This is not a request of HTTP/1.1.")
        self._cycles: list[RequestResponseCycle] = []  # more than one: the client pipelines

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse(_too_large())  # and more may come

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        for cycle in self._cycles:
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()
        super().connection_lost(exc)

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_head()

    def _await_head(self) -> None:
        if self._head_timer is None:
            loop = asyncio.get_running_loop()
            self._head_timer = loop.call_later(HEAD_S, self.transport.close)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    # --- called by the parser

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._await_head()
        self._in_head = True
        self._head_bytes = 0

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._stop_head_timer()
        sizes = (len(name) + len(value) for name, value in self.headers)
        if len(self.url) + sum(sizes) > MAX_HEAD_BYTES:
            self._refusal = _too_large()
            raise self._refusal  # the parser makes its own error of it, and we are back below
        super().on_headers_complete()
        running = [cycle for cycle in self._cycles if not cycle.response_complete]
        self._cycles = [*running, self.cycle]

    # --- instead of uvicorn's

    def send_400_response(self, msg: str) -> None:
        """The parser failed, or one of its callbacks."""
        self._refuse(self._refusal)

    def _refuse(self, error: SplitserveError) -> None:
        body = error_object(error)
        lines = [
            STATUS_LINE[error.status] + b"content-type: " + JSON,
            b"content-length: " + str(len(body)).encode(),
            b"connection: close",
            b"",
            body,
        ]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()

    def _unsupported_upgrade_warning(self) -> None:
        """Not worth a line in the log: a client asked for what is not here."""


def _too_large() -> HeadersTooLarge:
    return HeadersTooLarge(
        f"The request's line and headers are larger than {MAX_HEAD_BYTES} bytes."
    )
