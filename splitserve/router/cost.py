"""Policy `cost`: predicted seconds (Mooncake's Algorithm 1 in spirit, over pairs).

Prefill on p: the prompt tokens ahead of it in line, then the tokens that p's cache lacks; or, where
that is faster, fetching what another holder has and computing the rest. So a session goes back to
where its prefix is for as long as that saves seconds, and no longer.

Decode on d: fetching what d lacks, its own answer at d's pace with one more in the batch, what the
others there lose by it, and the wait for blocks if d's pool has too few.
"""

from __future__ import annotations

import numpy as np

from splitserve.router.fleet import Fleet, Floats, Ints
from splitserve.router.policy import Ask, Policy
from splitserve.wire import Leg

ASK_S = 5e-3  # of a hint: what it takes to ask the holder


class Cost(Policy):
    name = "cost"
    unit = " s"
    by_prefix = True

    def __init__(self, fleet: Fleet) -> None:
        super().__init__(fleet)

    def score(self, leg: Leg, slots: Ints, ask: Ask) -> Floats:
        if leg is Leg.PREFILL:
            return self.ttft_s(slots, ask)
        if leg is Leg.DECODE:
            return self.transfer_s(slots, ask) + self.decode_s(slots, ask)
        return self.ttft_s(slots, ask) + self.decode_s(slots, ask)

    def between(self, prefill: Ints, decode: Ints, ask: Ask) -> Floats | float:
        """Where both are one worker nothing is transferred."""
        same = prefill[:, None] == decode[None, :]
        if not same.any():
            return 0.0
        result: Floats = -self.transfer_s(decode, ask)[None, :] * same
        return result

    # --- predictions, vectorised over workers

    def queue_s(self, slots: Ints) -> Floats:
        """Until what is ahead in line is computed."""
        result: Floats = self.fleet.pending[slots] * self.fleet.token_s[slots]
        return result

    def prefill_s(self, slots: Ints, ask: Ask) -> Floats:
        """To compute what each lacks, or to fetch it from whoever has most."""
        best = float(ask.hits.max()) if len(ask.hits) else 0.0
        if best <= 0.0:
            return self._compute_s(slots, np.zeros(len(slots)), ask)
        hits, num = ask.hits[slots], len(slots)
        both = np.concatenate([hits, np.full(num, best)])  # one pass over twice as many is cheaper
        computed = self._compute_s(np.concatenate([slots, slots]), both, ask)
        own, fetched = computed[:num], computed[num:]
        fetched += (best - hits) * (ask.bytes_per_token / ask.transfer_bytes_per_s)
        fetched += ASK_S * (hits < best)
        result: Floats = np.minimum(own, fetched)
        return result

    def ttft_s(self, slots: Ints, ask: Ask) -> Floats:
        return self.queue_s(slots) + self.prefill_s(slots, ask)

    def transfer_s(self, slots: Ints, ask: Ask) -> Floats:
        lacking = ask.num_tokens - ask.hits_at(slots)
        result: Floats = lacking * ask.bytes_per_token / ask.transfer_bytes_per_s
        return result

    def tpot_s(self, slots: Ints, ask: Ask) -> tuple[Floats, Floats]:
        """Of a step with all legs of each: (and this one, without it). Each leg attends to what
        those in the batch do on the mean."""
        fleet, num = self.fleet, len(slots)
        running, context = fleet.running[slots], fleet.context[slots]
        legs = np.maximum(fleet.legs[slots], running)
        context = context * (legs / np.maximum(running, 1.0))
        both = fleet.step_s(
            np.concatenate([slots, slots]),
            np.concatenate([legs + 1.0, np.maximum(legs, 1.0)]),
            np.concatenate([context + ask.num_tokens, context]),
        )
        return both[:num], both[num:]

    def decode_s(self, slots: Ints, ask: Ask) -> Floats:
        fleet = self.fleet
        tpot, before = self.tpot_s(slots, ask)
        legs = fleet.legs[slots]
        result: Floats = tpot * ask.num_output
        result += (tpot - before) * legs * (ask.mean_output / 2)
        needed = (ask.num_tokens + ask.num_output) / fleet.block_size[slots] + 1.0
        short = needed - fleet.free_blocks[slots]
        if short.max() > 0.0:
            share = np.maximum(short, 0.0) / fleet.num_blocks[slots]
            result += share * ask.mean_output * tpot * np.maximum(legs, 1.0)
        return result

    def _compute_s(self, slots: Ints, hits: Floats, ask: Ask) -> Floats:
        fleet = self.fleet
        lacking = np.maximum(ask.num_tokens - hits, 1.0)
        budget = fleet.budget[slots]
        # attention: of its own tokens, and in each step of those that decode beside it
        context = (ask.num_tokens**2 - hits**2) / 2
        context += np.ceil(lacking / budget) * fleet.context[slots]
        first = np.minimum(lacking, budget)
        result: Floats = fleet.step_s(slots, first, context)
        result += (lacking - first) * fleet.token_s[slots]
        return result
