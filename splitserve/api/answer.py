"""From a journey's token ids to the text that the client sees."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from splitserve.api.logprobs import LogprobWriter
from splitserve.api.responses import FinishReason
from splitserve.errors import SplitserveError
from splitserve.gateway.journey import Journey
from splitserve.text.detokenizer import Detokenizer
from splitserve.text.stops import StopScanner


class Answer:
    """One choice. After `texts` has ended, `finish_reason` and `num_tokens` are final."""

    def __init__(
        self,
        journey: Journey,
        task: asyncio.Task[None],
        detokenizer: Detokenizer,
        stop_strings: tuple[str, ...],
        logprobs: LogprobWriter | None = None,
    ) -> None:
        self.journey = journey
        self.finish_reason: FinishReason = "stop"
        self.num_tokens = 0
        self._task = task
        self._detokenizer = detokenizer
        self._stops = StopScanner(stop_strings)
        self._stop_ids = frozenset(journey.request.sampling.stop_ids)
        self._logprobs = logprobs
        self._num_told = 0
        self._min_tokens = journey.request.sampling.min_tokens

    async def texts(self) -> AsyncIterator[str]:
        """Pieces of text as they become final, never empty; raise the journey's error.

        If the reader is slow, what came in the meantime is one piece.
        """
        journey = self.journey
        while True:
            await journey.wait_beyond(self.num_tokens)
            text, stopped = self._read(journey.output_ids)
            if text:
                yield text
            if stopped:
                journey.stop()
                self._task.cancel()
                return
            if journey.is_over and self.num_tokens == len(journey.output_ids):
                break
        if journey.error is not None:
            raise journey.error
        self.finish_reason = "length" if journey.end_reason == "length" else "stop"
        text, stopped = self._stops.push(self._detokenizer.finish())
        if stopped:
            self.finish_reason = "stop"
        text += self._stops.flush()
        if text:
            yield text

    def take_logprobs(self) -> dict[str, Any] | None:
        """Log-probabilities of the tokens read since the last call; None if not asked for."""
        if self._logprobs is None:
            return None
        told = slice(self._num_told, self.num_tokens)
        self._num_told = self.num_tokens
        journey = self.journey
        return self._logprobs.take(journey.output_ids[told], journey.logprobs[told])

    def give_up(self, error: SplitserveError) -> None:
        """Nobody will read the rest, for this reason: it is counted so."""
        if not self.journey.is_over:
            self.journey.error = error

    def cancel(self) -> None:
        """The client wants no more of it."""
        self._task.cancel()

    def _read(self, output_ids: list[int]) -> tuple[str, bool]:
        """Text of the ids not read yet, up to a stop string; none is looked for in the first
        min_tokens tokens. A stop id has no text, like an EOS."""
        pieces = []
        stopped = False
        while self.num_tokens < len(output_ids) and not stopped:
            token_id = output_ids[self.num_tokens]
            self.num_tokens += 1
            piece = "" if token_id in self._stop_ids else self._detokenizer.push(token_id)
            if self.num_tokens > self._min_tokens and piece:
                piece, stopped = self._stops.push(piece)
            pieces.append(piece)
        return "".join(pieces), stopped

    @property
    def error(self) -> SplitserveError | None:
        return self.journey.error
