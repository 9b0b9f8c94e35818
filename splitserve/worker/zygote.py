"""The parent that workers are forked from: it imports and loads once, so that a restart is cheap.

`python -m splitserve.worker.zygote FD` talks to its supervisor over one inherited socket (FD,
SOCK_SEQPACKET): first comes a ModelSpec, then a WorkerSpec per worker wanted; answers are the
FromZygote messages. It computes nothing with more than one thread before it forks: a forked OpenMP
pool would hang. When the supervisor is gone, it and all its workers are killed by the kernel.
"""

from __future__ import annotations

import ctypes
import logging
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from types import FrameType

import msgspec

from splitserve.errors import SplitserveError
from splitserve.worker.main import HostedModel, run_worker
from splitserve.worker.spec import (
    Exited,
    FromZygote,
    ModelSpec,
    Preloaded,
    PreloadFailed,
    Spawned,
    WorkerSpec,
)

_MAX_MESSAGE_BYTES = 1 << 16
_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15


def die_with_parent(parent_pid: int) -> None:
    """Have the kernel kill this process when its parent dies, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal.SIGKILL)


def name_process(name: str) -> None:
    """What `ps -o comm` and `top` show; the kernel keeps 15 bytes."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def load_model(spec: ModelSpec) -> HostedModel:
    """The model that all workers share, copy on write."""
    if spec.runner == "simulated":
        from splitserve.worker.simulated import SimulatedModel

        return SimulatedModel(spec)
    from splitserve.worker.native import NativeModel

    return NativeModel(spec)


class Zygote:
    """Forks on demand and reports deaths."""

    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._children: dict[int, WorkerSpec] = {}
        self._model: HostedModel | None = None
        self._signal_read, self._signal_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def run(self) -> int:
        if not self._preload():
            return 1
        signal.signal(signal.SIGCHLD, self._on_child)
        signal.set_wakeup_fd(self._signal_write, warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._signal_read, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is self._control:
                    data = self._control.recv(_MAX_MESSAGE_BYTES)
                    if not data:
                        return self._stop()
                    self._spawn(msgspec.msgpack.decode(data, type=WorkerSpec))
                else:
                    os.read(self._signal_read, 4096)
                    self._reap()

    def _preload(self) -> bool:
        start = time.monotonic()
        data = self._control.recv(_MAX_MESSAGE_BYTES)
        try:
            self._model = load_model(msgspec.msgpack.decode(data, type=ModelSpec))
        except SplitserveError as error:
            self._send(PreloadFailed(error.code, f"{error.message} {error.advice}".strip()))
            return False
        except Exception as error:
            traceback.print_exc()
            self._send(PreloadFailed("internal_error", f"{type(error).__name__}: {error}"))
            return False
        self._send(Preloaded(time.monotonic() - start))
        return True

    def _spawn(self, spec: WorkerSpec) -> None:
        parent_pid = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            self._become_worker(spec, parent_pid)
        self._children[pid] = spec
        self._send(Spawned(spec.worker_id, spec.epoch, pid))

    def _become_worker(self, spec: WorkerSpec, parent_pid: int) -> None:
        """In the child: never returns."""
        status = 1
        try:
            die_with_parent(parent_pid)
            name_process(f"ss-{spec.worker_id}")
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            self._control.close()
            os.close(self._signal_read)
            os.close(self._signal_write)
            assert self._model is not None
            run_worker(spec, self._model)
            status = 0
        except SplitserveError as error:
            print(f"worker {spec.worker_id}: {error.message} {error.advice}", file=sys.stderr)  # noqa: T201
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(status)

    def _reap(self) -> None:
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            spec = self._children.pop(pid)
            code = os.waitstatus_to_exitcode(status)
            self._send(Exited(spec.worker_id, spec.epoch, pid, code))

    def _stop(self) -> int:
        for pid in self._children:
            os.kill(pid, signal.SIGKILL)
        for pid in self._children:
            os.waitpid(pid, 0)
        return 0

    def _send(self, message: FromZygote) -> None:
        self._control.send(msgspec.msgpack.encode(message))

    def _on_child(self, signum: int, frame: FrameType | None) -> None:
        """Only there so that the wake-up descriptor is written."""


def main() -> int:
    die_with_parent(int(os.environ["SPLITSERVE_SUPERVISOR_PID"]))
    logging.basicConfig(
        level=os.environ.get("SPLITSERVE_LOG", "WARNING"),
        format="%(asctime)s %(process)d %(name)s %(levelname)s %(message)s",
    )
    name_process("ss-zygote")
    with socket.socket(fileno=int(sys.argv[1])) as control:
        return Zygote(control).run()


if __name__ == "__main__":
    sys.exit(main())
