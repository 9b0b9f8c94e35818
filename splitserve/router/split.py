"""Split or local: asked per request, answered with a reason."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve.config import SplitMode
from splitserve.router.router import Router
from splitserve.wire import Role


@dataclass(frozen=True, slots=True)
class SplitDecision:
    split: bool
    reason: str


def decide_split(
    mode: SplitMode,
    num_tokens: int,
    local_prefill_tokens: int,
    router: Router,
    num_failed_transfers: int = 0,
) -> SplitDecision:
    """Whether this request's prefill and decode go to separate workers.

    `always` splits also while no prefill worker lives: the request waits for one. `auto` splits
    longer prompts where that can be had now, and stops trying after two failed transfers.
    """
    if mode is SplitMode.NEVER:
        return SplitDecision(False, "split=never")
    if num_failed_transfers >= 2:
        return SplitDecision(False, f"local: {num_failed_transfers} transfers failed")
    if mode is SplitMode.ALWAYS:
        return SplitDecision(True, "split=always")
    has_local = router.has(Role.DECODE, Role.MIXED)
    if has_local and not router.has(Role.PREFILL):
        return SplitDecision(False, "local: no prefill worker")
    if num_tokens <= local_prefill_tokens and has_local:
        return SplitDecision(False, f"local: {num_tokens} tokens <= {local_prefill_tokens}")
    return SplitDecision(True, f"split: {num_tokens} tokens > {local_prefill_tokens}")
