"""The budget follows measured cost and acceptance, and equals what smaller trees would really have accepted."""

import pytest

from eval import budget_policy
from eval.budget import choose_budget, tau_at, verify_cost
from eval.budget_policy import draft_cost
from eval.decoding.loop import Answer, Request, generate
from eval.decoding.proposals import DraftProposer, TreeOptions
from eval.records import RoundRecord
from tiny import tiny_drafter, tiny_target


def answer(ranks):
    rounds = [RoundRecord(64, 7, len(r), len(r) + 1, draft=0.01, tree=0.004, verify=0.06, commit=0.001) for r in ranks]
    return Answer(rounds=rounds, accepted_ranks=ranks)


def test_tau_at_counts_only_nodes_that_a_smaller_tree_has():
    answers = [answer([[0, 3, 9], [1]]), answer([[]])]
    assert tau_at(answers, 64) == pytest.approx((3.0 + 1.0) / 2)
    assert tau_at(answers, 4) == pytest.approx((2.5 + 1.0) / 2)
    assert tau_at(answers, 1) == pytest.approx((1.5 + 1.0) / 2)


def test_a_flat_cost_chooses_the_largest_tree_and_a_steep_one_a_small_tree():
    answers = [answer([[0, 5, 20], [0, 2], [1, 6]])]
    flat = choose_budget(answers, {4: 0.05, 8: 0.05, 32: 0.05})
    steep = choose_budget(answers, {4: 0.02, 8: 0.08, 32: 0.4})
    assert (flat.budget, steep.budget) == (32, 4)
    row = flat.curve[0]
    assert row["tokens_per_second"] == pytest.approx(row["tau"] / (0.05 + 0.015))


def test_of_measured_speeds_that_are_the_same_the_smallest_tree_is_chosen():
    """The cost of each size is set so that 1, 4 and 32 nodes run at .97, .985 and 1 times 30 tokens/s."""
    answers = [answer([[0, 5, 20], [0, 2], [1, 6]])]
    taus = {size: tau_at(answers, size) for size in (1, 4, 32)}
    cost = {size: taus[size] / (share * 30.0) - 0.015 for size, share in ((1, 0.97), (4, 0.985), (32, 1.0))}
    choice = choose_budget(answers, cost)
    assert choice.budget == 4
    assert [row["tokens_per_second"] for row in choice.curve] == pytest.approx([29.1, 29.55, 30.0])


def test_what_else_the_machine_does_meanwhile_is_in_no_cost(monkeypatch):
    """Two of three rounds were slowed down: drafting costs as in the third, as verification does in its repeats."""
    slowed = answer([[0], [0], [0]])
    slowed.rounds[0].draft, slowed.rounds[2].tree = 0.5, 0.7
    (row,) = choose_budget([slowed], {8: 0.05}).curve
    assert row["round_ms"] == pytest.approx(15 + 50)

    class Batch:
        """Rounds of 4, 2, 3 and 3 seconds."""

        def __init__(self, *_):
            self.rows, self.rounds, self.answers = [0], 0, [Answer()]

        def admit(self):
            return self.rounds < 4

        def round(self):
            self.answers[0].rounds.append(RoundRecord(8, 4, 0, 1, (3.5, 1.5, 2.5, 2.5)[self.rounds], 0.25, 9.0, 0.25))
            self.rounds += 1

    monkeypatch.setattr(budget_policy, "Batch", Batch)
    target = tiny_target()
    assert draft_cost(target, tiny_drafter(target), TreeOptions(8, 4, 8), [[5, 6]], 1) == pytest.approx(2.0)


def test_no_rounds_is_an_error():
    with pytest.raises(ValueError, match="choose_budget"):
        choose_budget([Answer()], {4: 0.1})


def test_predicted_tau_is_what_the_smaller_tree_gets():
    """The first round of every request: the tree of budget b accepts exactly the nodes of rank < b."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    for start in range(3, 23):
        request = [Request([start, start + 2], 2, 0)]
        large = generate(target, DraftProposer(target, drafter, "dartree_pruned", TreeOptions(20, 6, 8)), request)[0]
        for budget in (2, 6, 12):
            proposer = DraftProposer(target, drafter, "dartree_pruned", TreeOptions(budget, 6, 8))
            small = generate(target, proposer, request)[0]
            predicted = sum(rank < budget for rank in large.accepted_ranks[0]) if large.rounds else 0
            assert (small.rounds[0].accepted if small.rounds else 0) == predicted


def test_verify_cost_measures_every_size():
    cost = verify_cost(tiny_target(), (0, 2), [4, 16], context=20, repeats=2)
    assert set(cost) == {4, 16}
    assert all(seconds > 0 for seconds in cost.values())
