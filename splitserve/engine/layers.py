"""Layers of a step's blocks, pushed while the next ones are computed (design §4)."""

from __future__ import annotations

from dataclasses import dataclass

from splitserve import wire
from splitserve.connector.base import WorkerSide
from splitserve.connector.jobs import PushJob
from splitserve.engine.sequence import Sequence
from splitserve.engine.step import StepPlan


@dataclass(slots=True)
class _Piece:
    """Blocks [first, stop) of a sequence, by index, that a step fills."""

    sequence: Sequence
    first: int
    stop: int
    next_layer: int = 0  # of those to be pushed

    @property
    def indices(self) -> range:
        landing = self.sequence.landing
        assert landing is not None
        return range(max(self.first, landing.first), self.stop)


class LayerPush:
    """Of one step. A landing that comes in its middle gets the layers before, too."""

    def __init__(
        self,
        plan: StepPlan,
        sequences: dict[str, Sequence],
        block_size: int,
        worker: WorkerSide,
    ) -> None:
        self._worker = worker
        self._pieces = []
        for item in plan.items:
            sequence = sequences[item.request_id]
            if sequence.leg is not wire.Leg.PREFILL or sequence.grain is not wire.Grain.LAYER:
                continue
            end = item.start + len(item.token_ids)
            stop = -(-end // block_size) if item.draw is not None else end // block_size
            self._pieces.append(_Piece(sequence, item.start // block_size, stop))

    def on_layer(self, layer: int) -> None:
        for piece in self._pieces:
            if piece.sequence.landing is not None and piece.indices:
                for one in range(piece.next_layer, layer + 1):
                    self._push(piece, one)
                piece.next_layer = layer + 1

    def note_whole(self) -> None:
        """The step succeeded: what was pushed up to the last layer is there as a whole."""
        for piece in self._pieces:
            if piece.next_layer:
                piece.sequence.layered.update(piece.indices)

    def _push(self, piece: _Piece, layer: int) -> None:
        landing, blocks = piece.sequence.landing, piece.sequence.table.blocks
        assert landing is not None
        self._worker.start_push(
            PushJob(
                "",
                landing,
                [blocks[i] for i in piece.indices],
                [landing.block_ids[i - landing.first] for i in piece.indices],
                layer,
            )
        )
