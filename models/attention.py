"""Attention masks, each defined once: causal prefill, training blocks and trees. All boolean, True = visible.

Shape suffixes: R rows, S context length, N anchors a row, B block slots, M query tokens (root and tree nodes).
"""

from __future__ import annotations

import torch
from torch import Tensor


def block_mask(anchors_RN: Tensor, context_mask_RS: Tensor, block_size: int) -> Tensor:
    """Training mask [R, 1, N*B, S + N*B] (METHODS section 1).

    The queries of block n see context positions strictly before its anchor, since the anchor's own feature does not
    exist yet at inference, and the whole own block; never another block.

    Args:
        anchors_RN: anchor positions; padding anchors may hold any valid position.
        context_mask_RS: True at real context tokens.
    """
    rows, anchors = anchors_RN.shape
    positions_S = torch.arange(context_mask_RS.shape[1], device=anchors_RN.device)
    context_RNS = (positions_S < anchors_RN[..., None]) & context_mask_RS[:, None, :]
    context = context_RNS.repeat_interleave(block_size, dim=1)
    owner = torch.arange(anchors, device=anchors_RN.device).repeat_interleave(block_size)
    own = (owner[:, None] == owner[None, :]).expand(rows, -1, -1)
    return torch.cat([context, own], dim=-1)[:, None]


def causal_mask(lengths_R: Tensor, width: int) -> Tensor:
    """Prefill mask [R, 1, S, S] for right-padded rows. Padding queries see themselves, so that no row is empty."""
    positions = torch.arange(width, device=lengths_R.device)
    causal = positions[:, None] >= positions[None, :]
    real = positions[None, :] < lengths_R[:, None]
    return ((causal & real[:, None, :]) | torch.eye(width, dtype=torch.bool, device=lengths_R.device))[:, None]


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
