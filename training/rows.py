"""The training set: answered rows, the anchors of the current epoch, and stored features where they exist."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.utils.data import Dataset

from data.batches import Sample, row_tensors
from training.anchors import draw_anchors, eligible_anchors

log = logging.getLogger(__name__)


class TrainingRows(Dataset):
    """Rows that hold at least one anchor; the others are counted in `skipped` (TRAPS 10)."""

    def __init__(
        self,
        rows: Sequence,
        limit: int,
        anchors_per_row: int,
        seed: int,
        features: Callable[[str], Tensor] | None = None,
    ):
        """
        Args:
            rows: answered rows with `id`, `prompt_ids` and `answer_ids`.
            limit: rows are cut here (tokens).
            features: row id -> taps [tokens, L*D]; None when they are captured online.
        """
        self.limit, self.anchors_per_row, self.seed, self.features = limit, anchors_per_row, seed, features
        self.rows = [row for row in rows if self._usable(row)]
        self.skipped = len(rows) - len(self.rows)
        self.epoch = 0
        if self.skipped:
            log.warning("%d of %d rows hold no two adjacent answer tokens and are skipped", self.skipped, len(rows))

    def _usable(self, row) -> bool:
        return len(eligible_anchors(row_tensors(row.prompt_ids, row.answer_ids, self.limit)[1])) > 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Sample:
        row = self.rows[index]
        tokens, supervised = row_tensors(row.prompt_ids, row.answer_ids, self.limit)
        anchors = draw_anchors(supervised, self.anchors_per_row, self.seed, self.epoch, row.id)
        return Sample(row.id, tokens, supervised, anchors, None if self.features is None else self.features(row.id))
