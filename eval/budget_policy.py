"""The budget policies of an evaluation, and what the cost-aware one is measured from before it decodes.

Measured at the start, on training prompts only: seconds of verifying trees of several sizes, after several contexts,
for several requests at once; seconds of everything else in a round; and the exponent that makes the drafter's path
probabilities add up to what the target accepts (`decoding/policy.py` says how they are used).

Shape suffix: N nodes of all trees together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.checkpoint import Drafter
from models.target import Target

from .budget import verify_cost
from .decoding.cost import RoundCost
from .decoding.loop import Batch, Request, generate
from .decoding.policy import AdaptiveBudget, BudgetPolicy, CostAwareBudget, TreeOptions, parse_levels
from .decoding.proposals import DraftProposer
from .decoding.tree import Draft, Tree

METHOD = "dartree_pruned"
SIZES = (0, 4, 8, 16, 32, 64, 128, 256)
# Tokens of one forward up to which costs are measured: a larger one takes seconds on a CPU and pays nowhere.
MOST_TOKENS = 520
ANSWER_TOKENS = 32


@dataclass
class BudgetCalibration:
    """Attributes: cost: of a round on this machine; exponent: a path of log probability s counts exp(exponent * s);
    expected, accepted: draft tokens a round on training prompts, by the drafter's bare probabilities and in truth."""

    cost: RoundCost
    exponent: float
    expected: float
    accepted: float

    def to_dict(self) -> dict:
        """JSON types."""
        fitted = {"exponent": self.exponent, "expected": self.expected, "accepted": self.accepted}
        return {**fitted, "cost": self.cost.to_dict()}

    @classmethod
    def from_dict(cls, data: dict) -> BudgetCalibration:
        return cls(**{**data, "cost": RoundCost.from_dict(data["cost"])})


def make_policy(
    name: str, options: TreeOptions, levels: Sequence[str], calibration: BudgetCalibration | None
) -> BudgetPolicy:
    """The rule that the option budget_policy names, with a state of its own.

    Args:
        levels: the option adaptive_budget.
        calibration: of `calibrate_budget`; the cost-aware rule needs it.
    """
    if name == "adaptive":
        return AdaptiveBudget(options, parse_levels(levels))
    if name == "cost-aware":
        if calibration is None:
            raise ValueError("budget_policy cost-aware needs costs measured on this machine")
        return CostAwareBudget(options, calibration.cost, calibration.exponent)
    return BudgetPolicy(options)


class _Recorder(DraftProposer):
    """Keeps the scores of all nodes that it proposes."""

    def __init__(self, target: Target, drafter: Drafter, options: TreeOptions):
        super().__init__(target, drafter, METHOD, options)
        self.scores: list[Tensor] = []

    @torch.inference_mode()
    def build(self, draft: Draft | None) -> Tree:
        tree = super().build(draft)
        self.scores.append(tree.scores_RN[tree.real_RN].double().cpu())
        return tree


def unmeasured(known: BudgetCalibration | None, concurrency: Sequence[int]) -> list[int]:
    """Numbers of requests at once whose costs are missing; one is always wanted."""
    return sorted({1, *concurrency} - set(known.cost.draft_points if known else ()))


def calibrate_budget(
    target: Target,
    drafter: Drafter,
    options: TreeOptions,
    prompts: Sequence[list[int]],
    concurrency: Sequence[int],
    contexts: Sequence[int],
    temperature: float = 0.0,
    known: BudgetCalibration | None = None,
) -> BudgetCalibration:
    """Measures costs and fits the exponent.

    Args:
        options: the largest trees that will be built.
        prompts: token ids of training prompts; they are answered again and again where more are needed.
        concurrency: numbers of requests at once for which costs are measured; one is always among them.
        contexts: lengths after which verification is timed.
        temperature: of the target while the exponent is fitted.
        known: an earlier calibration of all the same but for the concurrency: only what it lacks is measured.
    """
    requests = unmeasured(known, concurrency)
    taps = drafter.spec.target_layer_ids
    verify: dict[tuple[int, int], dict[int, float]] = {}
    for count in requests:
        largest = min(options.budget, max(4, MOST_TOKENS // count - 1))
        sizes = sorted({*(s for s in SIZES if s < largest), largest})
        for context in sorted(set(contexts)):
            verify[count, context] = verify_cost(target, taps, sizes, context, 5 if count == 1 else 3, count)
    draft = {count: draft_cost(target, drafter, options, prompts, count) for count in requests}
    if known is not None:
        cost = RoundCost(known.cost.verify_points | verify, known.cost.draft_points | draft)
        return replace(known, cost=cost)
    exponent, expected, accepted = fit_exponent(target, drafter, options, prompts, temperature)
    return BudgetCalibration(RoundCost(verify, draft), exponent, expected, accepted)


def draft_cost(
    target: Target, drafter: Drafter, options: TreeOptions, prompts: Sequence[list[int]], requests: int
) -> float:
    """Seconds of draft, tree building and commit in a round of so many requests, the best as in `verify_cost`."""
    # Small trees are enough: what is verified later does not change how long they take to build.
    proposer = DraftProposer(target, drafter, METHOD, replace(options, budget=min(8, options.budget)))
    asked = [Request(prompts[i % len(prompts)], ANSWER_TOKENS, f"cost {i}") for i in range(requests)]
    batch, times = Batch(target, proposer, asked), []
    with torch.inference_mode():
        while batch.admit() and len(batch.rows) == requests and batch.rounds < 8:
            first = batch.rows[0]
            batch.round()
            record = batch.answers[first].rounds[-1]
            times.append(record.draft + record.tree + record.commit)
    if not times:
        raise ValueError("budget_policy cost-aware: the training prompts gave no round; give other --prompts")
    return min(times)


def fit_exponent(
    target: Target, drafter: Drafter, options: TreeOptions, prompts: Sequence[list[int]], temperature: float
) -> tuple[float, float, float]:
    """(Exponent at which expected and accepted draft tokens agree, expected ones at exponent 1, accepted ones), the
    latter two a round."""
    recorder = _Recorder(target, drafter, options)
    rounds = []
    for i, ids in enumerate(prompts):
        request = Request(ids, ANSWER_TOKENS, f"calibration {i}")
        rounds += generate(target, recorder, [request], temperature)[0].rounds
    if not rounds:
        raise ValueError("budget_policy cost-aware: the training prompts gave no round; give other --prompts")
    scores_N, accepted = torch.cat(recorder.scores), sum(r.accepted for r in rounds)
    expected = float(scores_N.exp().sum())
    return matching_exponent(scores_N, accepted), expected / len(rounds), accepted / len(rounds)


def matching_exponent(scores_N: Tensor, accepted: float, low: float = 0.25, high: float = 8.0) -> float:
    """The exponent in [low, high] at which the sum of exp(exponent * score) is `accepted`, by bisection.

    Scores are <= 0, so that the sum falls with the exponent; an accepted count beyond the range gives its end.
    """
    for _ in range(50):
        middle = (low + high) / 2
        if float((middle * scores_N).exp().sum()) > accepted:
            low = middle
        else:
            high = middle
    return (low + high) / 2
