"""Where the legs of one request go: what the router is asked, and what becomes of its answer."""

from __future__ import annotations

from collections.abc import Sequence

from splitserve import wire
from splitserve.clock import Clock
from splitserve.config import GatewayConfig
from splitserve.errors import NoWorker
from splitserve.gateway.hints import Hints
from splitserve.gateway.hub import WorkerHub
from splitserve.gateway.prompt_keys import PromptKeys
from splitserve.kv.keys import GRANULE
from splitserve.moments import Timeline
from splitserve.router.policy import Ask
from splitserve.router.split import SplitDecision, decide_split
from splitserve.wire import Leg


class Picker:
    """Of one request. Reasons go to its timeline."""

    def __init__(
        self,
        hub: WorkerHub,
        config: GatewayConfig,
        clock: Clock,
        timeline: Timeline,
        salt: str,
        max_tokens: int,
    ) -> None:
        self.near: frozenset[str] = frozenset()  # prefills go there, if they can
        self.silent: set[str] = set()  # workers that fell silent under this request
        self._hub = hub
        self._config = config
        self._clock = clock
        self._timeline = timeline
        self._max_tokens = max_tokens
        self._keys = PromptKeys(hub.identity_digest, salt)
        self._hints = Hints(hub, self._keys)

    def decide_split(self, token_ids: Sequence[int], num_failed_transfers: int) -> SplitDecision:
        decision = decide_split(
            self._config.split,
            len(token_ids),
            self._config.local_prefill_tokens,
            self._hub.router,
            num_failed_transfers,
        )
        self._timeline.notes.append(decision.reason)
        return decision

    async def pick(self, leg: Leg, token_ids: Sequence[int], until_s: float) -> str:
        """The best worker, waiting for one to come up if none lives; raise NoWorker."""
        while True:
            picked = self.pick_now(leg, token_ids)
            if picked is not None:
                return picked
            left_s = until_s - self._clock.now()
            try:
                await self._hub.wait_for_change(max(0.0, left_s))
            except TimeoutError:
                raise NoWorker(f"No worker for the {leg.value} leg came up in time.") from None

    def pick_now(self, leg: Leg, token_ids: Sequence[int], *, but: str = "") -> str | None:
        """The best worker of those that live now. but: one that is of no use; then no silent one is
        taken either."""
        ask = self._ask(leg, token_ids)
        picked = self._hub.router.pick(leg, ask)
        if picked is None:
            return None
        if but and (picked.worker_id == but or picked.worker_id in self.silent):
            return None
        self._timeline.notes.append(picked.reason)
        return picked.worker_id

    def make_hints(self, worker_id: str, leg: Leg, token_ids: Sequence[int]) -> list[wire.Hint]:
        """Who has leading blocks that a leg would compute: with the reason in the timeline."""
        if leg is Leg.DECODE or not self._config.hints:
            return []
        hints = self._hints.make(worker_id, token_ids, self._clock.now())
        for hint in hints:
            self._timeline.notes.append(
                f"hint: {hint.worker_id} has {hint.num_blocks} blocks, fetch "
                f"{hint.fetch_s * 1e3:.1f} ms, recompute {hint.recompute_s * 1e3:.1f} ms"
            )
        return hints

    def note_hint_failed(self, failed: wire.HintFailed, token_ids: Sequence[int]) -> None:
        self._hints.note_failed(failed, token_ids)
        self._timeline.num_hints_failed += 1

    def _ask(self, leg: Leg, token_ids: Sequence[int]) -> Ask:
        hub = self._hub
        ask = Ask(
            len(token_ids),
            self._clock.now(),
            num_output=min(float(self._max_tokens), hub.rates.output_tokens),
            avoid=frozenset(self.silent),
            near=frozenset() if leg is Leg.DECODE else self.near,
            bytes_per_token=hub.bytes_per_token,
            transfer_bytes_per_s=hub.rates.transfer_bytes_per_s,
            mean_output=hub.rates.output_tokens,
        )
        if hub.router.policy.by_prefix and len(hub.index):
            ask.hits = hub.router.hits(self._keys.granules(token_ids), GRANULE)
        return ask
