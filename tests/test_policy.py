"""Budget policies: levels, measured costs made convex, expected tokens, and the cost-aware choice."""

import itertools

import pytest
import torch

from eval.budget_policy import BudgetCalibration, calibrate_budget, make_policy, matching_exponent
from eval.decoding.cost import RoundCost, convex_curve, interpolate
from eval.decoding.loop import Request, generate
from eval.decoding.policy import AdaptiveBudget, CostAwareBudget, cut_to, expected_tokens, parse_levels
from eval.decoding.proposals import NoProposer, TreeOptions, available_methods, make_proposer
from eval.decoding.tree import Tree
from tiny import tiny_drafter, tiny_target

OPTIONS = TreeOptions(budget=12, width=4, candidates=8)


def tree_of(probs, ranks=None):
    """Children of the root with these path probabilities, one row a request."""
    scores = torch.tensor(probs).log()
    rows, width = scores.shape
    order = torch.arange(width).expand(rows, -1)
    zero = torch.zeros(rows, width, dtype=torch.long)
    ranks = order if ranks is None else torch.tensor(ranks)
    return Tree(order + 3, zero, zero + 1, scores, ranks, [width] * rows)


def costs(draft, verify, requests=1):
    """The same cost at every context."""
    return RoundCost({(requests, 0): dict(enumerate(verify))}, {requests: draft})


def test_levels_are_read_and_refused_by_name():
    assert parse_levels(["4:32:3", "1:64:12", "8:0:0"]) == [(4, 32, 3), (1, 64, 12), (8, 0, 0)]
    for wrong in (["1:64"], ["1:a:2"], ["0:4:4"], ["1:4:0"], ["2:4:4"], ["1:4:4", "1:8:8"]):
        with pytest.raises(ValueError, match="adaptive_budget"):
            parse_levels(wrong)


def test_the_last_level_reached_holds():
    policy = AdaptiveBudget(TreeOptions(64, 12, 64), parse_levels(["4:32:3", "1:64:12", "8:0:0"]))
    seen = {n: (policy.options(n).budget, policy.options(n).width, policy.drafts(n)) for n in (1, 3, 4, 7, 8, 20)}
    assert seen == {
        1: (64, 12, True), 3: (64, 12, True), 4: (32, 3, True), 7: (32, 3, True), 8: (0, 0, False), 20: (0, 0, False),
    }  # fmt: skip
    assert policy.largest == 64


def test_a_step_of_the_measured_cost_is_bridged_and_a_convex_curve_is_kept():
    # A kernel that works in blocks of four: 1 up to three nodes, then 2.
    assert convex_curve({0: 1.0, 3: 1.0, 4: 2.0, 7: 2.0, 8: 3.0}, 8) == pytest.approx(
        [1.0, 1.0, 1.0, 1.0, 1.25, 1.5, 1.75, 2.0, 3.0]
    )
    squares = {n: float(n * n) for n in (0, 1, 2, 4)}
    assert convex_curve(squares, 5) == pytest.approx([0, 1, 4, 10, 16, 22])  # the last line goes on
    noisy = convex_curve({0: 5.0, 2: 4.0, 8: 9.0, 4: 20.0}, 8)
    slopes = [b - a for a, b in itertools.pairwise(noisy)]
    assert all(b > a - 1e-9 for a, b in itertools.pairwise(slopes)) and noisy[2] == 4.0
    assert convex_curve({4: 2.0}, 2) == [2.0, 2.0, 2.0]


def test_costs_are_interpolated_between_contexts_and_requests():
    cost = RoundCost(
        {(1, 64): {0: 1.0, 8: 1.8}, (1, 192): {0: 3.0, 8: 3.8}, (5, 64): {0: 5.0, 8: 9.0}}, {1: 2.0, 5: 4.0}
    )
    assert cost.draft(3) == 3.0
    torch.testing.assert_close(cost.verify(1, 130, 8)[4], torch.tensor(2.4, dtype=torch.float64))  # 128 of 64..192
    torch.testing.assert_close(cost.verify(3, 64, 8)[8], torch.tensor(5.4, dtype=torch.float64))
    assert interpolate({2: 1.0, 4: 3.0}, 9) == 3.0
    again = RoundCost.from_dict(cost.to_dict())
    torch.testing.assert_close(again.verify(3, 64, 8), cost.verify(3, 64, 8))


def test_expected_tokens_add_up_best_first():
    tree = tree_of([[0.25, 0.5, 0.125], [0.5, 0.2, 0.1]], ranks=[[1, 0, 2], [0, 1, 2]])
    torch.testing.assert_close(expected_tokens(tree, 1.0), torch.tensor([2.0, 3.0, 3.45, 3.675]).double())
    torch.testing.assert_close(expected_tokens(tree, 2.0)[1], torch.tensor(2.5).double())
    padded = Tree(tree.tokens_RN, tree.parents_RN, tree.depths_RN, tree.scores_RN, tree.ranks_RN, [3, 1])
    torch.testing.assert_close(expected_tokens(padded, 1.0)[3], torch.tensor(2 + 0.875 + 0.5).double())


def test_nodes_are_added_while_tokens_per_second_rise():
    """(1 + sum of path probabilities) / (draft + verify): 1.0 / 2, 1.5 / 2.1, 1.75 / 2.2, 1.85 / 2.5."""
    policy = CostAwareBudget(OPTIONS, costs(1.0, [1.0, 1.1, 1.2, 1.5]))
    tree = policy.cut(tree_of([[0.25, 0.5, 0.1]], ranks=[[1, 0, 2]]), [40])
    assert (tree.sizes, tree.tokens_RN.tolist()) == ([2], [[3, 4]])
    # Probabilities to the third: 1.125 / 2.1, then 1.1406 / 2.2, so that the second node pays no more.
    careful = CostAwareBudget(OPTIONS, costs(1.0, [1.0, 1.1, 1.2, 1.5]), exponent=3.0)
    cut = careful.cut(tree_of([[0.25, 0.5, 0.1]], ranks=[[1, 0, 2]]), [40])
    assert (cut.sizes, cut.tokens_RN.tolist(), cut.ranks_RN.tolist()) == ([1], [[4]], [[0]])
    steep = CostAwareBudget(OPTIONS, costs(0.1, [1.0, 2.0, 3.0, 4.0]))
    assert steep.cut(tree_of([[0.25, 0.5, 0.1]], ranks=[[1, 0, 2]]), [40]).sizes == [0]


def test_a_draft_that_does_not_pay_is_not_drawn_until_the_next_probe():
    policy = CostAwareBudget(OPTIONS, costs(1.0, [1.0, 2.0]))
    assert policy.drafts(1)
    policy.cut(tree_of([[0.1]]), [40])  # at best 1.0 / (1 + 1) against 1 / 1
    drawn = [policy.drafts(1) for _ in range(16)]
    assert drawn == ([False] * 7 + [True]) * 2
    rich = CostAwareBudget(OPTIONS, costs(0.1, [1.0, 1.1]))
    rich.cut(tree_of([[0.9]]), [40])  # 1.9 / 1.2
    assert all(rich.drafts(1) for _ in range(5))


def test_cutting_keeps_the_nodes_of_low_rank_and_their_parents():
    # A node under the root, its child, and a sibling; the best two are the node and its child.
    tree = Tree(
        torch.tensor([[5, 6, 7]]), torch.tensor([[0, 0, 1]]), torch.tensor([[1, 1, 2]]),
        torch.tensor([[-0.1, -2.0, -0.3]]), torch.tensor([[0, 2, 1]]), [3],
    )  # fmt: skip
    cut = cut_to(tree, 2)
    assert (cut.tokens_RN.tolist(), cut.parents_RN.tolist(), cut.sizes) == ([[5, 7]], [[0, 1]], [2])
    assert cut_to(tree, 0).width == 0 and cut_to(tree, 3) is tree


def test_the_exponent_makes_expectation_and_acceptance_agree():
    scores = torch.tensor([0.5, 0.25, 0.25]).log().double()
    assert matching_exponent(scores, 1.0) == pytest.approx(1.0, abs=1e-6)
    assert matching_exponent(scores, 0.25 + 2 / 16) == pytest.approx(2.0, abs=1e-6)
    assert matching_exponent(scores, 0.0) == pytest.approx(8.0) and matching_exponent(scores, 3.0) == pytest.approx(
        0.25
    )


def test_calibration_measures_what_was_asked_and_survives_json():
    target = tiny_target()
    drafter = tiny_drafter(target)
    prompts = [[5, 6, 7], [9, 8, 7, 6]]
    found = calibrate_budget(target, drafter, OPTIONS, prompts, [2], (16, 40))
    assert {key: sorted(points) for key, points in found.cost.verify_points.items()} == {
        (count, context): [0, 4, 8, 12] for count in (1, 2) for context in (16, 40)
    }
    assert set(found.cost.draft_points) == {1, 2} and min(found.cost.draft_points.values()) > 0
    rounds = [r for ids in prompts for r in generate(target, make_proposer(
        target, drafter, "dartree_pruned", OPTIONS), [Request(ids, 32)])[0].rounds]  # fmt: skip
    assert found.accepted == pytest.approx(sum(r.accepted for r in rounds) / len(rounds))
    assert BudgetCalibration.from_dict(found.to_dict()).to_dict() == found.to_dict()
    with pytest.raises(ValueError, match="cost-aware needs costs"):
        make_policy("cost-aware", OPTIONS, [], None)


@pytest.mark.parametrize("method", available_methods("domino")[3:])
def test_no_policy_changes_a_token(method):
    """The budget of a round is the policy's; the text is the target's."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    requests = [Request([5, 6, 7], 10, 1), Request([9, 8, 7, 6, 5, 4], 14, 2), Request([3], 8, 3)]
    expected = [a.tokens for a in generate(target, NoProposer(), requests)]
    ramp = [1.0 + 0.02 * n for n in range(13)]
    for policy in (
        CostAwareBudget(OPTIONS, costs(0.05, ramp)),
        CostAwareBudget(OPTIONS, costs(5.0, ramp)),  # drafts never pay
        AdaptiveBudget(OPTIONS, [(1, 12, 4), (2, 5, 2)]),
    ):
        proposer = make_proposer(target, drafter, method, OPTIONS, policy)
        answers = generate(target, proposer, requests, slots=2)
        assert [a.tokens for a in answers] == expected, policy.name
        sizes = [r.proposed for a in answers for r in a.rounds]
        assert max(sizes) > 0 and len(set(sizes)) > 1, policy.name
        if policy.name == "cost-aware" and policy.cost.draft(1) == 5.0:
            assert sizes.count(0) > len(sizes) / 2
