"""Progress of a download by another program: the growth of a directory."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

_INTERVAL_S = 0.5
_STEP_PERCENT = 10


class SizeMeter:
    """While entered, calls progress from a thread at every tenth of total_bytes."""

    def __init__(
        self, label: str, directory: Path, total_bytes: int, progress: Callable[[str], None]
    ) -> None:
        self._label = label
        self._directory = directory
        self._total_bytes = max(1, total_bytes)
        self._progress = progress
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._progress(f"{self._label}: {megabytes(self._total_bytes)}")
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._ended.set()
        self._thread.join()
        if kind is None:
            self._progress(f"{self._label}: 100 %")

    def _watch(self) -> None:
        shown = 0
        while not self._ended.wait(_INTERVAL_S):
            percent = min(99, 100 * directory_bytes(self._directory) // self._total_bytes)
            if percent >= shown + _STEP_PERCENT:
                shown = percent
                self._progress(f"{self._label}: {percent} %")


def directory_bytes(directory: Path) -> int:
    """Size of all files below `directory`; files that vanish meanwhile count as 0."""
    total = 0
    for parent, _, names in os.walk(directory):
        for name in names:
            try:
                total += os.lstat(os.path.join(parent, name)).st_size
            except OSError:
                pass
    return total


def megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.0f} MB"
