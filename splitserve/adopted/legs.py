"""One leg on one server: sent, followed, and whose fault it was if it failed."""

from __future__ import annotations

from types import TracebackType

from splitserve.adopted.client import ConnectFailed, ConnectionLost, Reply, TooSlow
from splitserve.adopted.events import ErrorBody, Malformed, read_error
from splitserve.adopted.fleet import Fleet
from splitserve.adopted.server import AdoptedServer
from splitserve.errors import Overloaded, RefusedByEngine, SplitserveError, WorkerLost

_CLIENTS = (400, 404, 413, 414, 415, 422)


class LegLost(Exception):
    """The leg gives no more; the request may go on elsewhere. not_sent: nobody saw it."""

    def __init__(self, reason: str, *, not_sent: bool = False) -> None:
        super().__init__(reason)
        self.not_sent = not_sent


class ServerBusy(LegLost):
    """The server has no room; that is no fault."""


class Leg:
    """Used as `async with`; left before its end, its connection is closed and the server aborts.

    Exceptions of the connection that pass through `__aexit__` become LegLost, and count against the
    server.
    """

    def __init__(self, fleet: Fleet, server: AdoptedServer, num_tokens: int) -> None:
        self.server = server
        self.has_first_token = False
        self._fleet = fleet
        self._num_tokens = num_tokens
        self._reply: Reply | None = None

    async def send(self, path: str, request_id: str, body: bytes, connect_s: float) -> None:
        """Raise LegLost with not_sent."""
        headers = b"x-request-id: %s\r\n" % request_id.encode()
        try:
            self._reply = await self.server.pool.send("POST", path, headers, body, connect_s)
        except ConnectFailed as error:
            self._count(error)
            raise LegLost(f"{self.server.server_id}: {error}", not_sent=True) from None

    async def status(self, limit_s: float) -> int:
        """Raise what `refusal` says unless it is 200."""
        reply = self._require_reply()
        status = await reply.head(limit_s)
        if status != 200:
            raise self.refusal(read_error(status, await reply.body(limit_s)), status)
        return status

    async def read(self, limit_s: float) -> bytes:
        return await self._require_reply().read(limit_s)

    async def body(self, limit_s: float) -> bytes:
        return await self._require_reply().body(limit_s)

    def refusal(self, error: ErrorBody, status: int, *, is_blamed: bool = True) -> Exception:
        """The error that a server's error means here. A wrong key is not the client's fault, nor is
        a model that is gone, since the gateway has checked the name. is_blamed: if the fault is a
        server's, it is this one's."""
        is_gone = status == 404 and error.param == "model"
        if status in _CLIENTS and not is_gone:
            self._fleet.success(self.server)
            refused = RefusedByEngine(error.message, param=error.param)
            refused.status = status
            return refused
        if status == 429:
            return ServerBusy(f"{self.server.server_id} is busy: {error.message}")
        if is_blamed:
            self._fleet.fault(self.server)
        return LegLost(f"{self.server.server_id} answered {status}: {error.message}")

    def note_first_token(self) -> None:
        if not self.has_first_token:
            self.has_first_token = True
            self._fleet.prefilled(self.server, self._num_tokens)
            self._fleet.success(self.server)

    async def __aenter__(self) -> Leg:
        self._fleet.leg_opened(self.server, self._num_tokens)
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._reply is not None:
            self._reply.close()
        self._fleet.leg_closed(self.server, 0 if self.has_first_token else self._num_tokens)
        if isinstance(error, ConnectFailed | ConnectionLost | TooSlow | Malformed):
            self._count(error)
            what = "was silent for too long" if isinstance(error, TooSlow) else str(error)
            raise LegLost(f"{self.server.server_id} {what}") from None

    def _count(self, error: Exception) -> None:
        if isinstance(error, ConnectFailed) and error.is_refused:
            self._fleet.lost(self.server, str(error))
        else:
            self._fleet.fault(self.server)

    def _require_reply(self) -> Reply:
        assert self._reply is not None, "nothing was sent"
        return self._reply


def gave_up(lost: LegLost, num_tries: int) -> SplitserveError:
    """What the client is told when the last try failed so."""
    if isinstance(lost, ServerBusy):
        return Overloaded(f"{lost}.")
    return WorkerLost(f"Gave up after {num_tries} tries: {lost}.")
