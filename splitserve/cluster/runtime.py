"""A whole server in one object: gateway, supervisor and workers, started and stopped in order.

`serve`, `demo` and the tests use this; only they differ in who waits for what.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import uvicorn

from splitserve.api.app import App
from splitserve.api.completions import Completions, ServedModel
from splitserve.api.resolve import unhonoured_defaults
from splitserve.clock import MonotonicClock
from splitserve.cluster.cores import divide_cores
from splitserve.cluster.listening import close_server, http_server, listen, url_of
from splitserve.cluster.rundir import make_run_dir, remove_run_dir
from splitserve.cluster.store_servers import StoreServers
from splitserve.cluster.supervisor import Supervisor
from splitserve.config import Network, ServeConfig
from splitserve.errors import ConfigError
from splitserve.gateway.hub import WorkerHub
from splitserve.gateway.metrics import Metrics
from splitserve.gateway.service import GatewayService
from splitserve.kv.format import KVFormat
from splitserve.model.info import ModelInfo, describe
from splitserve.model.simulated import simulated_format
from splitserve.text.template import ChatTemplate
from splitserve.text.tokenizer import Tokenizer, read_json
from splitserve.transport.segment import available_memory_bytes
from splitserve.wire import Role
from splitserve.worker.spec import ModelSpec, WorkerSpec

log = logging.getLogger(__name__)

# --kv-memory auto: a quarter of what is free for all pools together, and not more than this for
# each, since a pool is filled with pages when its worker starts.
AUTO_SHARE = 4
AUTO_LIMIT_BYTES = 2 << 30


class Runtime:
    """One server. `start` returns when it is ready; `stop` leaves nothing behind."""

    def __init__(
        self,
        config: ServeConfig,
        model_dir: Path,
        model_name: str,
        say: Callable[[str], None] = log.info,
    ) -> None:
        self.config = config
        self.info: ModelInfo = describe(model_dir)
        self._model_dir = model_dir
        self._model_name = model_name
        self._say = say
        self.kv_format = self._kv_format()
        self.num_blocks = self._num_blocks()
        self._token = secrets.token_hex(16)
        self._store_servers = StoreServers()
        self._tiers = config.tiers
        self._run_dir: Path | None = None
        self._server: uvicorn.Server | None = None
        self._serving: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        return url_of(self.config.host, self.port)

    async def start(self) -> None:
        """Listen, load, start workers, serve. On any failure everything is stopped again."""
        self._require_memory()
        listener = listen(self.config.host, self.config.port)
        self.port: int = listener.getsockname()[1]
        try:
            await self._start(listener)
        except BaseException:
            await self.stop(drain_s=0.0)
            listener.close()
            raise

    async def _start(self, listener: socket.socket) -> None:
        clock = MonotonicClock()
        self._run_dir = make_run_dir()
        self.hub = WorkerHub(
            f"ipc://{self._run_dir}/gateway.sock",
            clock,
            self.info.identity,
            self.config.gateway.policy,
        )
        self.hub.start()
        self._tiers = await self._store_servers.start(self.config.tiers)
        self.supervisor = Supervisor(
            ModelSpec(
                str(self._model_dir),
                self.config.runner,
                self.config.simulated_step_s,
                self.config.simulated_token_s,
                device=self.config.device,
                dtype=self.config.dtype,
                quantize=self.config.decode_weights == "int8",
            ),
            self._worker_specs(),
            self.hub,
            clock,
            start_s=self.config.gateway.deadlines.start_s,
            hang_s=self.config.hang_s,
            say=self._say,
        )
        metrics = Metrics(self.hub, self.supervisor.num_restarts)
        self.service = GatewayService(self.hub, self.config.gateway, clock, metrics)
        self.app = App(self.service)
        self._server = http_server(self.app)
        self._serving = asyncio.create_task(self._server.serve(sockets=[listener]))
        await self.supervisor.start()
        self.app.serve(Completions(self._served_model(), self.service))

    async def stop(self, drain_s: float | None = None) -> None:
        """Drain within the deadline, then stop gateway, workers and zygote."""
        if drain_s is None:
            drain_s = self.config.gateway.deadlines.drain_s
        if hasattr(self, "service"):
            num_ended = await self.service.drain(drain_s)
            if num_ended:
                self._say(f"{num_ended} answers were not finished in time and got an error")
        if self._server is not None and self._serving is not None:
            await close_server(self._server, self._serving)
        if hasattr(self, "supervisor"):
            await self.supervisor.stop()
        await self._store_servers.stop()
        if hasattr(self, "hub"):
            self.hub.close()
        if self._run_dir is not None:
            remove_run_dir(self._run_dir)

    @property
    def zone_blocks(self) -> int:
        """Staging blocks of a worker that decodes; at least one, if KV is pushed at all."""
        if not self.config.gateway.handoff.is_push:
            return 0
        return max(1, int(self.num_blocks * self.config.zone_fraction))

    def _block_size(self, role: Role) -> int:
        size = self.config.decode_block_size if role is Role.DECODE else None
        return size or self.config.block_size

    def _blocks_of(self, role: Role) -> int:
        """As many tokens for each role, whatever its block size."""
        return max(2, self.num_blocks * self.config.block_size // self._block_size(role))

    def describe_plan(self) -> list[str]:
        """What will run where, and how much KV each worker holds, for a person to read."""
        lines = []
        for spec in self._worker_specs():
            cores = ",".join(map(str, spec.cores))
            num_tokens = self.num_blocks * self.config.block_size
            typical = min(1024, self.info.max_model_len)
            on = "" if self.config.device == "cpu" else f" on {self.config.device}"
            lines.append(
                f"{spec.worker_id}: cores {cores}, {spec.num_threads} thread(s), "
                f"{spec.weights}{on}, KV pool {num_tokens} tokens "
                f"({self.num_blocks * self.kv_format.block_bytes / 2**20:.0f} MiB): "
                f"{min(self.config.max_sequences, num_tokens // typical)} sequences of "
                f"{typical:,} tokens"
            )
        for tier in self.config.tiers:
            limit = f", up to {tier.limit_bytes >> 20} MiB" if tier.limit_bytes else ""
            lines.append(f"store: {tier.name}:{tier.place}{limit}, {tier.policy.value}")
        pool_tokens = self.num_blocks * self.config.block_size
        if pool_tokens < self.info.max_model_len:
            lines.append(
                f"a pool holds {pool_tokens} tokens, less than the model's context of "
                f"{self.info.max_model_len}: longer requests are refused (--kv-memory)"
            )
        return lines

    # --- inside

    def _kv_format(self) -> KVFormat:
        if self.config.runner == "simulated":
            return simulated_format(self.config.block_size)
        return self.info.kv_format(self.config.block_size, self.config.dtype)

    def _num_blocks(self) -> int:
        """Blocks per worker: what the memory holds, but no more than all sequences could fill."""
        memory = self.config.kv_memory_bytes
        if memory is None:
            share = available_memory_bytes() // (AUTO_SHARE * len(self.config.roles))
            memory = min(AUTO_LIMIT_BYTES, share)
        fitting = memory // self.kv_format.block_bytes
        usable = -(-self.info.max_model_len // self.config.block_size) * self.config.max_sequences
        num_blocks = min(fitting, usable)
        if num_blocks < 2:
            raise ConfigError(
                f"--kv-memory holds {fitting} blocks of {self.kv_format.block_bytes} bytes; "
                "at least 2 are needed."
            )
        return num_blocks

    def _require_memory(self) -> None:
        """Refuse pools that can't be had before anything is loaded."""
        num_zones = sum(role is not Role.PREFILL for _, role in self.config.roles)
        num_blocks = self.num_blocks * len(self.config.roles) + self.zone_blocks * num_zones
        needed = num_blocks * self.kv_format.block_bytes
        available = available_memory_bytes()
        if needed > available:
            raise ConfigError(
                f"{len(self.config.roles)} KV pools need {needed >> 20} MiB; "
                f"{available >> 20} MiB are available.",
                advice="Lower --kv-memory or the number of workers.",
            )

    def _worker_specs(self) -> list[WorkerSpec]:
        config = self.config
        shares = divide_cores(len(config.roles))
        networks = {one.worker_id: one for one in config.networks}
        nowhere = Network("", "")
        return [
            WorkerSpec(
                worker_id=worker_id,
                epoch="",
                role=role,
                gateway=f"ipc://{self._run_dir}/gateway.sock",
                cores=share.cores,
                num_threads=share.num_threads,
                num_blocks=self._blocks_of(role),
                block_size=self._block_size(role),
                exact=config.exact,
                chunked_prefill=config.chunked_prefill,
                prefix_cache=config.prefix_cache,
                max_batched_tokens=config.max_batched_tokens,
                max_sequences=config.max_sequences,
                lease_term_s=config.lease_term_s,
                digests=config.digests,
                transport=config.transport,
                tiers=self._tiers,
                by_store=config.connector.by_store,
                token=self._token,
                host=networks.get(worker_id, nowhere).host,
                netns=networks.get(worker_id, nowhere).netns,
                zone_blocks=0 if role is Role.PREFILL else self.zone_blocks,
                faults=config.faults,
                weights=_weights(config, role),
            )
            for (worker_id, role), share in zip(config.roles, shares, strict=True)
        ]

    def _served_model(self) -> ServedModel:
        pool_tokens = self.num_blocks * self.config.block_size
        defaults = msgspec.structs.asdict(self.info.defaults)
        written = read_json(self._model_dir / "generation_config.json")
        for setting in unhonoured_defaults(written):
            self._say(f"not honoured: {setting} of the model's generation_config.json")
        return ServedModel(
            names=(self._model_name,),
            created=int(time.time()),
            tokenizer=Tokenizer.load(self._model_dir),
            template=ChatTemplate.load(self._model_dir),
            generation_defaults={name: x for name, x in defaults.items() if x is not None},
            eos_ids=self.info.eos_ids,
            vocab_size=self.info.vocab_size,
            max_model_len=min(self.info.max_model_len, pool_tokens),
        )


def _weights(config: ServeConfig, role: Role) -> str:
    is_int8 = config.decode_weights == "int8" and role is Role.DECODE
    return "int8" if is_int8 else config.dtype
