"""One thread for each place that KV comes from: a slow one holds up nobody but its own."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

log = logging.getLogger(__name__)


class Lanes:
    """Runs calls in order within a lane, lanes side by side; a lane's thread starts with its first
    call. There are as many as there are names: workers keep theirs when they are restarted."""

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix
        self._lock = threading.Lock()
        self._lanes: dict[str, ThreadPoolExecutor] = {}
        self._closed = False

    def submit(self, name: str, call: Callable[[], None]) -> bool:
        """False once they are closed: the call is not made."""
        with self._lock:
            if self._closed:
                return False
            lane = self._lanes.get(name)
            if lane is None:
                lane = ThreadPoolExecutor(1, thread_name_prefix=f"{self._prefix}-{name}")
                self._lanes[name] = lane
            lane.submit(_logged, call)
            return True

    def close(self) -> None:
        """Wait for the calls under way; those that have not begun are dropped."""
        with self._lock:
            self._closed = True
        for lane in self._lanes.values():
            lane.shutdown(wait=True, cancel_futures=True)


def _logged(call: Callable[[], None]) -> None:
    """An executor keeps what a call raises to itself."""
    try:
        call()
    except Exception:
        log.exception("a call in a lane")
