"""One adopted server: where it is, what it told when it was last asked, what runs there."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from splitserve.adopted.breaker import Breaker
from splitserve.adopted.client import Pool
from splitserve.wire import Role


class Model(msgspec.Struct, frozen=True):
    """An entry of /v1/models."""

    id: str
    created: int = 0
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    data: list[Model]


@dataclass(frozen=True, slots=True)
class Load:
    """What /metrics tells, over all engines of the server.

    expired: prompts whose KV was freed before it was fetched; late: fetched after that, so perhaps
    from blocks that were given to others; failed: transfers.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    num_blocks: int = 0
    expired: int = 0
    late: int = 0
    failed: int = 0


class AdoptedServer:
    """`is_up` is the poller's verdict; the breaker is that of the requests."""

    def __init__(self, server_id: str, role: Role, pool: Pool) -> None:
        self.server_id = server_id
        self.role = role
        self.pool = pool
        self.breaker = Breaker()
        self.is_up = False
        self.reason = "not asked yet"  # why it is not up
        self.models: tuple[Model, ...] = ()
        self.load = Load()
        self.num_legs = 0
        self.num_foreign = 0  # requests there that are not ours
        self.pending_tokens = 0
        self.num_faults = 0
        self.num_failed_polls = 0


_GAUGES = {
    b"vllm:num_requests_running": "running",
    b"vllm:num_requests_waiting": "waiting",
    b"vllm:kv_cache_usage_perc": "kv_usage",
    b"vllm:nixl_num_kv_expired_reqs_total": "expired",
    b"vllm:nixl_num_notifications_after_expiry_total": "late",
    b"vllm:nixl_num_failed_transfers_total": "failed",
}


def read_load(text: bytes) -> Load:
    """From vLLM's /metrics; what it does not tell is zero."""
    sums = dict.fromkeys(_GAUGES.values(), 0.0)
    num_engines = num_blocks = 0
    for line in text.split(b"\n"):
        if not line.startswith(b"vllm:"):
            continue
        name = line[: line.find(b"{")]
        if name in _GAUGES:
            try:
                sums[_GAUGES[name]] += float(line.rpartition(b" ")[2])
            except ValueError:
                continue
            num_engines += name == b"vllm:kv_cache_usage_perc"
        elif name == b"vllm:cache_config_info":
            number = line.partition(b'num_gpu_blocks="')[2].partition(b'"')[0]
            num_blocks += int(number) if number.isdigit() else 0
    usage = sums.pop("kv_usage") / max(1, num_engines)
    return Load(
        kv_usage=usage, num_blocks=num_blocks, **{name: int(value) for name, value in sums.items()}
    )
