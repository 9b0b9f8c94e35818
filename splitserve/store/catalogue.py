"""What lies in a directory of blocks that other processes, or hosts, write to and evict from too.

Nothing is agreed with them and no lock is taken: a folder whose mtime is the same as when it was
listed has the same names; only the others are listed anew. A file's score (store.eviction) is its
mtime, so it outlives all of us.

Layout: root / namespace / first two hex digits of the key / key.suffix. One level of 256 folders:
with two, 15,000 blocks (10 GiB of the default model's) would lie in a folder each.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass, field
from pathlib import Path

from splitserve.store.eviction import Victims

NAMESPACE_DIGITS = 32
NUM_FOLDERS = 256


@dataclass(slots=True)
class _Folder:
    mtime_ns: int = -1  # when it was listed; -1: list it again
    sizes: dict[str, int] = field(default_factory=dict)  # of payload, by file name


class Catalogue:
    """Used by one thread at a time.

    overhead_bytes: what a file has beside a block. settled_s: a folder that changed less long ago
    may change again without another mtime; file systems tick slowly, and clocks differ.
    """

    def __init__(self, root: Path, suffix: str, overhead_bytes: int, settled_s: float) -> None:
        self._root = root
        self._suffix = suffix
        self._overhead_bytes = overhead_bytes
        self._settled_ns = int(settled_s * 1e9)
        self._folders: dict[str, _Folder] = {}  # by path below the root
        self._victims: Victims[str] = Victims(self._score_of)
        self.num_blocks = 0
        self.num_bytes = 0

    def refresh(self) -> None:
        """See what others did."""
        folders = self._list_folders()
        for path in self._folders.keys() - folders:
            folder = self._folders.pop(path)
            self._count(-len(folder.sizes), -sum(folder.sizes.values()))
        for path in folders:
            folder = self._folders.setdefault(path, _Folder())
            with contextlib.suppress(FileNotFoundError):
                self._refresh_folder(path, folder)
        self._victims.compact(self.num_blocks)

    def add(self, path: str, num_bytes: int, score_s: float) -> None:
        """A file that we wrote. path: below the root."""
        folder, name = path.rsplit("/", 1)
        sizes = self._folders.setdefault(folder, _Folder()).sizes
        if name not in sizes:
            sizes[name] = num_bytes
            self._count(1, num_bytes)
            self._victims.add(path, score_s)

    def evict(self, limit_bytes: int) -> int:
        """Remove files until at most so many bytes of payload lie here, as far as we know. Returns
        how many were removed."""
        num_evicted = 0
        while self.num_bytes > limit_bytes:
            path = self._victims.pop()
            if path is None:
                break
            with contextlib.suppress(FileNotFoundError):  # another was faster
                os.unlink(self._root / path)
                num_evicted += 1
            self._forget(path)
        return num_evicted

    def _list_folders(self) -> set[str]:
        found = set()
        for namespace in _folder_names(self._root, NAMESPACE_DIGITS):
            for name in _folder_names(self._root / namespace, 2):
                found.add(f"{namespace}/{name}")
        return found

    def _refresh_folder(self, path: str, folder: _Folder) -> None:
        full = os.path.join(self._root, path)
        now_ns = time.time_ns()
        mtime_ns = os.stat(full).st_mtime_ns
        if mtime_ns == folder.mtime_ns:
            return
        with os.scandir(full) as entries:
            found = {entry.name: entry for entry in entries if entry.name.endswith(self._suffix)}
        for name in folder.sizes.keys() - found.keys():
            self._count(-1, -folder.sizes.pop(name))
        for name in found.keys() - folder.sizes.keys():
            with contextlib.suppress(FileNotFoundError):
                status = found[name].stat()
                payload = max(status.st_size - self._overhead_bytes, 0)
                self.add(f"{path}/{name}", payload, status.st_mtime_ns / 1e9)
        folder.mtime_ns = mtime_ns if now_ns - mtime_ns > self._settled_ns else -1

    def _score_of(self, path: str) -> float | None:
        folder, _, name = path.rpartition("/")
        known = self._folders.get(folder)
        if known is None or name not in known.sizes:
            return None
        try:
            return os.stat(self._root / path).st_mtime_ns / 1e9
        except FileNotFoundError:
            self._forget(path)
            return None

    def _forget(self, path: str) -> None:
        folder, _, name = path.rpartition("/")
        known = self._folders.get(folder)
        if known is not None and name in known.sizes:
            self._count(-1, -known.sizes.pop(name))

    def _count(self, num_blocks: int, num_bytes: int) -> None:
        self.num_blocks += num_blocks
        self.num_bytes += num_bytes


def _folder_names(path: Path, num_digits: int) -> list[str]:
    """Those that are hex digits; none if the path is gone."""
    try:
        with os.scandir(path) as entries:
            return [
                entry.name
                for entry in entries
                if len(entry.name) == num_digits and entry.is_dir() and _is_hex(entry.name)
            ]
    except FileNotFoundError:
        return []


def _is_hex(name: str) -> bool:
    return all(digit in "0123456789abcdef" for digit in name)
