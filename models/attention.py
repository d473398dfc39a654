"""Attention masks of prefill and verification, each defined once. All boolean, True = visible.

Training has its own rule (training/attention.py). Shape suffixes: R rows, S context length, M query tokens (root and
tree nodes), T columns of the cache.
"""

from __future__ import annotations

import torch
from torch import Tensor


def causal_mask(lengths_R: Tensor, width: int) -> Tensor:
    """Prefill mask [R, 1, S, S] for right-padded rows. Padding queries see themselves, so that no row is empty."""
    positions = torch.arange(width, device=lengths_R.device)
    causal = positions[:, None] >= positions[None, :]
    real = positions[None, :] < lengths_R[:, None]
    return ((causal & real[:, None, :]) | torch.eye(width, dtype=torch.bool, device=lengths_R.device))[:, None]


def document_mask(positions_RS: Tensor) -> Tensor:
    """Causal mask [R, 1, S, S] of rows that hold several documents, each of which counts its positions from 0.

    Tokens are of one document when it starts at the same column. Padding, whatever its positions, sees itself at least.
    """
    columns = torch.arange(positions_RS.shape[1], device=positions_RS.device)
    starts_RS = columns - positions_RS
    same = starts_RS[:, :, None] == starts_RS[:, None, :]
    return (same & (columns[:, None] >= columns[None, :]))[:, None]


def ancestor_mask(parents_RM: Tensor) -> Tensor:
    """Which tree tokens each tree token sees: itself and its ancestors, [R, M, M].

    Args:
        parents_RM: index of each token's parent among the M; the root (index 0) is its own parent.
    """
    size = parents_RM.shape[1]
    mask = torch.eye(size, dtype=torch.bool, device=parents_RM.device).expand(*parents_RM.shape, size).clone()
    jump = parents_RM
    # Pointer jumping: after k turns a token knows its 2^k nearest ancestors.
    for _ in range(max(1, (size - 1).bit_length())):
        mask = mask | mask.gather(1, jump[..., None].expand(-1, -1, size))
        jump = jump.gather(1, jump)
    return mask


def tree_mask(parents_RM: Tensor, lengths_R: Tensor, width: int) -> Tensor:
    """Verification mask [R, 1, M, width]: the request's first `length` columns, then the ancestors.

    The M tree tokens of a request are stored in the columns `length .. length + M - 1` of its cache.
    """
    rows, size = parents_RM.shape
    columns = torch.arange(width, device=parents_RM.device)
    mask = (columns[None, :] < lengths_R[:, None])[:, None, :].expand(rows, size, width).clone()
    own = lengths_R[:, None] + torch.arange(size, device=parents_RM.device)
    return mask.scatter(2, own[:, None, :].expand(rows, size, size), ancestor_mask(parents_RM))[:, None]


def tree_positions(depths_RM: Tensor, lengths_R: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Positions [R, M] of the tree tokens and [R, T] of the columns, which `tree_mask` orders alike.

    A committed token's column is its position; the columns of tree tokens have length + depth, so that siblings share
    one (TRAPS 40).
    """
    columns_T = torch.arange(width, device=depths_RM.device)
    own_RM = lengths_R[:, None] + torch.arange(depths_RM.shape[1], device=depths_RM.device)
    queries_RM = lengths_R[:, None] + depths_RM
    return queries_RM, columns_T.repeat(len(lengths_R), 1).scatter(1, own_RM, queries_RM)


def window_mask(queries_RM: Tensor, keys_RT: Tensor, window: int) -> Tensor:
    """Which keys lie less than `window` positions before a query, [R, 1, M, T]: transformers' sliding window.

    On a tree the distance between positions is the distance along the path, and not between columns (TRAPS 44).
    """
    return (queries_RM[:, :, None] - keys_RT[:, None, :] < window)[:, None]
