"""How large a tree may be in a round: fixed, by the number of requests decoded at once, or by measured cost.

A tree is verified for every request of the batch in one forward, so that the more are decoded at once the dearer a node
becomes. Trees of every method carry best-first ranks, and the tree of budget n is the nodes of rank < n. A budget of
zero is allowed: the round is then a plain autoregressive step, without a draft.

Shape suffixes: R requests, N nodes of the tree.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .cost import RoundCost
from .tree import Tree, select


@dataclass(frozen=True)
class TreeOptions:
    """Knobs of the trees: budget B (root not counted), width W, candidates K, beta of the final pruning; and those of
    a head's chain: the confidence under which it ends (0: never), and the temperature of the confidence."""

    budget: int = 64
    width: int = 12
    candidates: int = 64
    beta: float = -0.2
    confidence_threshold: float = 0.0
    confidence_temperature: float = 1.0


class BudgetPolicy:
    """Fixed budget, and the interface of the other policies."""

    name = "fixed"

    def __init__(self, options: TreeOptions):
        self.given = options

    @property
    def largest(self) -> int:
        """Most nodes that a tree may have."""
        return self.given.budget

    def drafts(self, requests: int) -> bool:
        """False when the next round is a plain autoregressive step."""
        return True

    def options(self, requests: int) -> TreeOptions:
        """Knobs with which this round's trees are built."""
        return self.given

    def cut(self, tree: Tree, lengths: list[int]) -> Tree:
        """What of the built trees is verified, after `lengths` tokens of context."""
        return tree


class AdaptiveBudget(BudgetPolicy):
    """Budget and width by the number of requests decoded at once in the round (METHODS section 3, "under load").

    Levels (requests, budget, width): the last one whose `requests` are reached holds. Budget 0 drafts nothing.
    """

    name = "adaptive"

    def __init__(self, options: TreeOptions, levels: list[tuple[int, int, int]]):
        super().__init__(options)
        self.levels = sorted(levels)

    @property
    def largest(self) -> int:
        return max(budget for _, budget, _ in self.levels)

    def _level(self, requests: int) -> tuple[int, int, int]:
        return [level for level in self.levels if level[0] <= requests][-1]

    def drafts(self, requests: int) -> bool:
        return self._level(requests)[1] > 0

    def options(self, requests: int) -> TreeOptions:
        _, budget, width = self._level(requests)
        return replace(self.given, budget=budget, width=width)


def parse_levels(texts: list[str]) -> list[tuple[int, int, int]]:
    """`requests:budget:width` words of the option adaptive_budget. Raises ValueError naming it."""
    levels = []
    for text in texts:
        parts = str(text).split(":")
        if len(parts) != 3 or not all(part.isdigit() for part in parts):
            raise ValueError(f"adaptive_budget takes REQUESTS:BUDGET:WIDTH, such as 4:32:3, got {text!r}")
        requests, budget, width = map(int, parts)
        if requests < 1 or (budget and not width):
            raise ValueError(f"adaptive_budget: requests and width must be at least 1, got {text!r}")
        levels.append((requests, budget, width))
    if len({level[0] for level in levels}) < len(levels) or 1 not in {level[0] for level in levels}:
        raise ValueError(f"adaptive_budget needs one level for 1 request and no two for the same, got {texts}")
    return levels


class CostAwareBudget(BudgetPolicy):
    """Adds nodes while the expected tokens per second rise (CaDDTree, arXiv 2606.01813; METHODS section 3).

    Expected tokens of a round: 1 + the sum of the path probabilities of the nodes. The drafter's probabilities are not
    the target's, so that a path counts exp(exponent * score), with one exponent fitted on training prompts such that
    expected and accepted lengths agree. All requests of a batch get the same budget: their trees are verified as one
    rectangle. When even the best budget of the recent drafts promises less than plain decoding, rounds go without a
    draft; every `probe` rounds one is drawn again, since texts change.
    """

    name = "cost-aware"
    probe = 8
    memory = 0.8  # weight of what earlier rounds promised

    def __init__(self, options: TreeOptions, cost: RoundCost, exponent: float = 1.0):
        super().__init__(options)
        self.cost, self.exponent = cost, exponent
        self._promised: dict[int, float] = {}
        self._idle = 0

    def drafts(self, requests: int) -> bool:
        promised = self._promised.get(requests)
        if promised is None or promised > 1.0 or self._idle + 1 >= self.probe:
            self._idle = 0
            return True
        self._idle += 1
        return False

    def cut(self, tree: Tree, lengths: list[int]) -> Tree:
        requests, context = len(lengths), sum(lengths) / len(lengths)
        gain_N = expected_tokens(tree, self.exponent)
        verify_N = self.cost.verify(requests, context, len(gain_N) - 1).to(gain_N)
        speed_N = gain_N / (self.cost.draft(requests) + verify_N)
        budget = int(speed_N.argmax())
        # Tokens a second against a round without draft or tree: what `drafts` decides by.
        now = float(speed_N[budget] * verify_N[0]) / requests
        before = self._promised.get(requests, now)
        self._promised[requests] = self.memory * before + (1 - self.memory) * now
        return cut_to(tree, budget)


def expected_tokens(tree: Tree, exponent: float) -> Tensor:
    """[N + 1] expected tokens of the whole batch's round for every budget 0 .. N, fp64."""
    probs_RN = (exponent * tree.scores_RN.double()).exp().masked_fill(~tree.real_RN, 0)
    best_first_RN = torch.zeros_like(probs_RN).scatter_(1, tree.ranks_RN, probs_RN)
    gain_N = best_first_RN.sum(dim=0).cumsum(dim=0) + len(tree.sizes)
    return torch.cat([gain_N.new_tensor([len(tree.sizes)]), gain_N])


def cut_to(tree: Tree, budget: int) -> Tree:
    """The nodes of rank < budget of every request."""
    if budget >= tree.width:
        return tree
    kept_RN = tree.real_RN & (tree.ranks_RN < budget)
    # Stable: the kept nodes first, in their order, so that parents stay before children.
    order_RN = (~kept_RN).long().sort(dim=1, stable=True).indices[:, :budget]
    return select(tree, order_RN, kept_RN.sum(dim=1).tolist())
