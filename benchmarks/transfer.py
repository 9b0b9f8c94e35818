"""What each transport makes of this host's memory and sockets: KV between two processes.

1,000 tokens of the default model's format, from a peer process's segment into ours, as pieces of a
whole block and of one layer of a block. Beside them the ceilings: one memcpy of as many bytes
between two segments, and one plain socket on loopback (sendall there, recv_into here). Beside nixl
and mooncake the same pieces by the library's own calls, post and wait, without splitserve: NIXL's
GET by the reader, its PUT by the owner when asked by one byte (what transport nixl does, decision
0014), Mooncake's batch_transfer_sync_read. `nixl` has UCX choose (without CMA, which only the raw
GET may use here), `nixl-tcp` has UCX_TLS=tcp.

All take turns, REPEATS times. Each figure is the median of a work's turns; each ratio is of medians
of this run. What can't be imported is left out by name. The last line is JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from splitserve.errors import ConfigError
from splitserve.kv.format import KVFormat
from splitserve.transport.base import Link
from splitserve.transport.registry import TRANSPORTS, is_installed, make_transport
from splitserve.transport.segment import Segment

FORMAT = KVFormat("float32", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
NUM_TOKENS = 1000
NUM_BLOCKS = -(-NUM_TOKENS // FORMAT.block_size)
NUM_BYTES = NUM_BLOCKS * FORMAT.block_bytes
SIZES = {"block": FORMAT.block_bytes, "layer": FORMAT.block_bytes // FORMAT.num_layers}
FLOORS = {"shm": ("memcpy", 0.9), "tcp": ("socket", 0.8)}
RAW = {
    "nixl": "nixl raw PUT",
    "nixl-tcp": "nixl-tcp raw PUT",
    "mooncake": "mooncake raw",
}
"""The library's own calls that a transport is compared with: at most MAX_OVERHEAD more time."""
MAX_OVERHEAD = 0.05
MIN_TCP_OF_NIXL_TCP = 2.0
NIXL_TLS = "^cma"
"""As transport nixl has it, unless UCX_TLS is set."""
REPEATS = 31


def offsets_of(size: int) -> list[int]:
    """Of all pieces, in an order that both processes know."""
    return [i * size for i in np.random.default_rng(1).permutation(NUM_BYTES // size).tolist()]


def peer(name: str, control_fd: int) -> None:
    """The other process: exports a segment by transport `name`, or sends it when asked."""
    control = socket.socket(fileno=control_fd)
    segment = Segment.create(NUM_BLOCKS, FORMAT.block_bytes)
    segment.blocks[:] = np.random.default_rng(0).integers(0, 256, segment.blocks.shape, np.uint8)
    if name == "socket":
        with socket.create_server(("127.0.0.1", 0)) as listener:
            control.send(str(listener.getsockname()[1]).encode())
            connection, _ = listener.accept()
        while connection.recv(1):
            connection.sendall(segment.blocks.data)
        return
    if name == "raw-nixl":
        serve_nixl(segment, control)
        return
    if name == "raw-mooncake":
        engine = make_mooncake_engine(segment)
        where = {"peer": f"127.0.0.1:{engine.get_rpc_port()}", "base": segment.blocks.ctypes.data}
        control.send(json.dumps(where).encode())
        control.recv(1)
        return
    transport = make_transport(name, segment)
    export = transport.export()
    socket.send_fds(control, [export.card or b"-"], export.descriptors())
    control.recv(1)
    transport.close()


def make_nixl_agent(
    segment: Segment, *, serving: bool = False, tls: str = ""
) -> tuple[Any, list[Any]]:
    from nixl_cu12 import _bindings as nixl

    config = nixl.nixlAgentConfig()
    config.useProgThread = serving
    config.pthrDelay = 10_000  # us; the default never sleeps
    agent = nixl.nixlAgent(f"bench-{os.getpid()}-{time.monotonic_ns()}", config)
    backends = [agent.createBackend("UCX", {"engine_config": f"TLS={tls}"} if tls else {})]
    region = (segment.blocks.ctypes.data, segment.blocks.nbytes, 0, "")
    agent.registerMem(nixl.nixlRegDList(nixl.DRAM_SEG, [region]), backends)
    return agent, backends


def move_by_nixl(
    agent: Any, backends: list[Any], peer: str, op: str, ours: int, theirs: int, size: int
) -> None:
    """Post all pieces at once, and wait. ours, theirs: the regions' addresses."""
    from nixl_cu12 import _bindings as nixl

    def rows(base: int) -> Any:
        rows = np.full((NUM_BYTES // size, 3), size, np.uint64)
        rows[:, 0] = np.array(offsets_of(size), np.uint64) + np.uint64(base)
        rows[:, 2] = 0
        return nixl.nixlXferDList(nixl.DRAM_SEG, rows)

    operation = getattr(nixl, op)
    handle = agent.createXferReq(operation, rows(ours), rows(theirs), peer, b"", backends)
    agent.postXferReq(handle, b"")
    while agent.getXferStatus(handle) == nixl.NIXL_IN_PROG:
        pass
    agent.releaseXferReq(handle)


def serve_nixl(segment: Segment, control: socket.socket) -> None:
    """Say where our region is; then put it where we are told whenever a byte names the size."""
    getter, _ = make_nixl_agent(segment, serving=True)
    ours = segment.blocks.ctypes.data
    control.send(json.dumps({"base": ours, "metadata": getter.getLocalMD().hex()}).encode())
    told = json.loads(control.recv(1 << 16))
    agent, backends = make_nixl_agent(segment, tls=NIXL_TLS)
    peer = agent.loadRemoteMD(bytes.fromhex(told["metadata"]))
    while which := control.recv(1):
        size = SIZES[{"b": "block", "l": "layer"}[which.decode()]]
        move_by_nixl(agent, backends, peer, "NIXL_WRITE", ours, told["base"], size)
        control.send(b"x")


def nixl_works(
    label: str, target: Segment, stack: contextlib.ExitStack
) -> dict[str, Callable[[], None]]:
    control, said = stack.enter_context(raw_process("raw-nixl"))
    agent, backends = make_nixl_agent(target)
    peer = agent.loadRemoteMD(bytes.fromhex(said["metadata"]))
    taker, taking = make_nixl_agent(target, tls=NIXL_TLS)
    ours = target.blocks.ctypes.data
    control.send(json.dumps({"base": ours, "metadata": taker.getLocalMD().hex()}).encode())

    def get(size: int) -> Callable[[], None]:
        place = said["base"]
        return lambda: move_by_nixl(agent, backends, peer, "NIXL_READ", ours, place, size)

    def put(which: bytes) -> Callable[[], None]:
        poll = select.poll()
        poll.register(control, select.POLLIN)

        def work() -> None:
            control.send(which)
            while not poll.poll(0):
                taker.getNotifs({}, taking)
            control.recv(1)

        return work

    works = {f"{label} raw GET by {pieces}": get(size) for pieces, size in SIZES.items()}
    return works | {f"{label} raw PUT by {pieces}": put(pieces[:1].encode()) for pieces in SIZES}


def make_mooncake_engine(segment: Segment) -> Any:
    from mooncake.engine import TransferEngine

    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    engine = TransferEngine()
    assert engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(segment.blocks.ctypes.data, segment.blocks.nbytes) == 0
    return engine


def mooncake_works(target: Segment, stack: contextlib.ExitStack) -> dict[str, Callable[[], None]]:
    _, said = stack.enter_context(raw_process("raw-mooncake"))
    engine = make_mooncake_engine(target)
    ours = target.blocks.ctypes.data

    def read(size: int) -> Callable[[], None]:
        def work() -> None:
            offsets = offsets_of(size)
            for start in range(0, len(offsets), 256):  # it queues no more than 1024
                some = offsets[start : start + 256]
                here, there = [ours + at for at in some], [said["base"] + at for at in some]
                sizes = [size] * len(some)
                assert engine.batch_transfer_sync_read(said["peer"], here, there, sizes) == 0

        return work

    return {f"mooncake raw by {pieces}": read(size) for pieces, size in SIZES.items()}


@contextlib.contextmanager
def raw_process(name: str) -> Iterator[tuple[socket.socket, dict[str, Any]]]:
    """The connection to a peer that uses a library itself, and what it said of its region."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    command = [sys.executable, __file__, name, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    with ours:
        yield ours, json.loads(ours.recv(1 << 16))
    process.wait(30)


@contextlib.contextmanager
def peer_process(name: str) -> Iterator[tuple[bytes, list[int]]]:
    """What the peer's side channel would have brought: its card and descriptors."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, __file__, name, str(theirs.fileno())]
    process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    theirs.close()
    with ours:
        card, descriptors, _, _ = socket.recv_fds(ours, 1 << 16, 8)
        yield card, descriptors
    process.wait(30)


def over_socket(connection: socket.socket, target: Segment) -> Callable[[], None]:
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def work() -> None:
        connection.send(b"x")
        view = target.blocks.reshape(-1).data
        while view:
            view = view[connection.recv_into(view) :]

    return work


def over_link(link: Link, size: int) -> Callable[[], None]:
    there = offsets_of(size)
    never = threading.Event()

    def work() -> None:
        for _ in link.read(there, there, size, never):
            pass

    return work


def main() -> None:
    target = Segment.create(NUM_BLOCKS, FORMAT.block_bytes)
    local = Segment.create(NUM_BLOCKS, FORMAT.block_bytes)
    local.blocks[:] = np.random.default_rng(0).integers(0, 256, local.blocks.shape, np.uint8)
    works: dict[str, Callable[[], None]] = {
        "memcpy": lambda: np.copyto(target.blocks, local.blocks)
    }
    with contextlib.ExitStack() as stack:
        port, _ = stack.enter_context(peer_process("socket"))
        connection = socket.create_connection(("127.0.0.1", int(port)))
        works["socket"] = over_socket(stack.enter_context(connection), target)
        for name in TRANSPORTS:
            works |= link_works(name, name, target, stack)
        if is_installed("nixl"):
            works |= nixl_works("nixl", target, stack)
            with ucx_over_tcp():
                works |= link_works("nixl-tcp", "nixl", target, stack)
                works |= nixl_works("nixl-tcp", target, stack)
        if is_installed("mooncake"):
            works |= mooncake_works(target, stack)
        for name, work in works.items():
            target.blocks[:] = 0
            work()
            assert np.array_equal(target.blocks, local.blocks), f"{name} moved other bytes"
        report(measure(works))


def link_works(
    label: str, name: str, target: Segment, stack: contextlib.ExitStack
) -> dict[str, Callable[[], None]]:
    try:
        transport = make_transport(name, target)
    except ConfigError as error:
        print(f"{name}: left out. {error} {error.advice}")
        return {}
    stack.callback(transport.close)
    card, descriptors = stack.enter_context(peer_process(name))
    link = transport.open(b"" if card == b"-" else card, descriptors, NUM_BYTES)
    stack.callback(link.close)
    return {f"{label} by {pieces}": over_link(link, size) for pieces, size in SIZES.items()}


@contextlib.contextmanager
def ucx_over_tcp() -> Iterator[None]:
    """For what is made meanwhile, here and in processes started."""
    before = os.environ.get("UCX_TLS")
    os.environ["UCX_TLS"] = "tcp"
    try:
        yield
    finally:
        del os.environ["UCX_TLS"]
        if before is not None:
            os.environ["UCX_TLS"] = before


def measure(works: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Median seconds of each one's turns."""
    turns: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(REPEATS):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            turns[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in turns.items()}


def report(median: dict[str, float]) -> None:
    print(f"{NUM_TOKENS} tokens, {NUM_BYTES / 2**20:.1f} MiB in {NUM_BLOCKS} blocks,", end=" ")
    print(f"by {' and '.join(f'{name} ({size >> 10} KiB)' for name, size in SIZES.items())}")
    print(f"{'':28s}    ms    GB/s  of memcpy  of a plain socket")
    result = {}
    for name, seconds in median.items():
        rate = NUM_BYTES / seconds / 1e9
        ratios = {ceiling: median[ceiling] / seconds for ceiling in ("memcpy", "socket")}
        ceiling, floor = FLOORS.get(name.partition(" ")[0], ("", 0.0))
        note = f"  floor {floor} of {ceiling}" if ceiling else ""
        if ceiling and ratios[ceiling] < floor:
            note += ": MISSED"
        print(f"{name:28s} {seconds * 1e3:7.2f} {rate:5.2f} {ratios['memcpy']:7.2f}", end="")
        print(f" {ratios['socket']:12.2f}    {note}")
        key = name.replace(" ", "_")
        result[f"{key}_gb_per_s"] = round(rate, 2)
        if name not in ("memcpy", "socket") and "raw" not in name:
            result |= {f"{key}_of_{which}": round(ratio, 3) for which, ratio in ratios.items()}
    result |= compare(median)
    print(json.dumps({"benchmark": "transfer", "cores": os.cpu_count(), **result}))


def compare(median: dict[str, float]) -> dict[str, float]:
    """Each library's transport with its own calls, and our tcp with NIXL's."""
    result = {}
    for name, raw in RAW.items():
        for pieces in SIZES:
            if f"{name} by {pieces}" in median:
                overhead = median[f"{name} by {pieces}"] / median[f"{raw} by {pieces}"] - 1
                note = "" if overhead <= MAX_OVERHEAD else ": MISSED"
                print(f"{name} by {pieces}: {overhead:+.1%} of {raw}", end="")
                print(f", goal at most {MAX_OVERHEAD:.0%}{note}")
                result[f"{name}_by_{pieces}_overhead"] = round(overhead, 3)
    for pieces in SIZES:
        for other in ("nixl-tcp", "nixl-tcp raw GET"):
            if f"{other} by {pieces}" in median:
                ratio = median[f"{other} by {pieces}"] / median[f"tcp by {pieces}"]
                note = "" if ratio >= MIN_TCP_OF_NIXL_TCP else ": MISSED"
                print(f"tcp by {pieces}: {ratio:.2f} x as fast as {other}", end="")
                print(f", goal {MIN_TCP_OF_NIXL_TCP:g}{note}")
                result[f"tcp_by_{pieces}_of_{other.replace(' ', '_')}"] = round(ratio, 2)
    return result


if __name__ == "__main__":
    if len(sys.argv) == 3:
        peer(sys.argv[1], int(sys.argv[2]))
    else:
        main()
