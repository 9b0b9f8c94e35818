"""How long a server takes to start, how long a killed worker is away, what an idle worker holds.

A real 1P1D server of the default model. Memory from smaps_rollup: anonymous memory is weights
(shared copy-on-write with the zygote), libraries and heap; the KV pool is shared memory and counted
apart. The last line is JSON.
"""

from __future__ import annotations

import json
import os
import signal
import time

import uvloop

from splitserve.cluster.runtime import Runtime
from splitserve.config import ServeConfig
from splitserve.model.fetch import resolve_model


def memory_mib(pid: int) -> dict[str, int]:
    """MiB by kind."""
    with open(f"/proc/{pid}/smaps_rollup") as file:
        fields = dict(line.split(":", 1) for line in file.read().splitlines()[1:])
    names = ("Rss", "Anonymous", "Pss_Anon", "Pss_Shmem")
    return {name: int(fields[name].split()[0]) // 1024 for name in names}


async def main() -> None:
    model = resolve_model(None, print)
    config = ServeConfig(num_prefill=1, num_decode=1, port=0, kv_memory_bytes=512 << 20)
    runtime = Runtime(config, model.path, model.name, print)
    start = time.perf_counter()
    await runtime.start()
    result = {"first_start_s": round(time.perf_counter() - start, 2)}
    weights = runtime.info.weights_bytes >> 20
    print(f"first start {result['first_start_s']} s; weights {weights} MiB")
    for name, pid in sorted(runtime.supervisor.pids().items()):
        memory = memory_mib(pid)
        print(
            f"{name} idle, MiB: {memory}; anonymous beyond weights {memory['Anonymous'] - weights}"
        )
        result[f"{name}_anonymous_mib"] = memory["Anonymous"]
    for name, pid in sorted(runtime.supervisor.pids().items()):
        start = time.perf_counter()
        os.kill(pid, signal.SIGKILL)
        while name not in runtime.hub.workers or runtime.hub.workers[name].hello.pid == pid:
            await runtime.hub.wait_for_change(60)
        result[f"{name}_restart_s"] = round(time.perf_counter() - start, 2)
        print(f"{name} killed, back after {result[f'{name}_restart_s']} s")
    await runtime.stop()
    print(json.dumps({"benchmark": "startup", **result}))


if __name__ == "__main__":
    uvloop.run(main())
