"""What each transport makes of this host's memory and sockets: KV between two processes.

1,000 tokens of the default model's format, from a peer process's segment into ours, as pieces of a
whole block and of one layer of a block. Beside them the ceilings, taken turn by turn with them: one
memcpy of as many bytes between two segments, and one plain socket on loopback (sendall there,
recv_into here). Each figure is the best of REPEATS turns; each ratio is within this run. What can't
be imported is left out by name. The last line is JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np

from splitserve.errors import ConfigError
from splitserve.kv.format import KVFormat
from splitserve.transport.base import Link
from splitserve.transport.registry import TRANSPORTS, make_transport
from splitserve.transport.segment import Segment

FORMAT = KVFormat("float32", block_size=16, num_layers=30, num_kv_heads=3, head_dim=64)
NUM_TOKENS = 1000
NUM_BLOCKS = -(-NUM_TOKENS // FORMAT.block_size)
NUM_BYTES = NUM_BLOCKS * FORMAT.block_bytes
SIZES = {"block": FORMAT.block_bytes, "layer": FORMAT.block_bytes // FORMAT.num_layers}
FLOORS = {"shm": ("memcpy", 0.9), "tcp": ("socket", 0.8)}
REPEATS = 15


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
    transport = make_transport(name, segment)
    export = transport.export()
    socket.send_fds(control, [export.card or b"-"], export.descriptors())
    control.recv(1)
    transport.close()


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
    there = [i * size for i in np.random.default_rng(1).permutation(NUM_BYTES // size).tolist()]
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
            try:
                transport = make_transport(name, target)
            except ConfigError as error:
                print(f"{name}: left out. {error} {error.advice}")
                continue
            stack.callback(transport.close)
            card, descriptors = stack.enter_context(peer_process(name))
            link = transport.open(b"" if card == b"-" else card, descriptors, NUM_BYTES)
            stack.callback(link.close)
            for pieces, size in SIZES.items():
                works[f"{name} by {pieces}"] = over_link(link, size)
        for name, work in works.items():
            target.blocks[:] = 0
            work()
            assert np.array_equal(target.blocks, local.blocks), f"{name} moved other bytes"
        report(measure(works))


def measure(works: dict[str, Callable[[], None]]) -> dict[str, float]:
    """Seconds of each one's fastest turn."""
    best = dict.fromkeys(works, float("inf"))
    for _ in range(REPEATS):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def report(best: dict[str, float]) -> None:
    print(f"{NUM_TOKENS} tokens, {NUM_BYTES / 2**20:.1f} MiB in {NUM_BLOCKS} blocks,", end=" ")
    print(f"by {' and '.join(f'{name} ({size >> 10} KiB)' for name, size in SIZES.items())}")
    print(f"{'':18s}    ms    GB/s  of memcpy  of a plain socket")
    result = {}
    for name, seconds in best.items():
        rate = NUM_BYTES / seconds / 1e9
        ratios = {ceiling: best[ceiling] / seconds for ceiling in ("memcpy", "socket")}
        ceiling, floor = FLOORS.get(name.partition(" ")[0], ("", 0.0))
        note = f"  floor {floor} of {ceiling}" if ceiling else ""
        if ceiling and ratios[ceiling] < floor:
            note += ": MISSED"
        print(f"{name:18s} {seconds * 1e3:7.2f} {rate:5.2f} {ratios['memcpy']:7.2f}", end="")
        print(f" {ratios['socket']:12.2f}    {note}")
        key = name.replace(" ", "_")
        result[f"{key}_gb_per_s"] = round(rate, 2)
        if name not in ("memcpy", "socket"):
            result |= {f"{key}_of_{which}": round(ratio, 3) for which, ratio in ratios.items()}
    print(json.dumps({"benchmark": "transfer", "cores": os.cpu_count(), **result}))


if __name__ == "__main__":
    if len(sys.argv) == 3:
        peer(sys.argv[1], int(sys.argv[2]))
    else:
        main()
