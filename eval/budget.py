"""One tree budget for each temperature of a run: measured verify cost against acceptance on *training* prompts.

A larger tree is accepted deeper but costs more to verify. Nodes of a pruned tree carry their best-first rank, and the
tree of budget b is exactly the nodes of rank < b, so that one run at the largest budget gives tau(b) for every smaller
one. No evaluated prompt takes part. `decoding/policy.py` holds the rules that choose a budget in every round instead.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from models.target import Target

from .decoding.cache import TreeCache
from .decoding.loop import Answer, Clock

# With the root these fill whole tiles of matrix kernels: verifying 17 tokens was seen to cost a quarter more than 16.
SIZES = (3, 7, 11, 15, 23, 31, 47, 63)
SAME_SPEED = 0.98  # measured speeds this close are the same, and the smaller tree leaves room for more requests


@dataclass
class BudgetChoice:
    """Attributes: budget: the chosen B; curve: a row {budget, tau, verify_ms, round_ms, tokens_per_second} a size;
    temperature: at which tau was measured, greedy where what was stored does not say it."""

    budget: int
    curve: list[dict]
    temperature: float = 0.0


@torch.inference_mode()
def verify_cost(
    target: Target, tap_ids: tuple[int, ...], sizes: Sequence[int], context: int, repeats: int = 9, requests: int = 1
) -> dict[int, float]:
    """Seconds of one target forward over the root and b nodes after `context` tokens: the best of `repeats`, sizes
    interleaved (whatever else the machine does only adds, and never to all sizes alike).

    Args:
        requests: trees of so many requests in the one forward, all of this size and context.
    """
    device, clock = target.device, Clock(target.device, *target.layer_devices)
    cache = TreeCache.for_config(target.config, requests, context + max(sizes) + 1, target.dtype, target.layer_devices)
    cache.lengths = [context] * requests
    lengths_R = torch.tensor(cache.lengths, device=device)
    times: dict[int, list[float]] = {size: [] for size in sizes}
    for repeat in range(repeats + 2):
        for size in sizes:
            # A chain under the root is a tree like any other: the mask's pattern does not change the cost.
            depths_RM = torch.arange(size + 1, device=device).expand(requests, -1)
            start = clock.now()
            width = cache.place(context + torch.arange(size + 1).expand(requests, -1))
            mask = target.tree_masks((depths_RM - 1).clamp(min=0), depths_RM, lengths_R, width)
            target.forward(
                torch.zeros_like(depths_RM), tap_ids, position_ids=context + depths_RM, mask=mask, cache=cache
            )
            if repeat >= 2:  # the first turns warm up
                times[size].append(clock.now() - start)
    return {size: min(values) for size, values in times.items()}


def tau_at(answers: list[Answer], budget: int) -> float:
    """Mean tokens a round if only nodes of rank < budget had been proposed; mean over answers that had rounds."""
    taus = []
    for answer in answers:
        # A path is closed under parents and ranks rise along it, so the accepted nodes kept are a prefix of it.
        lengths = [1 + sum(rank < budget for rank in ranks) for ranks in answer.accepted_ranks]
        if lengths:
            taus.append(statistics.fmean(lengths))
    return statistics.fmean(taus) if taus else 1.0


def choose_budget(answers: list[Answer], cost: dict[int, float], temperature: float = 0.0) -> BudgetChoice:
    """The smallest budget within `SAME_SPEED` of the most expected tokens per measured second, which are
    tau(b) / (draft + tree + commit + verify(b)).

    Args:
        answers: decoded by dartree_pruned at this temperature and a budget no smaller than the largest size of `cost`.
        cost: seconds of verification for each candidate budget.
    """
    rounds = [r for answer in answers for r in answer.rounds]
    if not rounds:
        raise ValueError(
            "choose_budget: the training prompts gave no round; give more prompts or --choose_budget false"
        )
    # The best of the rounds, as `verify_cost` takes the best of its repeats.
    other = min(r.draft + r.tree + r.commit for r in rounds)
    curve = []
    for size, seconds in sorted(cost.items()):
        tau = tau_at(answers, size)
        speed = tau / (other + seconds)
        curve.append(
            {
                "budget": size,
                "tau": tau,
                "verify_ms": 1e3 * seconds,
                "round_ms": 1e3 * (other + seconds),
                "tokens_per_second": speed,
            }
        )
    best = max(row["tokens_per_second"] for row in curve)
    chosen = next(row["budget"] for row in curve if row["tokens_per_second"] >= SAME_SPEED * best)
    return BudgetChoice(chosen, curve, temperature)
