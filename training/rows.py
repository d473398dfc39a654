"""The training set: answered rows, the anchors of the current epoch, and stored features where they exist."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from torch.utils.data import Dataset

from data.answers import AnswerRow
from data.batches import Sample, pack_samples, row_tensors
from training.anchors import draw_anchors, eligible_anchors
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
        counts = [self._anchors(row) for row in rows]
        self.rows = [row for row, count in zip(rows, counts, strict=True) if count]
        self.anchor_counts = [min(count, anchors_per_row) for count in counts if count]
        self.skipped = len(rows) - len(self.rows)
        if self.skipped:
            log.warning("%d of %d rows hold no two adjacent answer tokens and are skipped", self.skipped, len(rows))

    def _anchors(self, row: AnswerRow) -> int:
        return len(eligible_anchors(row_tensors(row.prompt_ids, row.answer_ids, self.limit)[1]))

    @property
    def documents(self) -> TrainingRows:
        """The rows one by one, packed or not."""
        return self

    def length(self, index: int) -> int:
        """Tokens of a row after the cut."""
        row = self.rows[index]
        return min(self.limit, len(row.prompt_ids) + len(row.answer_ids))

    def sizes(self) -> tuple[int, int]:
        """Anchors and tokens of the largest row."""
        return max(self.anchor_counts), max(map(self.length, range(len(self.rows))))

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
        lengths = [documents.length(i) for i in range(len(documents))]
        self.rows = best_fit(lengths, documents.limit)

    def sizes(self) -> tuple[int, int]:
        """Anchors and tokens of the largest row."""
        counts, length = self.documents.anchor_counts, self.documents.length
        return (
            max(sum(counts[i] for i in row) for row in self.rows),
            max(sum(map(length, row)) for row in self.rows),
        )

    def set_epoch(self, epoch: int) -> None:
        self.documents.set_epoch(epoch)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        return pack_samples([self.documents[i] for i in self.rows[index]])


def best_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Indices of items gathered to bins of at most `capacity`: longest first, each into the fullest bin that takes it.

    Bins with r free are stacked under r, and bit r of `free` says whether there are any, so that the search for the
    fullest is one step whatever the number of bins. Order among equal lengths is that of the indices.
    """
    bins: list[list[int]] = []
    stacks: list[list[int]] = [[] for _ in range(capacity + 1)]
    free = 0
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        length = lengths[index]
        enough = free >> length
        if enough:
            room = length + (enough & -enough).bit_length() - 1
            number = stacks[room].pop()
            if not stacks[room]:
                free &= ~(1 << room)
        else:
            room, number = capacity, len(bins)
            bins.append([])
        bins[number].append(index)
        stacks[room - length].append(number)
        free |= 1 << (room - length)
    return bins
