"""The ASGI application: routes, and every error as an OpenAI-style body."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import secrets
from typing import Protocol

import msgspec

from splitserve.api.http import ClientGone, Receive, Scope, Send, send_body, send_error
from splitserve.api.responses import ModelCard, model_list, model_object
from splitserve.api.schemas import Kind
from splitserve.errors import (
    MethodNotAllowed,
    ModelNotFound,
    NoWorker,
    RouteNotFound,
    SplitserveError,
)
from splitserve.gateway.service import Door

log = logging.getLogger(__name__)

_METRICS_TYPE = b"text/plain; version=0.0.4; charset=utf-8"
_GENERATING: dict[str, Kind] = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completion",
}
_ID_PREFIX = {"chat": "chatcmpl", "completion": "cmpl"}


class Generating(Protocol):
    """Who answers the two generating endpoints: api.completions, or adopted.front."""

    def cards(self) -> list[ModelCard]:
        """The models that are served."""

    async def handle(
        self, kind: Kind, request_id: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """One request, to its end; raise SplitserveError if nothing was sent yet."""


class App:
    """`serve` is called once the workers are up; until then only the health routes answer."""

    def __init__(self, service: Door) -> None:
        self._service = service
        self._completions: Generating | None = None

    def serve(self, completions: Generating) -> None:
        self._completions = completions

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _lifespan(receive, send)
            return
        if scope["type"] != "http":
            raise RuntimeError(f"unexpected ASGI scope {scope['type']}")
        path = scope["path"].rstrip("/") or "/"
        kind = _GENERATING.get(path)
        request_id = f"{_ID_PREFIX[kind] if kind else 'req'}-{secrets.token_hex(12)}"
        headers = ((b"x-request-id", request_id.encode()),)
        try:
            if kind is not None:
                await self._generate(kind, request_id, scope, receive, send)
            else:
                await self._answer_get(path, scope, send)
        except MethodNotAllowed as error:
            allowed = b"GET, HEAD" if kind is None else b"POST"
            await send_error(send, error, (*headers, (b"allow", allowed)))
        except SplitserveError as error:
            await send_error(send, error, headers)
        except ClientGone:
            pass
        except asyncio.CancelledError:
            raise
        except Exception:
            log.exception("%s: %s %s", request_id, scope["method"], path)
            await send_error(send, SplitserveError("Internal error in the gateway."), headers)

    async def _generate(
        self, kind: Kind, request_id: str, scope: Scope, receive: Receive, send: Send
    ) -> None:
        _require_method(scope, "POST")
        if self._completions is None:
            raise NoWorker("The workers are still starting.")
        await self._completions.handle(kind, request_id, scope, receive, send)

    async def _answer_get(self, path: str, scope: Scope, send: Send) -> None:
        body, content_type, status = self._get(path, scope)
        _require_method(scope, "GET", "HEAD")
        await send_body(send, status, body, content_type)

    def _get(self, path: str, scope: Scope) -> tuple[bytes, bytes, int]:
        """(body, content type, status) of a GET route; raise RouteNotFound."""
        json_type = b"application/json"
        if path == "/health":
            return b'{"status":"ok"}', json_type, 200
        if path == "/ready":
            ready = self._completions is not None and self._service.is_ready
            return (
                msgspec.json.encode({"ready": ready, "workers": self._workers()}),
                json_type,
                200 if ready else 503,
            )
        if path == "/metrics":
            return self._service.metrics.render(), _METRICS_TYPE, 200
        if path == "/v1/models":
            return model_list(self._cards()), json_type, 200
        if path.startswith("/v1/models/"):
            return model_object(self._card(path.removeprefix("/v1/models/"))), json_type, 200
        if path == "/debug/latency" and _is_local(scope):
            return msgspec.json.encode(self._service.latency_models()), json_type, 200
        if path.startswith("/debug/requests/") and _is_local(scope):
            return self._debug(path.removeprefix("/debug/requests/")), json_type, 200
        raise RouteNotFound(f"There is no {path[:200]} here.")

    def _cards(self) -> list[ModelCard]:
        return [] if self._completions is None else self._completions.cards()

    def _card(self, name: str) -> ModelCard:
        for card in self._cards():
            if card.id == name:
                return card
        raise ModelNotFound(f"There is no model {name[:200]!r} here.", param="model")

    def _workers(self) -> dict[str, str]:
        return {name: role.value for name, role in sorted(self._service.roles().items())}

    def _debug(self, request_id: str) -> bytes:
        """The timeline of one of the last requests; a completion's prompts are `-0`, `-1`, …"""
        recent = self._service.recent
        timeline = recent.get(request_id) or recent.get(f"{request_id}-0")
        if timeline is None:
            raise RouteNotFound(
                f"No request {request_id[:200]!r} among the last {len(recent)}.", advice=""
            )
        return msgspec.json.encode(timeline.to_json())


def _require_method(scope: Scope, *methods: str) -> None:
    if scope["method"] not in methods:
        raise MethodNotAllowed(f"{scope['path'][:200]} takes {methods[0]}, not {scope['method']}.")


def _is_local(scope: Scope) -> bool:
    """The client is on this machine: timelines are for the operator until there are keys."""
    client = scope.get("client")
    try:
        return client is not None and ipaddress.ip_address(client[0]).is_loopback
    except ValueError:
        return False


async def _lifespan(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
