"""The training set: answered rows, the anchors of the current epoch, and stored features where they exist.

Rows stay in their memory-mapped table; what is kept of each is a few numbers in arrays (suffix R: rows).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np
from torch.utils.data import Dataset

from data.answers import AnswerRow
from data.batches import Sample, pack_samples, row_tensors
from data.rows import as_rows
from training.anchors import count_anchors, draw_anchors
from training.packing import best_fit
from training.sources import OnlineSource

log = logging.getLogger(__name__)


class TrainingSet(Dataset):
    """What both forms of the training set share: `source`, `fixed_shapes`, `skipped`, `documents` and `sizes()`."""

    def collate_options(self) -> dict:
        """Arguments of `data.batches.collate` that follow from the data set. A source that keeps what a step captures
        needs whole rows."""
        return {"sizes": self.sizes() if self.fixed_shapes else (1, 1), "whole": self.source.keeps}


class TrainingRows(TrainingSet):
    """Rows that hold at least one anchor; the others are counted in `skipped` (TRAPS 10)."""

    def __init__(
        self,
        rows: Sequence[AnswerRow],
        limit: int,
        anchors_per_row: int,
        seed: int,
        source: OnlineSource | None = None,
        fixed_shapes: bool = False,
    ):
        """
        Args:
            rows: answered rows.
            limit: rows are cut here (tokens).
            source: where features are found; None captures them online.
            fixed_shapes: pad every batch to the sizes of the largest row.
        """
        self.limit, self.anchors_per_row, self.seed = limit, anchors_per_row, seed
        self.source, self.fixed_shapes, self.epoch = source or OnlineSource(), fixed_shapes, 0
        rows = as_rows(rows)
        counts_R = count_anchors(rows.prompt_lengths, rows.answer_lengths, limit)
        kept = np.flatnonzero(counts_R)
        self.rows = rows if len(kept) == len(rows) else rows.select(kept)
        self.lengths_R = np.minimum(self.rows.lengths, limit)  # after the cut
        self.anchor_counts = np.minimum(counts_R[kept], anchors_per_row)
        self.skipped = len(rows) - len(self.rows)
        if self.skipped:
            log.warning("%d of %d rows hold no two adjacent answer tokens and are skipped", self.skipped, len(rows))

    @property
    def documents(self) -> TrainingRows:
        """The rows one by one, packed or not."""
        return self

    def sizes(self) -> tuple[int, int]:
        """Anchors and tokens of the largest row."""
        return int(self.anchor_counts.max()), int(self.lengths_R.max())

    def set_epoch(self, epoch: int) -> None:
        """Redraws the anchors. All ranks call it, before the loader of the epoch starts its workers."""
        self.epoch = epoch
        self.source.start_epoch()

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        row = self.rows[index]
        tokens, supervised = row_tensors(row.prompt_ids, row.answer_ids, self.limit)
        anchors = draw_anchors(supervised, self.anchors_per_row, self.seed, self.epoch, row.id)
        taps, final = self.source.get(row) or (None, None)
        return Sample(row.id, tokens, supervised, anchors, taps, final)


class PackedRows(TrainingSet):
    """Rows that hold several conversations each, up to `limit` tokens together.

    A conversation keeps the anchors that it has alone; which ones share a row changes no loss (TRAPS 9).
    """

    def __init__(self, documents: TrainingRows):
        self.documents, self.skipped = documents, documents.skipped
        self.source, self.fixed_shapes = documents.source, documents.fixed_shapes
        self.rows = best_fit(documents.lengths_R, documents.limit)

    def sizes(self) -> tuple[int, int]:
        """Anchors and tokens of the largest row."""
        return self.rows.largest(self.documents.anchor_counts), self.rows.largest(self.documents.lengths_R)

    def set_epoch(self, epoch: int) -> None:
        self.documents.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return pack_samples([self.documents[i] for i in self.rows[index].tolist()])
