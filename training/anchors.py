"""Anchors: where the blocks of a row start. A function of (seed, epoch, row id) and of nothing else.

Shape suffixes: R rows, S tokens.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor


def eligible_anchors(supervised_S: Tensor) -> Tensor:
    """Ascending positions p at which p and p+1 are both supervised (METHODS section 1)."""
    return (supervised_S[:-1] & supervised_S[1:]).nonzero().flatten()


def count_anchors(prompts_R: np.ndarray, answers_R: np.ndarray, limit: int) -> np.ndarray:
    """How many eligible anchors rows have, from the lengths of their prompts and answers, int32 [R].

    Of the tokens within the limit those of the answer are supervised; each but the last is followed by another one.
    """
    cut_R = np.minimum(prompts_R + answers_R, limit)
    return np.maximum(cut_R - prompts_R - 1, 0).astype(np.int32)


def draw_anchors(supervised_S: Tensor, count: int, seed: int, epoch: int, row_id: str) -> Tensor:
    """Up to `count` anchors, uniform without replacement, ascending.

    Batch composition, world size and resuming change nothing, since only the arguments seed the draw. The row id is
    hashed with sha256: Python's own hash() is salted anew in every process.
    """
    eligible = eligible_anchors(supervised_S)
    digest = hashlib.sha256(f"{seed}/{epoch}/{row_id}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    order = torch.randperm(len(eligible), generator=generator)
    return eligible[order[:count]].sort().values
