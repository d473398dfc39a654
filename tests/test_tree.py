"""Trees: budgets, closure, Lemma 1, ranks, impossible nodes; against naive builders."""

import heapq

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eval.decoding.tree import (
    Draft,
    Tree,
    batched_tree,
    best_first,
    chain,
    ddtree,
    empty_tree,
    fixed_widths,
    per_node_serial,
    prune,
)
from tiny import tiny_drafter, tiny_target


@pytest.fixture(scope="module")
def target():
    return tiny_target()


def make_draft(target, drafter, requests=2, seed=3):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(requests, drafter.spec.num_proposals, 32, generator=generator)
    anchor = torch.randint(3, 64, (requests,), generator=generator)
    return Draft(anchor, hidden, target.logits(hidden).float())


def paths(tree: Tree, r: int = 0) -> dict[tuple[int, ...], float]:
    """Token path of every real node -> score; checks that parents come first and depths follow parents."""
    found = []
    for i in range(tree.sizes[r]):
        parent, token = int(tree.parents_RN[r, i]), int(tree.tokens_RN[r, i])
        assert parent <= i
        prefix = found[parent - 1] if parent else ()
        found.append((*prefix, token))
        assert int(tree.depths_RN[r, i]) == len(found[-1])
    assert len(set(found)) == len(found)
    return {path: float(tree.scores_RN[r, i]) for i, path in enumerate(found)}


def naive_logprobs(target, drafter, draft, r, prefix, candidates):
    """log q over the K base candidates after a token path, straight from the formulas."""
    head, t = drafter.model.head, len(prefix)
    base = draft.logits_RTV[r, t]
    kept = base.topk(candidates).indices
    scores = base[kept].clone()
    if t >= drafter.spec.pure_draft_prefix_len:
        slots = head.prepare(draft.hidden_RTD[r])
        state = head.initial_state(draft.anchor_R[r], target.embed)
        for i, token in enumerate(prefix):
            state = head.advance(state, torch.tensor(token), target.embed, slots[i])
        scores += head.rows(kept) @ head.code(state, slots[t])
    return dict(zip(kept.tolist(), torch.log_softmax(scores, -1).tolist(), strict=True))


def naive_supertree(target, drafter, draft, r, widths, candidates):
    frontier, everything = {(): 0.0}, {}
    for width in widths:
        children = {}
        for path, score in frontier.items():
            for token, logprob in naive_logprobs(target, drafter, draft, r, path, candidates).items():
                children[(*path, token)] = score + logprob
        frontier = dict(sorted(children.items(), key=lambda item: -item[1])[:width])
        everything |= frontier
    return everything


HEADS = ("domino", "markov_vanilla", "markov_gated", "markov_rnn")


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("shift", [False, True])
def test_batched_tree_equals_a_naive_one(target, head, shift):
    drafter = tiny_drafter(target, head_type=head, shift_label=shift)
    draft = make_draft(target, drafter)
    widths = [3] * drafter.spec.num_proposals
    tree = batched_tree(draft, drafter, target.embed, widths, candidates=8)
    for r in range(2):
        expected = naive_supertree(target, drafter, draft, r, widths, 8)
        got = paths(tree, r)
        assert got.keys() == expected.keys()
        assert all(abs(got[p] - expected[p]) < 1e-4 for p in got)


@pytest.mark.parametrize("head", HEADS)
def test_serial_heap_holds_the_best_nodes(target, head):
    """One head call a node and the batched tree agree where the supertree is wide enough to hold everything."""
    drafter = tiny_drafter(target, head_type=head, block_size=4)
    draft = make_draft(target, drafter)
    serial = per_node_serial(draft, drafter, target.embed, budget=10, candidates=4)
    wide = prune(batched_tree(draft, drafter, target.embed, [64] * 3, candidates=4), 10, beta=0.0)
    for r in range(2):
        assert paths(serial, r).keys() == paths(wide, r).keys()


def test_ddtree_maximises_the_sum_of_path_probabilities(target):
    drafter = tiny_drafter(target, block_size=4)
    draft = make_draft(target, drafter)
    budget = 9
    logprobs = torch.log_softmax(draft.logits_RTV[0], dim=-1)
    best = logprobs.topk(budget)
    everything = {}
    for depth in range(1, 4):
        for places in torch.cartesian_prod(*[torch.arange(budget)] * depth).view(-1, depth).tolist():
            path = tuple(int(best.indices[t, i]) for t, i in enumerate(places))
            everything[path] = sum(float(best.values[t, i]) for t, i in enumerate(places))
    expected = sorted(everything, key=lambda p: -everything[p])[:budget]
    tree = ddtree(draft, drafter, budget)
    assert set(paths(tree)) == set(expected)
    assert tree.ranks_RN[0].tolist() == list(range(budget))


def test_chain_takes_the_corrected_argmax(target):
    drafter = tiny_drafter(target, scale=3.0)
    draft = make_draft(target, drafter, requests=1)
    tree = chain(draft, drafter, target.embed, use_head=True)
    prefix = ()
    for token in tree.tokens_RN[0].tolist():
        best = naive_logprobs(target, drafter, draft, 0, prefix, 64)
        assert token == max(best, key=best.get)
        prefix = (*prefix, token)
    plain = chain(draft, drafter, target.embed, use_head=False)
    assert plain.tokens_RN.tolist() == draft.logits_RTV.argmax(-1).tolist()
    assert plain.tokens_RN[0, 0] == tree.tokens_RN[0, 0]  # the first token lies in the pure prefix
    assert plain.tokens_RN.tolist() != tree.tokens_RN.tolist()


@pytest.mark.parametrize(("shift", "proposals"), [(False, 4), (True, 5)])
def test_number_of_proposals_per_layout_and_method(target, shift, proposals):
    drafter = tiny_drafter(target, shift_label=shift)
    draft = make_draft(target, drafter, requests=1)
    assert drafter.spec.num_proposals == proposals
    for use_head in (False, True):
        assert chain(draft, drafter, target.embed, use_head).sizes == [proposals]
    assert sum(fixed_widths(16, proposals)) == 16
    fixed = prune(batched_tree(draft, drafter, target.embed, fixed_widths(16, proposals), 8), 16, 0.0)
    trees = [fixed, ddtree(draft, drafter, 16), per_node_serial(draft, drafter, target.embed, 16, 8)]
    trees.append(prune(batched_tree(draft, drafter, target.embed, [6] * proposals, 8), 16, -0.2))
    for tree in trees:
        assert tree.sizes == [16]
        assert tree.max_depths[0] <= proposals
    assert fixed.max_depths == [proposals]


def test_published_widths():
    assert fixed_widths(64, 16) == [4] * 16
    assert fixed_widths(64, 15) == [5, 5, 5, 5] + [4] * 11


def random_supertree(rng_values: list[float], width: int, depths: int) -> Tree:
    """Every level has `width` nodes hung under random parents, with path scores that fall by the given amounts."""
    values = iter(rng_values)
    tokens, parents, levels, scores = [], [], [], []
    previous = [(0, 0.0)]
    for depth in range(1, depths + 1):
        level = []
        for _ in range(width):
            parent, score = previous[int(next(values) * 1000) % len(previous)]
            # Few distinct steps, so that ties are common.
            score = score - round(next(values) * 3) / 2
            tokens.append(len(tokens))
            parents.append(parent)
            levels.append(depth)
            scores.append(score)
            level.append((len(tokens), score))
        previous = level
    row = lambda v, t: torch.tensor([v], dtype=t)  # noqa: E731
    return Tree(
        row(tokens, torch.long),
        row(parents, torch.long),
        row(levels, torch.long),
        row(scores, torch.float32),
        torch.zeros(1, len(tokens), dtype=torch.long),
        [len(tokens)],
    )


def heap_pops(tree: Tree, budget: int, beta: float) -> list[int]:
    """Best-first search over a given tree: a node becomes available when its parent was popped."""
    keys = (tree.scores_RN + beta * tree.depths_RN)[0].tolist()
    children: dict[int, list[int]] = {}
    for i, parent in enumerate(tree.parents_RN[0].tolist()):
        children.setdefault(parent, []).append(i)
    heap = [(-keys[i], i) for i in children.get(0, [])]
    heapq.heapify(heap)
    popped = []
    while heap and len(popped) < budget:
        _, i = heapq.heappop(heap)
        popped.append(i)
        for child in children.get(i + 1, []):
            heapq.heappush(heap, (-keys[child], child))
    return popped


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.floats(0, 1, width=32), min_size=48, max_size=48),
    st.integers(1, 24),
    st.sampled_from([0.0, -0.1, -0.2, -1.0]),
)
def test_lemma_1_global_top_b_equals_best_first_pops(values, budget, beta):
    tree = random_supertree(values, width=6, depths=4)
    kept = prune(tree, budget, beta)
    expected = heap_pops(tree, budget, beta)
    assert kept.tokens_RN[0].tolist() == sorted(expected)  # tokens are the nodes' indices here
    assert [int(kept.tokens_RN[0, i]) for i in kept.ranks_RN[0].argsort()] == expected
    paths(kept)  # closed under parents


def test_a_smaller_budget_is_the_nodes_of_lower_rank(target):
    drafter = tiny_drafter(target)
    supertree = batched_tree(make_draft(target, drafter), drafter, target.embed, [6] * 4, 8)
    large = prune(supertree, 20, -0.2)
    for budget in (1, 5, 12):
        small = prune(supertree, budget, -0.2)
        for r in range(2):
            kept = [int(t) for t, rank in zip(large.tokens_RN[r], large.ranks_RN[r], strict=True) if rank < budget]
            assert small.tokens_RN[r].tolist() == kept


def test_positive_beta_is_refused(target):
    drafter = tiny_drafter(target)
    tree = batched_tree(make_draft(target, drafter), drafter, target.embed, [2] * 4, 4)
    with pytest.raises(ValueError, match="beta must be <= 0"):
        prune(tree, 4, 0.1)


def test_suppressed_vocabulary_never_fills_a_tree(target):
    """TRAP 41: with three possible tokens left, no node has probability zero and sizes shrink to what exists."""
    drafter = tiny_drafter(target, block_size=3)
    draft = make_draft(target, drafter, requests=1)
    draft.logits_RTV[:, :, 3:] = -torch.inf
    trees = {
        "ddtree": ddtree(draft, drafter, 32),
        "serial": per_node_serial(draft, drafter, target.embed, 32, 16),
        "pruned": prune(batched_tree(draft, drafter, target.embed, [12] * 2, 16), 32, -0.2),
        "fixed": prune(batched_tree(draft, drafter, target.embed, fixed_widths(32, 2), 16), 32, 0.0),
    }
    for name, tree in trees.items():
        assert tree.sizes == [12], name  # 3 + 9
        assert all(max(path) < 3 and score > -100 for path, score in paths(tree).items()), name
    draft.logits_RTV[0, 1] = -torch.inf
    draft.logits_RTV[0, 1, 0] = 0.0
    assert chain(draft, drafter, target.embed, use_head=False).sizes == [2]


def test_nan_logits_are_an_error(target):
    drafter = tiny_drafter(target)
    draft = make_draft(target, drafter)
    draft.logits_RTV[1, 2, 5] = torch.nan
    for build in (
        lambda: chain(draft, drafter, target.embed, True),
        lambda: ddtree(draft, drafter, 8),
        lambda: batched_tree(draft, drafter, target.embed, [2] * 4, 4),
        lambda: per_node_serial(draft, drafter, target.embed, 8, 4),
    ):
        with pytest.raises(ValueError, match="NaN"):
            build()


def test_best_first_stops_at_the_budget_and_expands_on_demand():
    calls = []

    def expand(depth, state):
        calls.append((depth, state))
        return [0, 1], [-0.1, -3.0], lambda place: (*state, place)

    nodes = best_first(expand, (), depths=3, budget=3)
    assert [(token, parent, depth) for token, parent, depth, _ in nodes] == [(0, 0, 1), (0, 1, 2), (0, 2, 3)]
    assert calls == [(1, ()), (2, (0,)), (3, (0, 0))]


def test_empty_tree_has_no_depth():
    tree = empty_tree(3, "cpu")
    assert tree.sizes == [0, 0, 0]
    assert tree.max_depths == [0, 0, 0]


def test_a_reduced_vocabulary_equals_the_full_one_with_the_rest_suppressed(target):
    """Indices, ids, embeddings and output rows are mapped right: a permuted map would only cost acceptance."""
    ids = torch.tensor([3, 9, 17, 21, 33, 40, 50, 63])
    full, reduced = tiny_drafter(target, scale=2.0), tiny_drafter(target, scale=2.0, draft_vocab_size=8)
    tensors = full.model.state_dict()
    tensors["embed_proj.2.weight"] = tensors["embed_proj.2.weight"][ids]
    reduced.model.load_state_dict(tensors)
    reduced.draft_ids = ids
    wide = make_draft(target, full)
    narrow = Draft(wide.anchor_R, wide.hidden_RTD, target.logits(wide.hidden_RTD, ids).float())
    kept = torch.full_like(wide.logits_RTV, -torch.inf)
    kept[..., ids] = wide.logits_RTV[..., ids]
    wide.logits_RTV = kept
    for build in (
        lambda draft, drafter: chain(draft, drafter, target.embed, True),
        lambda draft, drafter: ddtree(draft, drafter, 8),
        lambda draft, drafter: per_node_serial(draft, drafter, target.embed, 12, 8),
        lambda draft, drafter: batched_tree(draft, drafter, target.embed, [4] * 4, 8),
    ):
        for r in range(2):
            expected, got = paths(build(wide, full), r), paths(build(narrow, reduced), r)
            assert got.keys() == expected.keys()
            assert all(abs(got[p] - expected[p]) < 1e-4 for p in got)


def test_a_budget_below_the_depths_ends_the_fixed_tree_early(target):
    drafter = tiny_drafter(target)
    assert fixed_widths(2, 4) == [1, 1, 0, 0]
    tree = batched_tree(make_draft(target, drafter), drafter, target.embed, fixed_widths(2, 4), 8)
    assert (tree.sizes, tree.max_depths) == ([2, 2], [2, 2])


def test_draft_vocabulary_maps_to_target_ids(target):
    drafter = tiny_drafter(target, draft_vocab_size=8)
    drafter.draft_ids = torch.tensor([3, 9, 17, 21, 33, 40, 50, 63])
    hidden = torch.randn(1, 4, 32)
    draft = Draft(torch.tensor([5]), hidden, target.logits(hidden, drafter.draft_ids))
    for tree in (
        chain(draft, drafter, target.embed, True),
        ddtree(draft, drafter, 12),
        prune(batched_tree(draft, drafter, target.embed, [4] * 4, 64), 12, -0.2),
    ):
        assert set(tree.tokens_RN[0].tolist()) <= set(drafter.draft_ids.tolist())
