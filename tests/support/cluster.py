"""A whole server in this process, with real workers, and the means to disturb it.

Nothing here waits for luck: a request is held in a state by a file that a fault point looks for
(splitserve/faults.py) or by SIGSTOP, the state is observed, then something is killed.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import itertools
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from splitserve import wire
from splitserve.cluster.runtime import Runtime
from splitserve.config import Deadlines, GatewayConfig, ServeConfig
from splitserve.faults import POINTS
from splitserve.gateway.journey import Generation, Journey
from splitserve.moments import Moment
from splitserve.sampling import Sampling
from tests.support.engines import expected_tokens

T = TypeVar("T")

LIMIT_S = 30.0  # for what takes milliseconds; only a hang reaches it


async def until(condition: Callable[[], object], what: str, limit_s: float = LIMIT_S) -> None:
    """Wait until the condition holds."""
    end_s = asyncio.get_running_loop().time() + limit_s
    while not condition():
        assert asyncio.get_running_loop().time() < end_s, f"after {limit_s:g} s not: {what}"
        await asyncio.sleep(0.002)


async def within(awaitable: Awaitable[T], limit_s: float = LIMIT_S) -> T:
    async with asyncio.timeout(limit_s):
        return await awaitable


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """The file exists meanwhile."""
    path.touch()
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


@dataclass(slots=True)
class Flight:
    """One request inside the gateway."""

    journey: Journey
    task: asyncio.Task[None]

    @property
    def output_ids(self) -> list[int]:
        return self.journey.output_ids

    def has(self, moment: Moment) -> bool:
        return self.journey.timeline.first(moment) is not None

    def num(self, moment: Moment) -> int:
        return sum(mark.moment is moment for mark in self.journey.timeline.marks)

    async def land(self, limit_s: float = LIMIT_S) -> None:
        """Wait for its end, however that is."""
        await within(asyncio.wait([self.task]), limit_s)
        assert self.task.done()
        assert self.journey.timeline.negative_spans() == []

    async def arrive(self, expected: list[int] | None = None, limit_s: float = LIMIT_S) -> None:
        """Wait for its end, which must be the right answer (of the simulated model if not told)."""
        await self.land(limit_s)
        assert self.journey.error is None, f"{self.journey.error!r} {self.journey.timeline.notes}"
        if expected is None:
            request = self.journey.request
            expected = expected_tokens(
                request.prompt_ids, request.sampling, request.sampling.max_tokens
            )
        assert self.output_ids == expected


class Lab:
    """A running server. `runtime`'s parts are at hand; `settle` is due at the end of each test."""

    def __init__(self, model_dir: Path, hold_dir: Path, config: ServeConfig) -> None:
        faults = ",".join(f"{point}=hold:{hold_dir}/{point}.{{worker}}" for point in POINTS)
        self._holds = hold_dir
        self._numbers = itertools.count()
        self._stopped: set[int] = set()
        self.runtime = Runtime(
            msgspec.structs.replace(config, port=0, faults=faults), model_dir, "tiny"
        )

    async def start(self) -> None:
        await within(self.runtime.start(), 60)
        self.hub = self.runtime.hub
        self.service = self.runtime.service

    async def stop(self) -> None:
        self.resume_all()
        await within(self.runtime.stop(0.0))

    @property
    def worker_ids(self) -> list[str]:
        return [worker_id for worker_id, _ in self.runtime.config.roles]

    # --- requests

    def prompt(self, num_tokens: int = 100) -> list[int]:
        """A prompt that shares no prefix with an earlier one."""
        number = next(self._numbers)
        return [3 + (number * 7 + 11 * i * (number + 1)) % 500 for i in range(num_tokens)]

    async def begin(
        self, prompt_ids: list[int] | None = None, max_tokens: int = 8, temperature: float = 1.0
    ) -> Flight:
        number = next(self._numbers)
        sampling = Sampling(seed=number, max_tokens=max_tokens, temperature=temperature)
        generation = Generation(f"test-{number}", prompt_ids or self.prompt(), sampling)
        return Flight(*await self.service.start(generation))

    async def repeat(self, flight: Flight) -> Flight:
        """The same request once more, to its end, which nothing disturbs."""
        request = replace(flight.journey.request, request_id=f"test-{next(self._numbers)}")
        again = Flight(*await self.service.start(request))
        await again.land()
        assert again.journey.error is None
        assert again.journey.num_retries == 0
        return again

    async def warm_up(self) -> None:
        """A request to its end: `decode-0` has mapped the pool of `prefill-0` then."""
        flight = await self.begin()
        await flight.land()
        assert flight.journey.error is None
        workers = flight.journey.timeline.workers(Moment.PICKED)
        assert workers == ["prefill-0", "decode-0"], flight.journey.timeline.notes

    # --- disturbances

    @contextlib.contextmanager
    def hold(self, point: str, worker_id: str) -> Iterator[None]:
        """Whoever reaches the fault point waits there until the block is left."""
        with held(self._holds / f"{point}.{worker_id}"):
            yield

    @contextlib.contextmanager
    def without(self, kind: type[wire.ToWorker]) -> Iterator[None]:
        """The gateway sends no message of this kind meanwhile."""
        send = self.hub.send

        def selective(worker_id: str, epoch: str, message: wire.ToWorker) -> bool:
            return isinstance(message, kind) or send(worker_id, epoch, message)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(self.hub, "send", selective)
            yield

    def pid(self, worker_id: str) -> int:
        return self.runtime.supervisor.pids()[worker_id]

    def epoch(self, worker_id: str) -> str:
        return self.hub.workers[worker_id].hello.epoch

    async def freeze(self, worker_id: str) -> None:
        """SIGSTOP; returns when every thread stands still."""
        pid = self.pid(worker_id)
        os.kill(pid, signal.SIGSTOP)
        self._stopped.add(pid)
        await until(lambda: set(thread_states(pid)) <= set("Tt"), f"{worker_id} stopped")

    def resume_all(self) -> None:
        """SIGCONT for all that were frozen and still live."""
        for pid in self._stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        self._stopped.clear()

    async def kill(self, victim: str) -> None:
        """kill -9 of a worker, or of the `zygote`; returns when the gateway knows."""
        workers = list(self.hub.workers) if victim == "zygote" else [victim]
        epochs = {worker_id: self.epoch(worker_id) for worker_id in workers}
        pid = parent_pid(self.pid(workers[0])) if victim == "zygote" else self.pid(victim)
        self._stopped.discard(pid)
        os.kill(pid, signal.SIGKILL)

        def known() -> bool:
            handles = {worker_id: self.hub.workers.get(worker_id) for worker_id in workers}
            return all(x is None or x.hello.epoch != epochs[w] for w, x in handles.items())

        await until(known, f"the death of {victim} known")

    async def restarted(self, victim: str) -> None:
        """kill -9, and wait until it is back."""
        await self.kill(victim)
        await self.all_up()

    async def all_up(self) -> None:
        num = len(self.worker_ids)
        pids = self.runtime.supervisor.pids
        await until(lambda: len(self.hub.workers) == len(pids()) == num, "all workers up")

    async def settle(self) -> None:
        """All workers are up again, idle, and their invariants hold."""
        self.resume_all()
        for path in self._holds.iterdir():
            path.unlink()
        await self.all_up()
        await self.idle()
        assert self.service.num_inflight == 0
        assert not any(handle.legs for handle in self.hub.workers.values())

    async def idle(self, *worker_ids: str) -> None:
        """Each worker says that it is idle and that every block is free or cached."""
        for worker_id in worker_ids or self.worker_ids:
            while not await within(self.hub.check(worker_id)):  # noqa: ASYNC110
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def open_lab(model_dir: Path, hold_dir: Path, config: ServeConfig) -> AsyncIterator[Lab]:
    lab = Lab(model_dir, hold_dir, config)
    await lab.start()
    try:
        yield lab
    finally:
        await lab.stop()


def simulated_config(
    num_prefill: int = 0,
    num_decode: int = 0,
    num_mixed: int = 0,
    *,
    num_blocks: int = 256,
    deadlines: Deadlines | None = None,
    gateway: GatewayConfig | None = None,
    policy: str = "least_loaded",
    **settings: object,
) -> ServeConfig:
    """Workers without torch. A step computes 32 tokens: a prompt of 100 takes four. Unless told
    otherwise it is known who is picked: of workers that have nothing to do, the first."""
    gateway = msgspec.structs.replace(gateway or GatewayConfig(), policy=policy)
    if deadlines is not None:
        gateway = msgspec.structs.replace(gateway, deadlines=deadlines)
    config = ServeConfig(
        num_prefill=num_prefill,
        num_decode=num_decode,
        num_mixed=num_mixed,
        runner="simulated",
        kv_memory_bytes=num_blocks * 16 * 8,
        max_batched_tokens=32,
        max_sequences=16,
        gateway=gateway,
    )
    return msgspec.structs.replace(config, **settings)


# --- what the kernel knows of a process


def thread_states(pid: int) -> list[str]:
    """The state letter of each thread; empty if the process is gone."""
    states = []
    for path in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):
            states.append(path.read_text().rpartition(")")[2].split()[0])
    return states


def parent_pid(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def child_pids(pid: int) -> list[int]:
    return [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def socket_inodes(pid: int) -> list[str]:
    """Inode numbers of the sockets that a process holds open."""
    targets = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            targets.append(os.readlink(path))
    return [x.removeprefix("socket:[").rstrip("]") for x in targets if x.startswith("socket:[")]


def num_descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- a client


class HttpStream(threading.Thread):
    """Reads one streamed completion of token ids, as an OpenAI client sees it."""

    def __init__(self, port: int, prompt_ids: list[int], max_tokens: int, seed: int = 1) -> None:
        super().__init__(daemon=True)
        self.status: int | None = None
        self.text = ""
        self.num_events = 0
        self.finish_reason: str | None = None
        self.error: dict[str, str] | None = None
        self.broken: Exception | None = None  # the connection ended before the stream did
        self._port = port
        self._body = {
            "model": "tiny",
            "prompt": prompt_ids,
            "max_tokens": max_tokens,
            "seed": seed,
            "stream": True,
        }
        self.start()

    @property
    def is_over(self) -> bool:
        return not self.is_alive()

    def run(self) -> None:
        try:
            self._read()
        except (OSError, http.client.HTTPException) as error:
            self.broken = error

    def _read(self) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        with contextlib.closing(connection):
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/completions", json.dumps(self._body), headers)
            response = connection.getresponse()
            self.status = response.status
            if response.status != 200:
                self.error = json.loads(response.read())["error"]
                return
            ended = False
            for line in response:
                if line.startswith(b"data: "):
                    ended = line.strip() == b"data: [DONE]"
                    if not ended:
                        self._take(json.loads(line.removeprefix(b"data: ")))
            if not ended and self.error is None:
                raise ConnectionError("the stream ended early")

    def _take(self, event: dict[str, Any]) -> None:
        if "error" in event:
            self.error = event["error"]
            return
        for choice in event["choices"]:
            self.text += choice["text"]
            self.finish_reason = choice["finish_reason"] or self.finish_reason
        self.num_events += 1


# --- `splitserve serve` as its own process


class Serve:
    """The command, with 1P1D of simulated workers that can be held at every fault point."""

    def __init__(self, model_dir: Path, hold_dir: Path, *options: str) -> None:
        self.base = Path(tempfile.mkdtemp(prefix="ss-"))  # short: it is part of a socket's path
        self.port = 0
        self.output = ""
        self.errors = ""
        self._holds = hold_dir
        self._mark = f"SPLITSERVE_TEST_MARK={secrets.token_hex(8)}"
        faults = ",".join(f"{point}=hold:{hold_dir}/{point}.{{worker}}" for point in POINTS)
        command = [sys.executable, "-m", "splitserve.cli.main", "serve", str(model_dir)]
        command += ["--prefill", "1", "--decode", "1", "--port", "0", "--runner", "simulated"]
        command += ["--max-batched-tokens", "32", "--max-sequences", "16", "--kv-memory", "64K"]
        name, _, value = self._mark.partition("=")
        self.process = subprocess.Popen(
            [*command, "--faults", faults, *options],
            env=os.environ | {name: value, "XDG_RUNTIME_DIR": str(self.base)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self._readers = [
            threading.Thread(target=self._read_output, daemon=True),
            threading.Thread(target=self._read_errors, daemon=True),
        ]
        for reader in self._readers:
            reader.start()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line

    async def ready(self) -> None:
        def found() -> re.Match[str] | None:
            assert self.process.poll() is None, self.errors
            return re.search(r"ready: http://[^:]+:(\d+)", self.output)

        await until(found, "server ready")
        match = found()
        assert match is not None
        self.port = int(match[1])
        self._inodes = [inode for pid in self.processes() for inode in socket_inodes(pid)]

    async def ended(self) -> None:
        await until(lambda: self.process.poll() is not None, "server ended")
        for reader in self._readers:
            reader.join(timeout=5)

    @contextlib.contextmanager
    def hold(self, point: str, worker_id: str) -> Iterator[None]:
        with held(self._holds / f"{point}.{worker_id}"):
            yield

    def processes(self) -> list[int]:
        """Live processes that have inherited our mark: serve, zygote, workers."""
        mark = self._mark.encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                if mark in path.read_bytes().split(b"\0"):
                    found.append(int(path.parent.name))
        return found

    def zygotes(self) -> list[int]:
        """The process that loads the model, once it runs its own program: frozen between fork and
        exec it would hold up `serve`, which waits for the exec."""
        found = []
        for pid in self.processes():
            with contextlib.suppress(OSError):
                if b"splitserve.worker.zygote" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    found.append(pid)
        return found

    def freeze_zygote(self) -> None:
        (zygote,) = self.zygotes()
        os.kill(zygote, signal.SIGSTOP)

    def sockets(self) -> list[str]:
        """Its abstract sockets that still exist."""
        lines = Path("/proc/net/unix").read_text().splitlines()
        rows = [line.split() for line in lines if "@splitserve/" in line]
        return sorted({row[7] for row in rows if row[6] in self._inodes})

    def gauge(self, name: str) -> float:
        """Value of one metric."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics")
            text = connection.getresponse().read().decode()
        return float(next(x for x in text.splitlines() if x.startswith(name)).split()[-1])

    def run_dirs(self) -> list[Path]:
        return list(self.base.iterdir())

    def left_behind(self) -> list[object]:
        """Processes, run directories and sockets that outlived it."""
        sockets = self.sockets() if self.port else []
        return [*self.processes(), *self.run_dirs(), *sockets]

    def destroy(self) -> None:
        self.process.kill()
        self.process.wait()
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for reader in self._readers:
            reader.join(timeout=5)
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        shutil.rmtree(self.base)
