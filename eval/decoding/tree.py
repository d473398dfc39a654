"""Draft trees: the data structure, and the four ways to fill one.

A chain is a tree without branches and an empty tree is autoregressive decoding, so that one loop serves every method.
Builders work depth by depth on all requests at once, except the best-first heap, whose cost this project measures.

Shape suffixes: R requests, T depths, V draft vocabulary, K candidates, W frontier nodes, N nodes of the tree,
E rank of the head, D hidden.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from models.bundle import Drafter


@dataclass
class Draft:
    """What one block-parallel pass gives.

    Attributes:
        anchor_R: token ids of the last verified tokens.
        hidden_RTD: backbone output at the slots that predict depth 1, 2, ...
        logits_RTV: base logits of these slots over the draft vocabulary, fp32.
        temperature, uniforms_RT: for a chain sampled from the drafter, the latter in [0, 1).
    """

    anchor_R: Tensor
    hidden_RTD: Tensor
    logits_RTV: Tensor
    temperature: float = 0.0
    uniforms_RT: Tensor | None = None


@dataclass
class Distributions:
    """fp32 probabilities over the draft vocabulary at every depth, and the target ids of its entries (None: the same).

    The suffix V is the draft vocabulary, as in `Draft`.
    """

    probs_RTV: Tensor
    ids_V: Tensor | None

    def at(self, depth: int, vocabulary: int) -> Tensor:
        """[R, vocabulary] probabilities over target ids."""
        probs_RV = self.probs_RTV[:, depth]
        ids_V = torch.arange(probs_RV.shape[1], device=probs_RV.device) if self.ids_V is None else self.ids_V
        return probs_RV.new_zeros(probs_RV.shape[0], vocabulary).index_copy(1, ids_V, probs_RV)


@dataclass
class Tree:
    """Proposed tokens of R requests, parents before children.

    Attributes:
        tokens_RN: target token ids.
        parents_RN: 0 for children of the root (the anchor), i + 1 for children of node i.
        depths_RN: 1 for children of the root.
        scores_RN: log of the drafter's path probability.
        ranks_RN: place of the node in best-first order: the nodes of rank < b are the tree of budget b.
        sizes: real nodes of each request; what follows them is padding.
        drawn_from: the distributions that a sampled chain's tokens were drawn from; None for all others.
    """

    tokens_RN: Tensor
    parents_RN: Tensor
    depths_RN: Tensor
    scores_RN: Tensor
    ranks_RN: Tensor
    sizes: list[int]
    drawn_from: Distributions | None = None

    @property
    def width(self) -> int:
        return self.tokens_RN.shape[1]

    @property
    def real_RN(self) -> Tensor:
        device = self.tokens_RN.device
        return torch.arange(self.width, device=device)[None] < torch.tensor(self.sizes, device=device)[:, None]

    @property
    def max_depths(self) -> list[int]:
        if self.width == 0:
            return [0] * len(self.sizes)
        return self.depths_RN.masked_fill(~self.real_RN, 0).amax(dim=1).tolist()


def empty_tree(requests: int, device) -> Tree:
    """No proposal: the target's forward then yields one token (autoregressive decoding)."""
    none = torch.zeros(requests, 0, dtype=torch.long, device=device)
    return Tree(none, none, none, none.float(), none, [0] * requests)


def check_logits(logits: Tensor) -> None:
    """NaN drafts are an error, not a bad proposal (TRAP 41)."""
    if torch.isnan(logits.amax(dim=-1)).any():  # NaN wins every maximum, and one pass finds it
        raise ValueError("the drafter's logits hold NaN: the checkpoint or the target's features are broken")


def chain(draft: Draft, drafter: Drafter, embed, use_head: bool) -> Tree:
    """The most likely token at every depth, left to right; corrected by the head over the whole draft vocabulary."""
    head = drafter.model.head if use_head else None
    corrected = drafter.model.corrected_depths().tolist()
    requests, depths, _ = draft.logits_RTV.shape
    check_logits(draft.logits_RTV)
    if head is not None:
        slots = head.prepare(draft.hidden_RTD)
        state = head.initial_state(draft.anchor_R, embed)
    tokens, scores = [], []
    score = draft.logits_RTV.new_zeros(requests)
    for t in range(depths):
        logits_RV = draft.logits_RTV[:, t]
        if head is not None and corrected[t]:
            logits_RV = logits_RV + (head.code(state, slots[:, t]) @ head.rows().T).float()
        best, index = logits_RV.max(dim=-1)
        score = score + (best - logits_RV.logsumexp(dim=-1))
        tokens.append(drafter.to_target_ids(index))
        scores.append(score)
        if head is not None and t + 1 < depths:
            state = head.advance(state, tokens[-1], embed, slots[:, t])
    order = torch.arange(depths, device=score.device).expand(requests, -1)
    return _drop_impossible(
        Tree(torch.stack(tokens, 1), order, order + 1, torch.stack(scores, 1), order, [depths] * requests)
    )


def fixed_widths(budget: int, depths: int) -> list[int]:
    """Equal shares of the budget: ceil(remaining budget / remaining depths) at each depth."""
    widths = []
    for t in range(depths):
        widths.append(-(-(budget - sum(widths)) // (depths - t)))
    return widths


def batched_tree(draft: Draft, drafter: Drafter, embed, widths: list[int], candidates: int) -> Tree:
    """DARTree's supertree (arXiv 2608.13524; METHODS section 3): depth by depth, all parents in one call of the head.

    At each depth the `widths[t]` best (parent, token) pairs by path score survive, ties to the lower index. Only the K
    best base candidates of a depth are ever scored, so that no work grows with the vocabulary.
    """
    head, corrected = drafter.model.head, drafter.model.corrected_depths().tolist()
    check_logits(draft.logits_RTV)
    requests, depths, vocabulary = draft.logits_RTV.shape
    count = min(candidates, vocabulary)
    base_RTK, index_RTK = draft.logits_RTV.topk(count, dim=-1)
    ids_RTK = drafter.to_target_ids(index_RTK)
    if head is not None:
        # Transposed once for all depths: a batched product would copy its part at each of them.
        slots, rows_RTEK = head.prepare(draft.hidden_RTD), head.rows(index_RTK).transpose(2, 3).contiguous()
        state = head.initial_state(draft.anchor_R[:, None], embed)
    parent_score_RW = base_RTK.new_zeros(requests, 1)
    parent_node_RW = torch.zeros(requests, 1, dtype=torch.long, device=base_RTK.device)
    row_R1 = torch.arange(requests, device=base_RTK.device)[:, None]
    levels, offset = [], 0
    for t in range(depths):
        if widths[t] == 0:  # a budget smaller than the depths ends the tree early
            break
        scores_RWK = base_RTK[:, t, None, :].expand(-1, parent_score_RW.shape[1], -1)
        if head is not None and corrected[t]:
            scores_RWK = scores_RWK + (head.code(state, slots[:, t, None]) @ rows_RTEK[:, t]).float()
        # Normalised before the parent is added: rounding can then never lift a child above its parent (Lemma 1).
        path_RWK = parent_score_RW[..., None] + torch.log_softmax(scores_RWK, dim=-1).clamp(max=0)
        order = path_RWK.flatten(1).sort(dim=1, descending=True, stable=True)
        width = min(widths[t], order.values.shape[1])
        score_RW, pick_RW = order.values[:, :width], order.indices[:, :width]
        from_RW = pick_RW // count
        token_RW = ids_RTK[:, t].gather(1, pick_RW % count)
        levels.append((token_RW, parent_node_RW.gather(1, from_RW), score_RW))
        parent_node_RW = offset + 1 + torch.arange(width, device=score_RW.device).expand(requests, -1)
        parent_score_RW, offset = score_RW, offset + width
        if head is not None and t + 1 < depths:
            # Whole rows: a gather would go element by element.
            state = head.advance(state[row_R1, from_RW], token_RW, embed, slots[:, t, None])
    tokens, parents, score = (torch.cat(parts, dim=1) for parts in zip(*levels, strict=True))
    depths_N = [t + 1 for t, level in enumerate(levels) for _ in range(level[0].shape[1])]
    depth = torch.tensor(depths_N, device=score.device).expand(requests, -1)
    return Tree(tokens, parents, depth, score, torch.zeros_like(tokens), [tokens.shape[1]] * requests)


def prune(tree: Tree, budget: int, beta: float) -> Tree:
    """Keeps the `budget` best nodes by s_beta = path score + beta * depth, ties to the lower index (ancestors first).

    With beta <= 0 the score never rises from parent to child, so that the result is closed under parents and equals the
    first `budget` pops of a best-first heap over the same supertree (Lemma 1). Impossible nodes are dropped.
    """
    if beta > 0:
        raise ValueError(f"beta must be <= 0, got {beta}")
    score_RN = tree.scores_RN + beta * tree.depths_RN
    order_RN = score_RN.sort(dim=1, descending=True, stable=True).indices
    ranks_RN = torch.empty_like(order_RN).scatter_(
        1, order_RN, torch.arange(tree.width, device=score_RN.device).expand_as(order_RN)
    )
    kept_RB = order_RN[:, :budget].sort(dim=1).values
    ranked = replace(tree, ranks_RN=ranks_RN)
    return _drop_impossible(select(ranked, kept_RB, [kept_RB.shape[1]] * len(tree.sizes)))


def select(tree: Tree, index_RM: Tensor, sizes: list[int]) -> Tree:
    """The nodes at `index_RM`, in that order, their parents renumbered. Whoever is chosen has its parent chosen too."""
    requests, count = index_RM.shape
    # New index of a chosen node, plus one; the root stays 0.
    place_RN = torch.zeros(requests, tree.width + 1, dtype=torch.long, device=index_RM.device)
    place_RN.scatter_(1, index_RM + 1, torch.arange(1, count + 1, device=index_RM.device).expand_as(index_RM))
    parents_RM = place_RN.gather(1, tree.parents_RN.gather(1, index_RM))
    fields = (tree.depths_RN, tree.scores_RN, tree.ranks_RN)
    depths_RM, scores_RM, ranks_RM = (values.gather(1, index_RM) for values in fields)
    return Tree(tree.tokens_RN.gather(1, index_RM), parents_RM, depths_RM, scores_RM, ranks_RM, sizes)


def _drop_impossible(tree: Tree) -> Tree:
    """Removes nodes of probability zero (suppressed vocabulary): their descendants have it too, so closure stays."""
    possible_RN = tree.scores_RN > -torch.inf
    if bool(possible_RN.all()):
        return tree
    order_RN = (~possible_RN).long().sort(dim=1, stable=True).indices
    return select(tree, order_RN, possible_RN.sum(dim=1).tolist())


# Children of a node as (token ids, log probabilities), best first: given its depth and the token path to it.
Expand = Callable[[int, object], tuple[list[int], list[float], Callable[[int], object]]]


def best_first(expand: Expand, root: object, depths: int, budget: int, beta: float = 0.0) -> list[tuple]:
    """The first `budget` pops of a best-first heap over a tree that is expanded on demand (DDTree, arXiv 2604.12989).

    Popping a node pushes its next sibling and its first child. Returns (token, parent, depth, score) rows in pop order,
    parents as in `Tree`.

    Args:
        expand: children of a state at a depth, best first, with a function that gives a child's own state.
        beta: penalty a depth in the priority; the score itself stays the path's log probability.
    """
    heap: list[tuple] = []
    counter = 0
    nodes: list[tuple] = []

    def push(family, place, parent, depth, base):
        nonlocal counter
        tokens, logprobs, _ = family
        if place < len(tokens) and logprobs[place] > -float("inf"):
            score = base + logprobs[place]
            heapq.heappush(heap, (-(score + beta * depth), counter, place, parent, depth, base, score, family))
            counter += 1

    push(expand(1, root), 0, 0, 1, 0.0)
    while heap and len(nodes) < budget:
        _, _, place, parent, depth, base, score, family = heapq.heappop(heap)
        nodes.append((family[0][place], parent, depth, score))
        push(family, place + 1, parent, depth, base)
        if depth < depths and len(nodes) < budget:
            push(expand(depth + 1, family[2](place)), 0, len(nodes), depth + 1, score)
    return nodes


def ddtree(draft: Draft, drafter: Drafter, budget: int) -> Tree:
    """DDTree: best-first over the base marginals, normalised over the whole draft vocabulary, K = min(B, V)."""
    check_logits(draft.logits_RTV)
    requests, depths, vocabulary = draft.logits_RTV.shape
    top_RTK, index_RTK = torch.log_softmax(draft.logits_RTV, dim=-1).topk(min(budget, vocabulary), dim=-1)
    tokens, logprobs = drafter.to_target_ids(index_RTK).tolist(), top_RTK.tolist()
    grown = []
    for r in range(requests):
        families = [(tokens[r][t], logprobs[r][t], lambda place: None) for t in range(depths)]
        grown.append(best_first(lambda depth, _, families=families: families[depth - 1], None, depths, budget))
    return _from_nodes(grown, draft.anchor_R.device)


def per_node_serial(draft: Draft, drafter: Drafter, embed, budget: int, candidates: int, beta: float = 0.0) -> Tree:
    """The same heap with one call of the correction head for every popped node: what DARTree's batching removes."""
    head, corrected = drafter.model.head, drafter.model.corrected_depths().tolist()
    check_logits(draft.logits_RTV)
    requests, depths, vocabulary = draft.logits_RTV.shape
    base_RTK, index_RTK = draft.logits_RTV.topk(min(candidates, vocabulary), dim=-1)
    ids_RTK = drafter.to_target_ids(index_RTK)
    if head is not None:
        slots, rows_RTKE = head.prepare(draft.hidden_RTD), head.rows(index_RTK)
    grown = []
    for r in range(requests):

        def expand(depth, state, r=r):
            t = depth - 1
            scores_K = base_RTK[r, t]
            if head is not None and corrected[t]:
                scores_K = scores_K + (rows_RTKE[r, t] @ head.code(state, slots[r, t])).float()
            order = torch.log_softmax(scores_K, dim=-1).clamp(max=0).sort(descending=True, stable=True)
            ids_K = ids_RTK[r, t][order.indices]

            def child(place):
                return head.advance(state, ids_K[place], embed, slots[r, t]) if head is not None else None

            return ids_K.tolist(), order.values.tolist(), child

        root = head.initial_state(draft.anchor_R[r], embed) if head is not None else None
        grown.append(best_first(expand, root, depths, budget, beta))
    return _from_nodes(grown, draft.anchor_R.device)


def _from_nodes(grown: list[list[tuple]], device) -> Tree:
    """Pads (token, parent, depth, score) rows of several requests into a Tree."""
    sizes = [len(nodes) for nodes in grown]
    width = max(sizes)
    padded = [nodes + [(0, 0, 1, -float("inf"))] * (width - len(nodes)) for nodes in grown]
    tokens, parents, depths, scores = (
        torch.tensor([[node[i] for node in nodes] for nodes in padded], device=device) for i in range(4)
    )
    ranks = torch.arange(width, device=device).expand(len(grown), -1)
    return Tree(tokens, parents, depths, scores.float(), ranks, sizes)
