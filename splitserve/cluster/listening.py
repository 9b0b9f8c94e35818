"""The gateway's listening socket and its HTTP server, whatever computes behind it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator

import uvicorn

from splitserve.api.app import App
from splitserve.api.protocol import Protocol
from splitserve.errors import ConfigError


def listen(host: str, port: int) -> socket.socket:
    """Bind first: a port that is taken is an error before anything is loaded."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(
            f"Can't listen on {host}:{port}: {error.strerror}.",
            advice="Choose another with --host and --port.",
        ) from error
    listener.listen(2048)
    listener.setblocking(False)
    return listener


def url_of(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def http_server(app: App) -> uvicorn.Server:
    """For `serve(sockets=[listener])` in a task; end it by `close_server`."""
    return _Server(
        uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            log_level="error",  # its warnings are of what strangers send
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=2,
            limit_concurrency=None,
        )
    )


async def close_server(server: uvicorn.Server, serving: asyncio.Task[None]) -> None:
    # a request that the shutdown cuts off, half received, is no error of the server
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    server.should_exit = True
    await asyncio.gather(serving, return_exceptions=True)


class _Server(uvicorn.Server):
    """uvicorn without its signal handlers: whoever runs us decides when to drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield
