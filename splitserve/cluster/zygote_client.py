"""The supervisor's line to a zygote process: start it, ask for workers, hear of deaths."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable

import msgspec

from splitserve.errors import (
    ConfigError,
    ModelUnavailable,
    NoWorker,
    SplitserveError,
    UnsupportedModel,
)
from splitserve.worker.spec import (
    Exited,
    FromZygote,
    ModelSpec,
    Preloaded,
    PreloadFailed,
    Spawned,
    WorkerSpec,
)

log = logging.getLogger(__name__)

_MAX_MESSAGE_BYTES = 1 << 16
_PRELOAD_ERRORS: dict[str, type[SplitserveError]] = {
    UnsupportedModel.code: UnsupportedModel,
    ModelUnavailable.code: ModelUnavailable,
    ConfigError.code: ConfigError,
}


class ZygoteClient:
    """One zygote process. `on_message` hears Spawned and Exited, `on_death` that it is gone."""

    def __init__(
        self,
        model: ModelSpec,
        on_message: Callable[[Spawned | Exited], None],
        on_death: Callable[[int | None], None],
    ) -> None:
        self._model = model
        self._on_message = on_message
        self._on_death = on_death
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self._preloaded: asyncio.Future[float] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process is not None else None

    async def start(self, timeout_s: float) -> float:
        """Start the process; returns the seconds that loading took, or raises why it can't.

        Whatever keeps it from loading, also a cancellation, it is gone then.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        environment = os.environ | {
            "SPLITSERVE_SUPERVISOR_PID": str(os.getpid()),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            # let torch count devices through NVML: once it has asked CUDA itself, no fork may
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
            # threads that spin at each barrier stop each other where cores are shared: a prefill
            # of 256 tokens on two busy cores takes 8 s instead of 1.8
            "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", "PASSIVE"),
        }
        with theirs:
            self._process = subprocess.Popen(  # noqa: ASYNC220 (from this thread: PDEATHSIG)
                [sys.executable, "-m", "splitserve.worker.zygote", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env=environment,
                start_new_session=True,  # the terminal's Ctrl-C is for the supervisor alone
                stdin=subprocess.DEVNULL,
            )
        self._socket = ours
        loop = asyncio.get_running_loop()
        self._preloaded = loop.create_future()
        loop.add_reader(ours, self._read)
        ours.send(msgspec.msgpack.encode(self._model))
        try:
            async with asyncio.timeout(timeout_s):
                return await self._preloaded
        except BaseException as error:
            self._detach()
            self._process.kill()
            self._process.wait()
            if isinstance(error, TimeoutError):
                raise NoWorker(f"The model was not loaded within {timeout_s:g} s.") from None
            raise

    def spawn(self, spec: WorkerSpec) -> bool:
        """Ask for a worker; `Spawned` follows. False if the zygote is gone: `on_death` follows."""
        try:
            if self._socket is None:
                return False
            self._socket.send(msgspec.msgpack.encode(spec))
            return True
        except OSError as error:
            log.warning("zygote can't be reached: %s", error)
            return False

    async def stop(self, timeout_s: float = 5.0) -> None:
        """Close the line: the zygote kills its workers and exits; kill it if it does not."""
        self._detach()
        if self._process is None:
            return
        try:
            async with asyncio.timeout(timeout_s):
                while self._process.poll() is None:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        except TimeoutError:
            self._process.kill()
            self._process.wait()

    def _detach(self) -> None:
        if self._socket is not None:
            asyncio.get_running_loop().remove_reader(self._socket)
            self._socket.close()
            self._socket = None

    def _read(self) -> None:
        assert self._socket is not None
        try:
            data = self._socket.recv(_MAX_MESSAGE_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._died()
            return
        message: FromZygote = msgspec.msgpack.decode(data, type=FromZygote)
        assert self._preloaded is not None
        match message:
            case Preloaded(seconds):
                self._preloaded.set_result(seconds)
            case PreloadFailed(code, text):
                error = _PRELOAD_ERRORS.get(code, SplitserveError)
                self._preloaded.set_exception(error(text, advice=""))
            case Spawned() | Exited():
                self._on_message(message)

    def _died(self) -> None:
        self._detach()
        assert self._process is not None
        try:
            code = self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            code = self._process.wait()
        if self._preloaded is not None and not self._preloaded.done():
            self._preloaded.set_exception(
                NoWorker(f"The process that loads the model exited with {code}.", advice="")
            )
            return
        self._on_death(code)
