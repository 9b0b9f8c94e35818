"""`splitserve serve`: run a server until Ctrl-C or SIGTERM."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer
import uvloop
from rich.console import Console

from splitserve.cluster.adopting import AdoptingRuntime
from splitserve.cluster.runtime import Runtime
from splitserve.config import (
    AdoptConfig,
    ConnectorKind,
    Deadlines,
    GatewayConfig,
    Handoff,
    ServeConfig,
    SplitMode,
    parse_bytes,
)
from splitserve.errors import ConfigError, SplitserveError
from splitserve.model.device import require_device
from splitserve.model.fetch import ResolvedModel, resolve_model
from splitserve.store.registry import parse_tier
from splitserve.transport.registry import TRANSPORTS
from splitserve.wire import Role

console = Console(highlight=False, soft_wrap=True)


def serve(
    context: typer.Context,
    model: Annotated[
        str | None,
        typer.Argument(help="Alias, directory, GGUF file or hub id; default: see `model list`."),
    ] = None,
    prefill: Annotated[
        int, typer.Option(min=0, help="Prefill workers; with no workers named, 1 and 1 decode.")
    ] = 0,
    decode: Annotated[int, typer.Option(min=0, help="Decode workers.")] = 0,
    mixed: Annotated[int, typer.Option(min=0, help="Workers that do both.")] = 0,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one.")] = 8000,
    split: Annotated[
        SplitMode, typer.Option(help="auto: prompts of up to 32 tokens stay on a decode worker.")
    ] = SplitMode.AUTO,
    handoff: Annotated[
        str,
        typer.Option(
            help="When KV moves: request-pull (after prefill); chunk-pull, chunk-push, layer-push "
            "(while it goes on; push writes to a landing zone of a quarter of the pool); auto: of "
            "the first two, what is predicted to delay the second token less."
        ),
    ] = "auto",
    exact: Annotated[
        bool, typer.Option("--exact", help="Same answer, bit for bit, however work is divided.")
    ] = False,
    chunked_prefill: Annotated[
        bool, typer.Option(help="Cut prompts to fit beside decodes; else prompts go first, whole.")
    ] = True,
    prefix_cache: Annotated[bool, typer.Option(help="Reuse KV of equal prefixes.")] = True,
    device: Annotated[
        str, typer.Option(help="cpu, cuda or mps (the last two: never run on one).")
    ] = "cpu",
    dtype: Annotated[
        str,
        typer.Option(
            help="float32, bfloat16 or float16: of weights, arithmetic and KV. On a CPU without "
            "instructions for the last two, such as AVX2, they take 2 to 9 times as long."
        ),
    ] = "float32",
    decode_weights: Annotated[
        str, typer.Option(help="float32, or int8: decode workers read a quarter; not exact.")
    ] = "float32",
    kv_memory: Annotated[
        str, typer.Option(help="KV pool of each worker, a size or auto: a share of what is free.")
    ] = "auto",
    max_batched_tokens: Annotated[int, typer.Option(min=1, help="Tokens per step.")] = 256,
    max_sequences: Annotated[int, typer.Option(min=1, help="Sequences per step.")] = 64,
    max_inflight: Annotated[int, typer.Option(min=1, help="Answers computed at once.")] = 256,
    transport: Annotated[
        str, typer.Option(help="How KV moves: " + ", ".join(TRANSPORTS) + ".")
    ] = "shm",
    connector: Annotated[
        str,
        typer.Option(
            help="Where KV goes: p2p (from pool to pool), shared_storage or store (through it "
            "alone), multi (from pool to pool, and kept in a store). Default: p2p, or multi with "
            "--store."
        ),
    ] = "",
    store: Annotated[
        list[str] | None,
        typer.Option(
            help="A tier of the store, the fastest first, may be repeated: memory:?limit=1G, "
            "disk:DIR?limit=10G, shared_storage:DIR, redis://HOST:PORT; see docs/store.md."
        ),
    ] = None,
    policy: Annotated[
        str,
        typer.Option(
            help="Who takes a request: cost (predicted seconds), least_loaded, prefix_aware, "
            "round_robin, or module:Class; see docs/routing.md."
        ),
    ] = "cost",
    fetch_prefix: Annotated[
        bool, typer.Option(help="Fetch prefixes that other workers have, if that is faster.")
    ] = True,
    decode_block_size: Annotated[
        int, typer.Option(min=0, help="Tokens per KV block of decode workers, 0: as others.")
    ] = 0,
    digests: Annotated[
        str, typer.Option(help="Proof of a transfer: full (every block's digest) or lease.")
    ] = "full",
    deadline: Annotated[
        list[str] | None,
        typer.Option(help="name=SECONDS, may be repeated; see docs/reference/deadlines.md."),
    ] = None,
    adopt_prefill: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URL",
            help="A running vLLM server that prefills, may be repeated; without MODEL and workers "
            "of our own. See docs/engines.md.",
        ),
    ] = None,
    adopt_decode: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="One that decodes, or answers whole.")
    ] = None,
    adopt_mixed: Annotated[
        list[str] | None, typer.Option(metavar="URL", help="One that does both.")
    ] = None,
    adopt_key_file: Annotated[
        Path | None, typer.Option(help="File that holds the API key of the adopted servers.")
    ] = None,
    adopt_lease: Annotated[
        float, typer.Option(min=1, help="Their kv_lease_duration, in seconds.")
    ] = 30.0,
    faults: Annotated[str, typer.Option(hidden=True, help="See splitserve/faults.py.")] = "",
    runner: Annotated[str, typer.Option(hidden=True, help="native or simulated.")] = "native",
) -> None:
    """Serve MODEL, or adopted servers, through an OpenAI-compatible endpoint until Ctrl-C."""
    logging.basicConfig(level="WARNING", format="%(asctime)s %(name)s %(levelname)s %(message)s")
    try:
        adopted = (
            *((Role.PREFILL, url) for url in adopt_prefill or []),
            *((Role.DECODE, url) for url in adopt_decode or []),
            *((Role.MIXED, url) for url in adopt_mixed or []),
        )
        if adopted:
            require_adoptable(context)
            adopting = AdoptConfig(
                servers=adopted,
                host=host,
                port=port,
                kv_lease_s=adopt_lease,
                gateway=GatewayConfig(
                    split=split,
                    policy=policy,
                    max_inflight=max_inflight,
                    deadlines=Deadlines().with_overrides(deadline or []),
                ),
            )
            sys.exit(uvloop.run(_serve_adopted(adopting, read_key(adopt_key_file))))
        if not (prefill or decode or mixed):
            prefill = decode = 1
        tiers = tuple(parse_tier(text) for text in store or [])
        config = ServeConfig(
            num_prefill=prefill,
            num_decode=decode,
            num_mixed=mixed,
            host=host,
            port=port,
            exact=exact,
            chunked_prefill=chunked_prefill,
            prefix_cache=prefix_cache,
            device=device,
            dtype=dtype,
            decode_weights=decode_weights,
            kv_memory_bytes=parse_bytes(kv_memory),
            max_batched_tokens=max_batched_tokens,
            max_sequences=max_sequences,
            digests=digests,
            transport=transport,
            connector=ConnectorKind.parse(connector, tiers),
            tiers=tiers,
            decode_block_size=decode_block_size or None,
            faults=faults,
            runner=runner,
            gateway=GatewayConfig(
                split=split,
                handoff=Handoff.parse(handoff),
                policy=policy,
                hints=fetch_prefix,
                max_inflight=max_inflight,
                deadlines=Deadlines().with_overrides(deadline or []),
            ),
        )
        require_device(device)
        resolved = resolve_model(model, console.print)
        sys.exit(uvloop.run(_serve(config, resolved)))
    except SplitserveError as error:
        fail(error)


def fail(error: SplitserveError) -> None:
    """One line and exit 1; no traceback for what the user can mend."""
    message = f"{error.message} {error.advice}".strip()
    print(f"splitserve: {message}", file=sys.stderr)
    sys.exit(2 if isinstance(error, ConfigError) else 1)


_WITH_ADOPTED = frozenset(
    ["host", "port", "split", "policy", "max_inflight", "deadline", "adopt_key_file", "adopt_lease"]
)


def require_adoptable(context: typer.Context) -> None:
    """Raise ConfigError for options that adopted servers have already decided for themselves."""
    for param in context.command.params:
        name = param.name or ""
        source = context.get_parameter_source(name)
        is_given = source is not None and source.name == "COMMANDLINE"
        if is_given and name not in _WITH_ADOPTED and not name.startswith("adopt_"):
            shown = "MODEL" if name == "model" else param.opts[0]
            raise ConfigError(
                f"{shown} is for workers of our own, not for adopted servers.",
                advice="Leave it out.",
            )


def read_key(path: Path | None) -> str | None:
    """The API key in a file; raise ConfigError."""
    if path is None:
        return None
    try:
        key = path.read_text().strip()
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"The key file {path} can't be read: {error}.") from None
    if not key or not key.isprintable() or not key.isascii():
        raise ConfigError(f"The key file {path} must hold one line of printable ASCII.")
    return key


async def _serve(config: ServeConfig, resolved: ResolvedModel) -> int:
    runtime = Runtime(config, resolved.path, resolved.name, console.print)
    console.print(f"model {resolved.name} ({resolved.source})")
    return await _run(runtime, config.gateway.deadlines.drain_s)


async def _serve_adopted(config: AdoptConfig, key: str | None) -> int:
    return await _run(AdoptingRuntime(config, key, console.print), config.gateway.deadlines.drain_s)


async def _run(runtime: Runtime | AdoptingRuntime, drain_s: float) -> int:
    stop, stop_now = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def on_signal(signum: signal.Signals) -> None:
        if stop.is_set():
            stop_now.set()
        elif starting.done():
            console.print(f"{signum.name}: draining; once more to stop now")
        stop.set()

    for signum in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(signum, on_signal, signum)
    for line in runtime.describe_plan():
        console.print(f"  {line}")
    starting = asyncio.create_task(runtime.start())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        return 0
    starting.result()
    console.print(f"ready: {runtime.url}/v1")
    await stopping
    draining = asyncio.create_task(runtime.service.drain(drain_s))
    hurrying = asyncio.create_task(stop_now.wait())
    await asyncio.wait([draining, hurrying], return_when=asyncio.FIRST_COMPLETED)
    if draining.done() and draining.result():
        console.print(f"{draining.result()} answers were not finished in time and got an error")
    draining.cancel()
    await runtime.stop(drain_s=0.0)
    console.print("stopped")
    return 0
