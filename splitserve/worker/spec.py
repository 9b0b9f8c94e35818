"""What a worker process is told at its start: data only, sent to the zygote that forks it."""

from __future__ import annotations

import msgspec

from splitserve.store.registry import TierSpec
from splitserve.wire import Role


class WorkerSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One worker epoch. A restart gets the same worker_id and a new epoch."""

    worker_id: str
    epoch: str
    role: Role
    gateway: str  # ZeroMQ endpoint of the gateway's ROUTER
    cores: tuple[int, ...]  # CPU affinity; empty: any core
    num_threads: int
    num_blocks: int
    zone_blocks: int = 0  # staging that it lends to writers, beside its pool
    block_size: int = 16
    exact: bool = False
    chunked_prefill: bool = True
    prefix_cache: bool = True
    max_batched_tokens: int = 256
    max_sequences: int = 64
    max_model_len: int = 0  # 0: the model's own
    lease_term_s: float = 30.0
    digests: str = "full"
    transport: str = "shm"
    tiers: tuple[TierSpec, ...] = ()  # of the cluster's store, if it has one
    by_store: bool = False  # KV is handed over through it
    host: str = ""  # where peers reach its KV by the network; empty: they are on this host
    netns: str = ""  # path of the network namespace it moves into, before it opens a socket
    token: str = ""  # the cluster's: peers prove to have it
    faults: str = ""
    weights: str = "float32"  # the model's dtype, or int8: of linear layers, in steps of few rows


class ModelSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the zygote loads before it forks.

    runner: `native`, or `simulated` (no torch; each step lasts the two given times).
    """

    path: str
    runner: str = "native"
    step_s: float = 0.0
    token_s: float = 0.0
    device: str = "cpu"  # where workers compute; the zygote loads on the CPU
    dtype: str = "float32"
    quantize: bool = False  # make int8 weights too, for the workers that want them


class Preloaded(msgspec.Struct, frozen=True, tag="preloaded"):
    """Zygote to supervisor: forks are cheap from now on."""

    seconds: float


class PreloadFailed(msgspec.Struct, frozen=True, tag="preload_failed"):
    """Zygote to supervisor, before it exits: the model can't be served, and why."""

    code: str
    message: str


class Spawned(msgspec.Struct, frozen=True, tag="spawned"):
    """Zygote to supervisor: the worker runs as this process."""

    worker_id: str
    epoch: str
    pid: int


class Exited(msgspec.Struct, frozen=True, tag="exited"):
    """Zygote to supervisor: a process is gone. status: exit code, or minus the signal."""

    worker_id: str
    epoch: str
    pid: int
    status: int


FromZygote = Preloaded | PreloadFailed | Spawned | Exited
