"""Batches whose steps are started on a GPU before the tokens of the step before are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from oncurve.core.draw import draw, uniforms
from oncurve.core.requests import PAST, PROMPT_TOKENS
from oncurve.core.scheduler import RowBatch
from oncurve.model.decode_memory import NEWEST
from oncurve.model.decoding import LayerDecoder, first_above_on_device

if TYPE_CHECKING:
    from oncurve.model.decode_cuda_graph import DeviceDraw


@dataclass(frozen=True, eq=False)
class PendingDraw:
    """A step that was started and whose tokens nobody has looked at."""

    rows: np.ndarray
    serials: np.ndarray
    """Serial numbers of these rows when it began."""
    drawn: DeviceDraw


class AheadBatch(RowBatch):
    """Rows whose next step is started at once where the decoder draws by itself."""

    _pending: PendingDraw | None = None

    def advance(self) -> None:
        """One more token for every running row, or the start of it."""
        if (ahead := self._ahead()) is not None:
            self._start_step(ahead)
        else:
            self.settle()
            super().advance()

    def close(self) -> None:
        """Give back what decoding has taken of a device's memory."""
        self._pending = None
        super().close()

    def _ahead(self) -> LayerDecoder | None:
        """The decoder, where nothing but uniform numbers decides about the tokens of the next step."""
        decoder = self.decoder
        if not isinstance(decoder, LayerDecoder) or not decoder.draws or self.params.cuts or not len(self.rows.running):
            return None
        rows, running = self.rows, self.rows.running
        is_late = rows.lengths[running] - rows.begins[running] >= self.params.min_completion_tokens
        has_read = rows.addresses[running, PAST] + 1 >= rows.lengths[running]
        return decoder if (is_late & has_read).all() else None

    def _start_step(self, ahead: LayerDecoder) -> None:
        """Start a step, and only then look at the tokens of the step before.

        Rows that turn out to have ended with these are computed once more for nothing.
        """
        rows = self.rows
        if self.decoder.mover is not None and rows.are_sparse:
            self.settle()
            self.compact()
        running = rows.running
        written = rows.addresses[running, PAST] + 1 - rows.begins[running]
        goes = written < rows.limits[running]
        started = None
        if goes.any():
            running, written = running[goes], written[goes]
            addresses = rows.addresses[running]
            past = addresses[:, PAST]
            tokens = np.where(past < rows.lengths[running], rows.tokens[running, past], NEWEST)
            rows.addresses[running, PAST] = past + 1
            last_tokens, at, where = (
                torch.from_numpy(array) for array in (tokens, addresses[:, PROMPT_TOKENS] + past, addresses)
            )
            drawn = ahead.draw(last_tokens, at, where, uniforms(rows.keys[running], written), self._choose)
            started = PendingDraw(running, rows.serials[running], drawn)
        self.settle()
        self._pending = started

    def _choose(self, logits: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
        return draw(logits, uniform, self.params, find=first_above_on_device)

    def settle(self) -> None:
        """Write down the tokens that are under way, but those of rows that have ended since they were asked for."""
        step, self._pending = self._pending, None
        if step is not None:
            tokens, logprobs = step.drawn.get()
            runs = self.rows.are_there(step.rows, step.serials)
            self.record(step.rows[runs], tokens[runs], logprobs[runs])
