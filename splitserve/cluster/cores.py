"""How the cores of this machine are divided among workers."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CoreShare:
    """The cores that one worker is pinned to; it computes with `num_threads` of them."""

    cores: tuple[int, ...]
    num_threads: int


def divide_cores(num_workers: int, available: list[int] | None = None) -> list[CoreShare]:
    """Equal, disjoint shares; with fewer cores than workers they share, one thread each.

    All shares have the same number of threads, so that workers compute alike.
    """
    cores = sorted(os.sched_getaffinity(0)) if available is None else sorted(available)
    per_worker = len(cores) // num_workers
    if per_worker == 0:
        return [CoreShare((cores[i % len(cores)],), 1) for i in range(num_workers)]
    return [
        CoreShare(tuple(cores[i * per_worker : (i + 1) * per_worker]), per_worker)
        for i in range(num_workers)
    ]
