"""Settings of `splitserve serve`: frozen, resolved once, strict about what they do not know."""

from __future__ import annotations

import enum

import msgspec

from splitserve.errors import ConfigError
from splitserve.faults import Faults
from splitserve.kv.format import DTYPE_BYTES
from splitserve.sizes import parse_size
from splitserve.store.registry import TierSpec
from splitserve.transport.registry import TRANSPORTS
from splitserve.wire import Role

DEVICES = ("cpu", "cuda", "mps")
MAX_WORKERS = 64  # of one supervisor, on one host


class SplitMode(enum.StrEnum):
    """Whether prefill and decode of a request go to separate workers."""

    AUTO = "auto"
    ALWAYS = "always"
    NEVER = "never"


class Handoff(enum.StrEnum):
    """How much KV moves at a time, and who moves it (design §4)."""

    AUTO = "auto"
    REQUEST_PULL = "request-pull"
    CHUNK_PULL = "chunk-pull"
    CHUNK_PUSH = "chunk-push"
    LAYER_PUSH = "layer-push"

    @property
    def is_push(self) -> bool:
        """Whether decode workers lend landing zones, and prefill workers write."""
        return self in (Handoff.CHUNK_PUSH, Handoff.LAYER_PUSH)

    @classmethod
    def parse(cls, text: str) -> Handoff:
        """By its name; raise ConfigError that says why a pair is none, or what is known."""
        if text in list(cls):
            return cls(text)
        known = ", ".join(cls)
        grain, _, direction = text.partition("-")
        if grain in ("request", "chunk", "layer") and direction in ("pull", "push"):
            raise ConfigError(
                f"KV can't be handed over by {text}: {_INVALID_HANDOFFS[text]}.",
                advice=f"Choose one of {known}.",
            )
        raise ConfigError(f"Unknown handoff {text!r}; known: {known}.")


class ConnectorKind(enum.StrEnum):
    """Where KV goes between workers (design §4)."""

    P2P = "p2p"  # from pool to pool
    SHARED_STORAGE = "shared_storage"  # by files that all workers see
    STORE = "store"  # by a store of one or more tiers
    MULTI = "multi"  # from pool to pool; what is computed is also kept in a store

    @property
    def has_store(self) -> bool:
        return self is not ConnectorKind.P2P

    @property
    def by_store(self) -> bool:
        """Handoffs go through the store alone."""
        return self in (ConnectorKind.STORE, ConnectorKind.SHARED_STORAGE)

    @classmethod
    def parse(cls, text: str, tiers: tuple[TierSpec, ...]) -> ConnectorKind:
        """By its name; empty: p2p, or multi where there are tiers."""
        if not text:
            return cls.MULTI if tiers else cls.P2P
        if text not in list(cls):
            raise ConfigError(f"Unknown connector {text!r}; known: {', '.join(cls)}.")
        return cls(text)


_INVALID_HANDOFFS = {
    "request-push": "who decodes is chosen after prefill, so there is nobody to push to before",
    "layer-pull": "asking for each layer costs a round trip per layer and step",
}


class Deadlines(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How long each phase may last, in seconds (design §6)."""

    admit_s: float = 10.0
    prefill_queue_s: float = 30.0
    transfer_s: float = 5.0  # at least; 10 x predicted if that is more
    first_token_s: float = 60.0
    token_gap_s: float = 30.0
    total_s: float = 600.0
    drain_s: float = 30.0
    start_s: float = 120.0
    slow_client_s: float = 30.0
    body_s: float = 30.0
    connect_s: float = 2.0

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            if not getattr(self, name) > 0:
                raise ConfigError(f"Deadline {name} must be positive.")

    def with_overrides(self, settings: list[str]) -> Deadlines:
        """`name=seconds` settings, without the _s of the name."""
        values = msgspec.structs.asdict(self)
        for setting in settings:
            name, _, seconds = setting.partition("=")
            if f"{name}_s" not in values:
                known = ", ".join(key.removesuffix("_s") for key in values)
                raise ConfigError(f"Unknown deadline {name!r}; known: {known}.")
            try:
                values[f"{name}_s"] = float(seconds)
            except ValueError:
                raise ConfigError(f"Deadline {setting!r}: expected {name}=SECONDS.") from None
        return Deadlines(**values)


class GatewayConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the gateway treats requests.

    local_prefill_tokens: with split `auto`, prompts up to so many tokens are prefilled on the
    decode worker: a handoff costs more than they do.
    policy: of routing, by name or as module:Class.
    hints: tell a worker that lacks a prefix which other has it.
    retries: how often one request may be started again after losing a worker or a transfer.
    """

    split: SplitMode = SplitMode.AUTO
    handoff: Handoff = Handoff.AUTO
    local_prefill_tokens: int = 32
    policy: str = "cost"
    hints: bool = True
    max_inflight: int = 256
    retries: int = 3
    max_body_bytes: int = 8 << 20
    deadlines: Deadlines = Deadlines()


class AdoptConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What `serve --adopt-…` was asked for.

    servers: (role, URL) of each. kv_lease_s: the servers' kv_lease_duration.
    """

    servers: tuple[tuple[Role, str], ...]
    host: str = "127.0.0.1"
    port: int = 8000
    kv_lease_s: float = 30.0
    gateway: GatewayConfig = GatewayConfig()

    def __post_init__(self) -> None:
        roles = {role for role, _ in self.servers}
        if not roles & {Role.DECODE, Role.MIXED}:
            raise ConfigError(
                "Nobody decodes.", advice="Give --adopt-decode or --adopt-mixed, once or more."
            )
        if self.gateway.split is SplitMode.ALWAYS and not {Role.PREFILL, Role.DECODE} <= roles:
            raise ConfigError("With split=always there must be prefill and decode servers.")
        if not self.kv_lease_s > 0:
            raise ConfigError("The lease of the servers' KV must be positive.")


class Network(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Where a worker's peers reach it, other than by this host's memory.

    host: an address of its own to listen on. netns: path of a network namespace to live in.
    """

    worker_id: str
    host: str
    netns: str = ""


class ServeConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that `serve` was asked for."""

    num_prefill: int = 0
    num_decode: int = 0
    num_mixed: int = 0
    host: str = "127.0.0.1"
    port: int = 8000
    exact: bool = False
    chunked_prefill: bool = True
    prefix_cache: bool = True
    device: str = "cpu"  # or cuda, mps
    dtype: str = "float32"  # or bfloat16, float16: of weights, arithmetic and KV
    decode_weights: str = "float32"  # or int8, for decode workers only
    kv_memory_bytes: int | None = 1 << 30  # per worker; None: a share of what is free
    block_size: int = 16
    max_batched_tokens: int = 256
    max_sequences: int = 64
    zone_fraction: float = 0.25  # with push, memory of decode workers beside their pool
    lease_term_s: float = 30.0
    digests: str = "full"
    transport: str = "shm"
    connector: ConnectorKind = ConnectorKind.P2P
    tiers: tuple[TierSpec, ...] = ()  # of the store, the fastest first
    decode_block_size: int | None = None  # another than the prefill workers' is converted to
    networks: tuple[Network, ...] = ()  # of workers that have one
    faults: str = ""
    runner: str = "native"
    simulated_step_s: float = 0.0
    simulated_token_s: float = 0.0
    hang_s: float = 120.0  # a worker whose engine loop is silent for so long is killed
    gateway: GatewayConfig = GatewayConfig()

    def __post_init__(self) -> None:
        numbers = self.num_prefill, self.num_decode, self.num_mixed
        if min(numbers) < 0:
            raise ConfigError("Numbers of workers can't be negative.")
        if sum(numbers) > MAX_WORKERS:
            raise ConfigError(f"{sum(numbers)} workers are more than {MAX_WORKERS}, the limit.")
        if not self.roles:
            raise ConfigError("No workers: give --prefill and --decode, or --mixed.")
        if bool(self.num_prefill) != bool(self.num_decode) and not self.num_mixed:
            raise ConfigError(
                "Prefill workers need decode workers and the other way round.",
                advice="Give both --prefill and --decode, or --mixed.",
            )
        require_computable(self.device, self.dtype, self.exact)
        if self.decode_weights not in ("float32", "int8"):
            raise ConfigError(f"Decode weights are float32 or int8, not {self.decode_weights!r}.")
        if self.decode_weights == "int8" and self.exact:
            raise ConfigError(
                "Exact mode and int8 weights exclude each other.",
                advice="Decode workers would compute other numbers than prefill workers.",
            )
        if self.decode_weights == "int8" and not is_kernels(self.device, self.dtype):
            raise ConfigError(
                f"int8 weights are for float32 on the CPU, not for {self.dtype} on {self.device}."
            )
        if self.decode_weights == "int8" and not self.num_decode:
            raise ConfigError("int8 weights are for decode workers; there are none.")
        if self.gateway.split is SplitMode.ALWAYS and not self.num_prefill:
            raise ConfigError(
                "With split=always there must be prefill and decode workers.",
                advice="Give --prefill and --decode, or another --split.",
            )
        if self.digests not in ("full", "lease"):
            raise ConfigError(f"digests is `full` or `lease`, not {self.digests!r}.")
        if self.transport not in TRANSPORTS:
            raise ConfigError(
                f"Unknown transport {self.transport!r}; known: {', '.join(TRANSPORTS)}."
            )
        if self.gateway.handoff.is_push and self.digests != "full":
            raise ConfigError(
                f"A handoff by {self.gateway.handoff.value} needs digests=full.",
                advice="Bytes of a writer that died may arrive late: only digests show that.",
            )
        if self.gateway.handoff is Handoff.LAYER_PUSH and self.device != "cpu":
            raise ConfigError("layer-push is for the CPU: elsewhere KV leaves the device by parts.")
        if not 0 < self.zone_fraction <= 1:
            raise ConfigError("The landing zone is a share of the pool, above 0 and up to 1.")
        unknown = {one.worker_id for one in self.networks} - {name for name, _ in self.roles}
        if unknown:
            raise ConfigError(f"No worker is called {', '.join(sorted(unknown))}.")
        if self.networks and self.transport == "shm":
            raise ConfigError("Workers with networks of their own need another transport than shm.")
        Faults(self.faults)  # an error now, rather than in each worker
        require_connectable(self.connector, self.tiers, self.gateway.handoff)
        sizes = self.block_size, self.decode_block_size or self.block_size
        if min(sizes) < 16 or sizes[0] % 16 or sizes[1] % 16:
            raise ConfigError("The block size is a multiple of 16 tokens, the granule.")
        if max(sizes) % min(sizes):
            raise ConfigError(
                f"KV blocks of {sizes[0]} and {sizes[1]} tokens can't be converted.",
                advice="One size has to be a multiple of the other.",
            )
        if sizes[0] != sizes[1] and (self.connector.has_store or self.gateway.handoff.is_push):
            raise ConfigError(
                f"Blocks of {sizes[0]} and {sizes[1]} tokens are converted where they are read "
                "from pool to pool, not in a store or a landing zone.",
            )
        if not 1 <= self.max_sequences <= self.max_batched_tokens:
            raise ConfigError("1 <= max sequences <= max batched tokens must hold.")

    @property
    def roles(self) -> list[tuple[str, Role]]:
        """(worker id, role) of each worker."""
        counts = (
            (Role.PREFILL, self.num_prefill),
            (Role.DECODE, self.num_decode),
            (Role.MIXED, self.num_mixed),
        )
        return [(f"{role.value}-{i}", role) for role, num in counts for i in range(num)]


def require_connectable(
    connector: ConnectorKind, tiers: tuple[TierSpec, ...], handoff: Handoff
) -> None:
    """Raise ConfigError if the connector lacks tiers, has too many, or can't hand over so."""
    if connector.has_store and not tiers:
        raise ConfigError(
            f"Connector {connector.value} needs a place to keep KV.",
            advice="Give --store, for example disk:/var/kv?limit=10G.",
        )
    if tiers and not connector.has_store:
        raise ConfigError(
            "Connector p2p has no store.", advice="Leave out --store, or --connector."
        )
    if connector is ConnectorKind.SHARED_STORAGE and [x.name for x in tiers] != ["shared_storage"]:
        raise ConfigError(
            "Connector shared_storage has one place: --store shared_storage:DIRECTORY.",
            advice="Connector store takes any tiers.",
        )
    if connector.by_store and handoff.is_push:
        raise ConfigError(
            f"KV can't be handed over by {handoff.value} through a store: the source writes to the "
            "store in any case, and the reader has no landing to write to.",
            advice="Choose auto, request-pull or chunk-pull.",
        )


def is_kernels(device: str, dtype: str) -> bool:
    """Whether our own kernels compute; torch does on other devices and in other dtypes."""
    return (device, dtype) == ("cpu", "float32")


def require_computable(device: str, dtype: str, exact: bool) -> None:
    """Raise ConfigError if there is no such device or dtype, or no exact mode with them."""
    if device not in DEVICES:
        raise ConfigError(f"The device is one of {', '.join(DEVICES)}, not {device!r}.")
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"The dtype is one of {', '.join(DTYPE_BYTES)}, not {dtype!r}.")
    if exact and not is_kernels(device, dtype):
        raise ConfigError(
            f"Exact mode is for float32 on the CPU, not for {dtype} on {device}.",
            advice="torch promises no order of its sums.",
        )


def parse_bytes(text: str) -> int | None:
    """`512M`, `2G`, `1073741824`: a size in bytes, suffixes in powers of 1024; `auto` is None."""
    if text.strip().lower() == "auto":
        return None
    return parse_size(text, "512M, 2G, auto")
