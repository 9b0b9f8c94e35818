"""A running server beside the test: its loop in a thread, its workers real, the test its client."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import openai
import uvloop

from splitserve.config import ServeConfig
from tests.support.cluster import Lab

T = TypeVar("T")


class Served:
    """`lab` is the server; its methods are called through `do`, in its own loop."""

    def __init__(self, model_dir: Path, hold_dir: Path, config: ServeConfig) -> None:
        self._loop = uvloop.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.lab = Lab(model_dir, hold_dir, config)
        self.do(self.lab.start())
        self.port = self.lab.runtime.port
        self.client = openai.OpenAI(
            base_url=f"{self.lab.runtime.url}/v1", api_key="none", max_retries=0, timeout=60
        )

    def do(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it in the server's loop; return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(90)

    def settle(self) -> None:
        """No worker was restarted; all are idle, with their invariants intact."""
        self.do(self.lab.settle())
        restarts = self.lab.runtime.supervisor.num_restarts()
        assert not any(restarts.values()), restarts

    def close(self) -> None:
        self.client.close()
        self.do(self.lab.stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    # --- plain HTTP, for what the OpenAI client would not send

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | str | None = None,
        headers: dict[str, str] | None = None,
    ) -> Reply:
        connection = self.connect()
        try:
            connection.request(method, path, body, headers or {})
            response = connection.getresponse()
            return Reply(response.status, dict(response.headers), response.read())
        finally:
            connection.close()

    def post(self, path: str, body: object, headers: dict[str, str] | None = None) -> Reply:
        """`body` as it is if bytes, else as JSON."""
        raw = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request(
            "POST", path, raw, {"content-type": "application/json"} | (headers or {})
        )

    def metrics(self) -> dict[str, float]:
        """Samples by name and labels as the text format spells them."""
        lines = self.request("GET", "/metrics").body.decode().splitlines()
        samples = (line.rpartition(" ") for line in lines if not line.startswith("#"))
        return {name: float(value) for name, _, value in samples}


class Reply:
    """A response that was read to its end."""

    def __init__(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.status = status
        self.headers = {name.lower(): value for name, value in headers.items()}
        self.body = body

    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """The OpenAI error object: its four keys, and nothing beside it."""
        body = self.json()
        assert body.keys() == {"error"}
        assert body["error"].keys() == {"message", "type", "param", "code"}
        return body["error"]
