"""Chains that end early: the confidence head says how likely each drafted token is accepted, given those before it.

A chain is cut before its first token whose confidence lies below the threshold, so that the target does not verify what
it would reject. The confidence is sigmoid(logit / temperature); the head is trained on its own probabilities at T=1,
and the temperature, measured by `bash launch.sh calibrate`, turns it into the acceptance rate of real decoding.

Source: DSpark (arXiv 2607.05147). Shape suffixes: R requests, T depths, N nodes of the tree.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from models.bundle import Drafter

from .policy import TreeOptions
from .tree import Draft, Tree


def check_confidence(drafter: Drafter, options: TreeOptions) -> None:
    """Raises ValueError for a threshold on a drafter that has no confidence head."""
    if options.confidence_threshold > 0 and drafter.model.confidence_head is None:
        raise ValueError(
            f"confidence_threshold {options.confidence_threshold} needs a drafter that was trained with "
            "enable_confidence_head; this one has no confidence head"
        )


def chain_confidence(draft: Draft, drafter: Drafter, tokens_RT: Tensor) -> Tensor:
    """Logits [R, T], fp32, that the target accepts each token of a chain."""
    hidden_RTD = draft.hidden_RTD[:, : tokens_RT.shape[1]]
    return drafter.model.confidence_logits(hidden_RTD, draft.anchor_R, tokens_RT).float()


def cut_chain(tree: Tree, draft: Draft, drafter: Drafter, options: TreeOptions) -> Tree:
    """The chain up to its first token of low confidence; possibly nothing. A threshold of 0 cuts nothing."""
    if options.confidence_threshold == 0 or tree.width == 0:
        return tree
    logits_RN = chain_confidence(draft, drafter, tree.tokens_RN)
    confident_RN = torch.sigmoid(logits_RN / options.confidence_temperature) >= options.confidence_threshold
    lengths = (confident_RN & tree.real_RN).long().cumprod(dim=1).sum(dim=1).tolist()
    width = max(lengths)
    names = ("tokens_RN", "parents_RN", "depths_RN", "scores_RN", "ranks_RN")
    return replace(tree, sizes=lengths, **{name: getattr(tree, name)[:, :width] for name in names})
