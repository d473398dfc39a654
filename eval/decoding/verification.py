"""Verification: the target's tokens along the tree, a pure function of logits, tree and uniforms.

Greedy or sampled, the rule is one: at each visited node the *target* chooses the next token, and the walk goes on while
that token is a child. Every emitted token is thus the target's own, whatever was proposed (chains too: METHODS 3).

At temperature T the choice inverts the cumulative distribution of softmax(logits / T) at a uniform that belongs to the
request and to the position of the token in its answer. Draft and target therefore share no random stream (TRAP 37),
neighbours in a batch change nothing, and in exact arithmetic every method emits the same sample as autoregressive
decoding does.

Shape suffixes: R requests, M tree tokens (root first), V vocabulary, S steps of the walk.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .tree import Tree


@dataclass
class Verification:
    """What the target says of a tree.

    Attributes:
        paths: for each request the accepted nodes (0-based), in order of depth.
        emitted: for each request the accepted tokens and the bonus token: one more than the path is long.
    """

    paths: list[list[int]]
    emitted: list[list[int]]


def choose_tokens(logits_RV: Tensor, temperature: float, uniforms_R: Tensor) -> Tensor:
    """The target's next tokens [R]: argmax at temperature 0, else the sample that the uniforms pick.

    Raises ValueError for NaN logits. fp64 sums keep a 150k-token cumulative distribution exact enough to invert.
    """
    # One pass for both: NaN wins every maximum, and on a CPU `argmax` takes four times as long in bf16.
    best = logits_RV.max(dim=-1)
    if torch.isnan(best.values).any():
        raise ValueError("the target's logits hold NaN: its weights or dtype are broken")
    if temperature == 0:
        return best.indices
    return invert(torch.softmax(logits_RV.float() / temperature, dim=-1), uniforms_R)


def invert(probs_RV: Tensor, uniforms_R: Tensor) -> Tensor:
    """Tokens [R] at which the cumulative distribution passes the uniforms. Weights need not sum to one."""
    cumulative = probs_RV.double().cumsum(dim=-1)
    # The last possible token takes what rounding leaves above the sum; a zero-probability one can never be chosen.
    target = uniforms_R.to(cumulative)[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True).squeeze(1).clamp(max=probs_RV.shape[-1] - 1)


def verify(logits_RMV: Tensor, tree: Tree, temperature: float, uniforms_RS: Tensor) -> Verification:
    """Walks each tree from the root along the target's choices.

    Args:
        logits_RMV: the target's logits at the root and at each node.
        uniforms_RS: uniforms in [0, 1) for the successive tokens of this round, S > depth of the tree.
    """
    requests = logits_RMV.shape[0]
    rows = torch.arange(requests, device=logits_RMV.device)
    current, alive = torch.zeros_like(rows), [True] * requests
    real_RN = tree.real_RN
    paths: list[list[int]] = [[] for _ in range(requests)]
    emitted: list[list[int]] = [[] for _ in range(requests)]
    for step in range(max(tree.max_depths) + 1):
        token_R = choose_tokens(logits_RMV[rows, current], temperature, uniforms_RS[:, step])
        child_RN = (tree.parents_RN == current[:, None]) & (tree.tokens_RN == token_R[:, None]) & real_RN
        if tree.width:
            found_R, place_R = child_RN.any(dim=1), child_RN.long().argmax(dim=1)
        else:
            found_R, place_R = torch.zeros_like(rows, dtype=torch.bool), torch.zeros_like(rows)
        # One transfer a step: on a GPU each one waits for the device.
        told = torch.stack([token_R, torch.where(found_R, place_R, -1)]).tolist()
        for r, (token, place) in enumerate(zip(*told, strict=True)):
            if alive[r]:
                emitted[r].append(token)
                if place >= 0:
                    paths[r].append(place)
                alive[r] = place >= 0
        if not any(alive):
            break
        current = torch.where(found_R, place_R + 1, current)
    return Verification(paths, emitted)
