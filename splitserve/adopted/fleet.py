"""All adopted servers: asked in the background how they are, and picked by the gateway's router.

A server takes legs while it answers its polls, serves the models that the others serve, and its
requests do not fail.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterable

import msgspec

from splitserve.adopted.client import ConnectFailed, ConnectionLost, Pool, TooSlow
from splitserve.adopted.server import AdoptedServer, Load, ModelList, read_load
from splitserve.clock import Clock
from splitserve.errors import ConfigError, NoWorker
from splitserve.latency.model import StepModel
from splitserve.router.policy import Ask
from splitserve.router.router import Router
from splitserve.wire import Leg, Role, View

log = logging.getLogger(__name__)

POLL_S = 1.0
POLL_LIMIT_S = 5.0
FAILED_POLLS = 3  # in a row: the server is lost, with all that runs there


class Fleet:
    """Runs in the event loop. `start`, then `pick` and `leg_opened` … `leg_closed`."""

    def __init__(
        self,
        urls: Iterable[tuple[Role, str]],
        clock: Clock,
        policy: str = "least_loaded",
        key: str | None = None,
        say: Callable[[str], None] = log.info,
    ) -> None:
        """key: of the servers, sent as a bearer token. Raise ConfigError."""
        self.router = Router(policy)
        self.servers: dict[str, AdoptedServer] = {}
        self._clock = clock
        self._say = say
        self._waiters: list[asyncio.Future[None]] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._model_ids: frozenset[str] | None = None
        headers = {"accept": "*/*", "content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        numbers = dict.fromkeys(Role, 0)
        for role, url in urls:
            server_id = f"{role.value}-{numbers[role]}"
            numbers[role] += 1
            pool = Pool(url, headers)
            if pool.url in [one.pool.url for one in self.servers.values()]:
                raise ConfigError(f"{pool.url} is given twice.")
            self.servers[server_id] = AdoptedServer(server_id, role, pool)

    async def start(self, limit_s: float) -> None:
        """Until all are up, or the limit has passed and those that are can serve. Raise ConfigError
        if their models differ, NoWorker."""
        self._tasks = [asyncio.create_task(self._poll(x)) for x in self.servers.values()]
        until_s = self._clock.now() + limit_s
        while not all(server.is_up for server in self.servers.values()):
            for server in self.servers.values():
                if server.reason.startswith("serves "):
                    raise ConfigError(f"{server.pool.url} {server.reason}.")
            try:
                await self.wait_for_change(max(0.0, until_s - self._clock.now()))
            except TimeoutError:
                break
        down = [x for x in self.servers.values() if not x.is_up]
        if not self.router.has(Role.DECODE, Role.MIXED):
            reasons = "; ".join(f"{server.pool.url}: {server.reason}" for server in down)
            raise NoWorker(f"No adopted server that decodes came up in time. {reasons}.", advice="")

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for server in self.servers.values():
            server.pool.abort()

    # --- picking

    def pick(self, leg: Leg, num_tokens: int, avoid: frozenset[str]) -> tuple[str, str] | None:
        """(server, why) for a leg, of those not to be avoided if there are others."""
        picked = self.router.pick(leg, Ask(num_tokens, self._clock.now(), avoid=avoid))
        return None if picked is None else (picked.worker_id, picked.reason)

    async def wait_for_change(self, timeout_s: float) -> None:
        """Until a server comes, goes, or tells why not; raise TimeoutError."""
        future = asyncio.get_running_loop().create_future()
        self._waiters.append(future)
        try:
            async with asyncio.timeout(timeout_s):
                await future
        finally:
            if future in self._waiters:
                self._waiters.remove(future)

    def leg_opened(self, server: AdoptedServer, num_tokens: int) -> None:
        server.num_legs += 1
        server.pending_tokens += num_tokens
        self._write(server)

    def leg_closed(self, server: AdoptedServer, num_tokens: int) -> None:
        server.num_legs -= 1
        server.pending_tokens -= num_tokens
        self._write(server)

    def prefilled(self, server: AdoptedServer, num_tokens: int) -> None:
        """The prompt of a leg that goes on is computed."""
        server.pending_tokens -= num_tokens
        self._write(server)

    def fault(self, server: AdoptedServer) -> None:
        """A request failed there, by the server's fault."""
        server.num_faults += 1
        server.breaker.fault(self._clock.now())
        open_s = server.breaker.open_s(self._clock.now())
        if open_s:
            asyncio.get_running_loop().call_later(open_s + 0.01, self._write, server)
        self._write(server)

    def success(self, server: AdoptedServer) -> None:
        server.breaker.success()
        self._write(server)

    def lost(self, server: AdoptedServer, reason: str) -> None:
        """Nothing listens there, or nobody answers: what runs there is given up."""
        server.reason = reason
        server.pool.abort()
        if server.is_up:
            log.warning("%s (%s) is lost: %s", server.server_id, server.pool.url, reason)
            server.is_up = False
            self.router.fleet.remove(server.server_id)
        self._tell_change()

    # --- inside

    def _write(self, server: AdoptedServer) -> None:
        """What the router sees."""
        fleet = self.router.fleet
        slot = fleet.slots.get(server.server_id)
        if slot is None:
            return
        fleet.legs[slot] = server.num_legs + server.num_foreign
        fleet.pending[slot] = server.pending_tokens
        is_open = server.breaker.is_open(self._clock.now())
        if fleet.draining[slot] and not is_open:
            self._tell_change()
        fleet.draining[slot] = is_open

    async def _poll(self, server: AdoptedServer) -> None:
        while True:
            try:
                await self._ask(server)
                server.num_failed_polls = 0
            except (ConnectFailed, ConnectionLost, TooSlow, _Unfit) as error:
                server.num_failed_polls += 1
                reason = str(error) or f"no answer within {POLL_LIMIT_S:g} s"
                is_refused = isinstance(error, ConnectFailed) and error.is_refused
                if is_refused or server.num_failed_polls >= FAILED_POLLS or not server.is_up:
                    self.lost(server, reason)
            except Exception:
                log.exception("poll of %s", server.server_id)
            await asyncio.sleep(POLL_S)

    async def _ask(self, server: AdoptedServer) -> None:
        """Raise ConnectFailed, ConnectionLost, TooSlow, _Unfit."""
        pool = server.pool
        status, _ = await pool.get("/health", POLL_LIMIT_S)
        if status != 200:
            raise _Unfit(f"its /health answers {status}")
        if not server.is_up:
            await self._ask_models(server)
        status, text = await pool.get("/metrics", POLL_LIMIT_S)
        server.load = load = read_load(text) if status == 200 else Load()
        server.num_foreign = max(0, load.running + load.waiting - server.num_legs)
        self._welcome(server)

    async def _ask_models(self, server: AdoptedServer) -> None:
        status, body = await server.pool.get("/v1/models", POLL_LIMIT_S)
        if status != 200:
            raise _Unfit(f"its /v1/models answers {status}")
        try:
            models = msgspec.json.decode(body, type=ModelList).data
        except msgspec.MsgspecError as error:
            raise _Unfit(f"its /v1/models can't be read: {error}") from None
        ids = frozenset(model.id for model in models)
        if not ids:
            raise _Unfit("it serves no model")
        if self._model_ids is not None and ids != self._model_ids:
            ours = ", ".join(sorted(self._model_ids))
            raise _Unfit(f"serves {', '.join(sorted(ids))}, the others {ours}")
        self._model_ids = ids
        server.models = tuple(models)

    def _welcome(self, server: AdoptedServer) -> None:
        fleet, load = self.router.fleet, server.load
        num_blocks = max(1, load.num_blocks)
        if not server.is_up:
            server.is_up, server.reason = True, ""
            server.breaker.success()
            fleet.add(
                server.server_id,
                server.role,
                self._clock.now(),
                num_blocks=num_blocks,
                block_size=16,
                budget=2048,
                model=StepModel(),
            )
            self._say(f"{server.server_id}: {server.pool.url}")
            self._tell_change()
        slot = fleet.slots.get(server.server_id)
        assert slot is not None
        free = int((1.0 - load.kv_usage) * num_blocks)
        view = View(
            waiting=load.waiting, running=load.running, free_blocks=free, total_blocks=num_blocks
        )
        fleet.num_blocks[slot] = num_blocks
        fleet.set_view(slot, view, self._clock.now())
        self._write(server)

    def _tell_change(self) -> None:
        waiters, self._waiters = self._waiters, []
        for future in waiters:
            with contextlib.suppress(asyncio.InvalidStateError):
                future.set_result(None)


class _Unfit(Exception):
    """It answers, but can't be used."""
