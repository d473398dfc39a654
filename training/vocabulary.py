"""The draft vocabulary: the most frequent tokens of the answers, so that head and loss are small (V draft tokens)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from data.answers import AnswerRow
from data.rows import as_rows


def choose_draft_ids(
    rows: Sequence[AnswerRow], size: int, vocab_size: int, always: Sequence[int], never: int
) -> Tensor | None:
    """Ascending ids of the `size` most frequent answer tokens; None when size is 0 or covers the whole vocabulary.

    Ties go to the lower id, so that every rank and every restart chooses alike.

    Args:
        always: ids kept whatever their count (the eos ids: without them no draft can end an answer).
        never: the mask id, which the target never emits.
    """
    if not 0 < size < vocab_size:
        return None
    counts = answer_counts(rows, vocab_size)
    counts[list(always)] = counts.max() + 1
    counts[never] = -1
    order = torch.sort(counts, descending=True, stable=True).indices
    return order[:size].sort().values


def answer_counts(rows: Sequence[AnswerRow], vocab_size: int) -> Tensor:
    """How often each token occurs in the answers, int64 [vocabulary]."""
    return torch.from_numpy(as_rows(rows).token_counts(vocab_size))


def coverage(rows: Sequence[AnswerRow], draft_ids: Tensor | None, vocab_size: int) -> float:
    """Share of the answers' tokens that the drafter can propose."""
    if draft_ids is None:
        return 1.0
    counts = answer_counts(rows, vocab_size)
    return (counts[draft_ids].sum() / counts.sum().clamp(min=1)).item()
