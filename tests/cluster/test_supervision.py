"""Workers are restarted with back-off, a server stops in order, and it leaves nothing behind."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from splitserve.cluster import rundir, supervisor
from splitserve.cluster.supervisor import backoff_s
from splitserve.model.tiny import make_tiny
from tests.support.cluster import (
    HttpStream,
    Lab,
    Serve,
    child_pids,
    open_lab,
    parent_pid,
    simulated_config,
    thread_states,
    until,
)

PROMPT = list(range(3, 103))


# --- restart


def test_backoff_doubles_up_to_its_limit() -> None:
    assert [backoff_s(n) for n in range(5)] == [0.0, 0.2, 0.4, 0.8, 1.6]
    assert backoff_s(20) == supervisor.BACKOFF_MAX_S


def restart_delays(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the supervisor said, in seconds."""
    messages = [record.getMessage() for record in caplog.records]
    return [
        m.rpartition("restart in ")[2].removesuffix(" s") for m in messages if "restart in" in m
    ]


@pytest.mark.processes
async def test_a_dead_worker_is_restarted_with_back_off(
    tiny: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with open_lab(tiny, tmp_path, simulated_config(1, 1)) as lab:
        pid, epoch = lab.pid("decode-0"), lab.epoch("decode-0")
        await lab.restarted("decode-0")
        assert (lab.pid("decode-0"), lab.epoch("decode-0")) != (pid, epoch)
        await lab.restarted("decode-0")
        monkeypatch.setattr(supervisor, "STABLE_S", 0.0)  # it has been well for long
        await lab.restarted("decode-0")
        assert restart_delays(caplog) == ["0.2", "0.4", "0.0"]
        assert lab.runtime.supervisor.num_restarts() == {"prefill-0": 0, "decode-0": 3}
        await (await lab.begin()).arrive()
        await lab.settle()


@pytest.mark.processes
async def test_after_the_zygote_died_each_worker_is_started_once(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_lab(tiny, tmp_path, simulated_config(1, 1)) as lab:
        pending_s = 1.0
        delays = [pending_s, 0.0]  # the worker's, the zygote's
        monkeypatch.setattr(supervisor, "backoff_s", lambda num_failures: delays.pop(0))
        zygote = parent_pid(lab.pid("prefill-0"))
        await lab.kill("decode-0")
        due_s = asyncio.get_running_loop().time() + pending_s
        await lab.kill("zygote")
        await lab.all_up()
        assert parent_pid(lab.pid("prefill-0")) != zygote
        await until(lambda: asyncio.get_running_loop().time() > due_s + 0.1, "restart overdue")
        pids = lab.runtime.supervisor.pids()
        assert sorted(child_pids(parent_pid(pids["prefill-0"]))) == sorted(pids.values())
        await (await lab.begin()).arrive()
        await lab.settle()


@pytest.mark.processes
async def test_a_worker_whose_loop_hangs_is_killed(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "WATCH_PERIOD_S", 0.1)
    async with open_lab(tiny, tmp_path, simulated_config(1, 1, hang_s=1.0)) as lab:
        epoch = lab.epoch("decode-0")
        await lab.freeze("decode-0")
        flight = await lab.begin()
        await until(lambda: "decode-0" not in lab.hub.workers, "killed")
        await flight.arrive()
        assert lab.epoch("decode-0") != epoch
        assert flight.journey.num_retries == 1
        await lab.settle()


@pytest.mark.processes
async def test_stopping_leaves_nothing_though_a_worker_hangs(tiny: Path, tmp_path: Path) -> None:
    lab = Lab(tiny, tmp_path, simulated_config(1, 1))
    await lab.start()
    pids = lab.runtime.supervisor.pids()
    zygote = parent_pid(pids["prefill-0"])
    await lab.freeze("decode-0")
    await lab.runtime.stop(0.0)
    assert [thread_states(pid) for pid in (zygote, *pids.values())] == [[], [], []]


# --- serve


@pytest.fixture
def holds(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def serve(tiny: Path, holds: Path) -> Iterator[type[Serve]]:
    """Start servers; whatever a test does, all of each is gone afterwards."""
    started: list[Serve] = []

    class Started(Serve):
        def __init__(self, *options: str) -> None:
            super().__init__(tiny, holds, *options)
            started.append(self)

    yield Started
    for server in started:
        server.destroy()


@pytest.mark.processes
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_drains(serve: type[Serve], signum: signal.Signals) -> None:
    server = serve()
    await server.ready()
    undisturbed = HttpStream(server.port, PROMPT, max_tokens=40)
    await until(lambda: undisturbed.is_over, "answer")
    with server.hold("step", "decode-0"):
        stream = HttpStream(server.port, PROMPT, max_tokens=40)
        await until(lambda: stream.num_events, "first token")
        server.process.send_signal(signum)
        await until(lambda: "draining" in server.output, "draining")
        refused = HttpStream(server.port, PROMPT, max_tokens=4)
        await until(lambda: refused.is_over, "refusal")
        assert (refused.status, refused.error and refused.error["code"]) == (503, "draining")
        assert not stream.is_over
    await until(lambda: stream.is_over, "answer")
    assert (stream.error, stream.broken) == (None, None)
    assert (stream.text, stream.finish_reason) == (undisturbed.text, "length")
    await server.ended()
    assert server.process.returncode == 0
    assert server.left_behind() == []


@pytest.mark.processes
async def test_a_second_signal_stops_at_once(serve: type[Serve]) -> None:
    server = serve()
    await server.ready()
    with server.hold("step", "decode-0"):
        stream = HttpStream(server.port, PROMPT, max_tokens=40)
        await until(lambda: stream.num_events, "first token")
        server.process.send_signal(signal.SIGINT)
        await until(lambda: "draining" in server.output, "draining")
        server.process.send_signal(signal.SIGINT)
        await until(lambda: stream.is_over, "error")
        await server.ended()
    assert stream.error is not None
    assert stream.error["code"] == "draining"
    assert server.process.returncode == 0
    assert server.left_behind() == []


@pytest.mark.processes
async def test_past_the_drain_deadline_the_client_is_told(serve: type[Serve]) -> None:
    server = serve("--deadline", "drain=0.3")
    await server.ready()
    with server.hold("step", "decode-0"):
        stream = HttpStream(server.port, PROMPT, max_tokens=40)
        await until(lambda: stream.num_events, "first token")
        server.process.send_signal(signal.SIGTERM)
        await until(lambda: stream.is_over, "error")
        await server.ended()
    assert stream.error is not None
    assert stream.error["code"] == "draining"
    assert "1 answers were not finished in time" in server.output
    assert server.process.returncode == 0
    assert server.left_behind() == []


@pytest.mark.processes
@pytest.mark.parametrize(
    ("point", "worker_id", "gauge"),
    [
        ("step", "prefill-0", 'running_requests{worker="prefill-0"}'),
        ("seal", "prefill-0", 'kv_leased_blocks{worker="prefill-0"}'),
        ("fetch.begin", "decode-0", 'fetching_requests{worker="decode-0"}'),
        ("step", "decode-0", 'running_requests{worker="decode-0"}'),
    ],
    ids=["prefilling", "sealing", "transferring", "decoding"],
)
async def test_serve_killed_takes_all_with_it(
    serve: type[Serve], monkeypatch: pytest.MonkeyPatch, point: str, worker_id: str, gauge: str
) -> None:
    server = serve()
    await server.ready()
    assert len(server.processes()) == 4
    assert len(server.sockets()) == 2
    with server.hold(point, worker_id):
        stream = HttpStream(server.port, PROMPT, max_tokens=40)
        await until(lambda: server.gauge(f"splitserve_worker_{gauge}") > 0, "held")
        server.process.kill()
        await until(lambda: not server.processes(), "all gone", 2.0)
        await until(lambda: stream.is_over, "connection reset")
    await server.ended()
    assert stream.broken is not None
    assert stream.error is None
    assert server.sockets() == []
    # its directory can't go with it: the next server removes it
    assert len(server.run_dirs()) == 1
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(server.base))
    rundir.remove_stale_run_dirs()
    assert server.left_behind() == []


@pytest.mark.processes
async def test_a_port_in_use_is_one_line_and_exit_code_2(serve: type[Serve]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = serve("--port", str(taken.getsockname()[1]))
        await server.ended()
    assert server.process.returncode == 2
    assert len(server.errors.splitlines()) == 1, server.errors
    assert "in use" in server.errors
    assert server.left_behind() == []


@pytest.mark.processes
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
async def test_interrupted_while_loading(serve: type[Serve], signum: signal.Signals) -> None:
    server = serve()
    await until(server.zygotes, "zygote")
    server.freeze_zygote()
    server.process.send_signal(signum)
    await server.ended()
    assert server.process.returncode == 0
    assert server.errors == ""
    assert server.left_behind() == []


def test_layouts_that_can_not_work_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for arguments, word in (
        (
            ["--mixed", "1", "--kv-memory", "100000G"]
            + ["--max-sequences", "100000", "--max-batched-tokens", "100000"],
            "available",
        ),
        (["--mixed", "1", "--split", "always"], "prefill and decode workers"),
        (["--prefill", "1"], "decode"),
        (["--prefill", "1", "--decode", "1", "--exact", "--decode-weights", "int8"], "exclude"),
        (["--dtype", "int4"], "float32, bfloat16, float16"),
    ):
        command = [sys.executable, "-m", "splitserve", "serve", str(make_tiny(tmp_path))]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, timeout=60)
        assert done.returncode == 2, done
        assert word in done.stderr
        assert len(done.stderr.splitlines()) == 1
