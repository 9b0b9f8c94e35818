"""The directory of one running server: its private socket, gone when it ends.

A server that was killed leaves its directory; the next one that starts removes it.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

_PREFIX = "splitserve-"


def _base() -> Path:
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir())


def make_run_dir() -> Path:
    """A new directory that only this user can enter, named after this process."""
    remove_stale_run_dirs()
    return Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getuid()}-{os.getpid()}-", dir=_base()))


def remove_run_dir(path: Path) -> None:
    shutil.rmtree(path, ignore_errors=True)


def remove_stale_run_dirs() -> None:
    """Remove those of our own servers whose process is gone."""
    for path in _base().glob(f"{_PREFIX}{os.getuid()}-*"):
        _, _, rest = path.name.partition(f"{_PREFIX}{os.getuid()}-")
        pid = rest.partition("-")[0]
        if (
            pid.isdigit()
            and not Path(f"/proc/{pid}").exists()
            and path.stat().st_uid == os.getuid()
        ):
            shutil.rmtree(path, ignore_errors=True)
