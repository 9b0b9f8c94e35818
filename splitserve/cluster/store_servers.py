"""The processes of memory tiers: one a tier, started before the workers, restarted when they die.

A tier's blocks die with its process, not with any worker; while it is away workers compute what
they would have loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence

from splitserve.errors import ConfigError
from splitserve.store import memory_server
from splitserve.store.registry import TierSpec

log = logging.getLogger(__name__)

BACKOFF_FIRST_S = 0.2
BACKOFF_MAX_S = 30.0
STABLE_S = 30.0
START_S = 20.0
STOP_S = 5.0


class StoreServers:
    """`start` resolves tiers without a place to those that are served here."""

    def __init__(self) -> None:
        self.processes: dict[str, Process] = {}  # by socket name
        self._watches: list[asyncio.Task[None]] = []

    async def start(self, tiers: Sequence[TierSpec]) -> tuple[TierSpec, ...]:
        """Raise ConfigError if one does not come up: no memory, for example."""
        resolved = []
        for tier in tiers:
            if tier.name == "memory" and not tier.place:
                name = f"splitserve/store/{secrets.token_hex(8)}"
                command = memory_server.command(tier, name)
                await self._spawn(name, command)
                self._watches.append(asyncio.create_task(self._watch(name, command)))
                tier = tier.at(f"unix:{name}")
            resolved.append(tier)
        return tuple(resolved)

    async def stop(self) -> None:
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        for process in self.processes.values():
            try:
                await asyncio.wait_for(process.wait(), STOP_S)
            except TimeoutError:
                process.kill()
                await process.wait()
        self.processes.clear()

    async def _spawn(self, name: str, command: list[str]) -> None:
        process = await asyncio.create_subprocess_exec(
            *command, stdin=PIPE, stdout=PIPE, start_new_session=True
        )
        self.processes[name] = process
        assert process.stdout is not None
        try:
            line = await asyncio.wait_for(process.stdout.readline(), START_S)
        except TimeoutError:
            line = b""
        if not line:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            raise ConfigError("The store's memory server did not start; why is said above.")

    async def _watch(self, name: str, command: list[str]) -> None:
        backoff_s = BACKOFF_FIRST_S
        loop = asyncio.get_running_loop()
        while True:
            started_s = loop.time()
            status = await self.processes[name].wait()
            if loop.time() - started_s > STABLE_S:
                backoff_s = BACKOFF_FIRST_S
            log.warning("the store's memory server ended with %s, starting another", status)
            await asyncio.sleep(backoff_s)
            backoff_s = min(2 * backoff_s, BACKOFF_MAX_S)
            try:
                await self._spawn(name, command)
            except ConfigError as error:
                log.error("%s", error.message)
