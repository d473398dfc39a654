"""Continuous batching: requests join and leave, and nothing about an answer depends on its neighbours."""

import pytest
import torch

from eval.decoding import loop
from eval.decoding.cache import TreeCache
from eval.decoding.loop import Batch, Request, generate, serve
from eval.decoding.policy import AdaptiveBudget, BudgetPolicy
from eval.decoding.proposals import NoProposer, TreeOptions, available_methods, make_proposer
from tiny import EOS, ScriptedProposer, ScriptedTarget, tiny_drafter, tiny_target

OPTIONS = TreeOptions(budget=10, width=4, candidates=8)
REQUESTS = [
    Request([5, 6, 7], 6, "a"),
    Request([9, 8, 7, 6, 5, 4, 3, 9, 8, 7], 11, "b"),
    Request([3], 1, "c"),  # ends with its prefill
    Request([7, 7, 12, 13], 9, "d"),
    Request([21, 20, 19, 18, 17, 16], 2, "e"),
    Request([30, 31], 8, "f"),
]


def tokens(answers):
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize(
    ("head", "temperature", "slots_tried"),
    [
        ("none", 0.0, [2]),
        ("domino", 0.0, [1, 2, 3]),
        ("domino", 1.0, [2]),
        ("markov_vanilla", 0.0, [3]),
        ("markov_gated", 0.7, [3]),
        ("markov_rnn", 0.0, [2]),
    ],
)
def test_requests_that_join_and_leave_get_the_tokens_they_get_alone(head, temperature, slots_tried):
    target = tiny_target("llama" if head == "domino" else "qwen3")
    drafter = tiny_drafter(target, head_type=head)
    alone = [generate(target, NoProposer(), [request], temperature)[0] for request in REQUESTS]
    assert sorted({len(a.tokens) for a in alone}) != [len(alone[0].tokens)]
    for method in available_methods(head):
        proposer = make_proposer(target, drafter, method, OPTIONS)
        single = [generate(target, proposer, [request], temperature)[0] for request in REQUESTS]
        for slots in slots_tried:
            served = serve(target, proposer, REQUESTS, temperature, slots=slots)
            assert tokens(served.answers) == tokens(alone), (method, slots)
            # Not the text alone: every round proposed and accepted what it does for one request (TRAPS 39, 42).
            for a, b in zip(served.answers, single, strict=True):
                assert [(r.proposed, r.accepted, r.emitted) for r in a.rounds] == [
                    (r.proposed, r.accepted, r.emitted) for r in b.rounds
                ], (method, slots)
            assert served.tokens == sum(len(a.tokens) for a in alone)
            assert served.request_rounds == sum(len(a.rounds) for a in single)
            assert served.rounds <= served.request_rounds <= slots * served.rounds


def test_rows_of_finished_requests_cost_nothing():
    """Rows of every target forward: prefills of one or more joiners, then only live requests."""
    target = ScriptedTarget([(i + 1) % 64 for i in range(64)])
    seen, original = [], target.forward

    def spy(input_ids, tap_ids, **kwargs):
        seen.append(tuple(input_ids.shape))
        return original(input_ids, tap_ids, **kwargs)

    target.forward = spy
    # Answers of 3, 2 and 4 tokens: without a proposal, 2, 1 and 3 rounds.
    requests = [Request([8, 9], 3), Request([20], 2), Request([30, 31, 32], 4)]
    answers = generate(target, NoProposer(), requests, slots=2)
    assert tokens(answers) == [[10, 11, 12], [21, 22], [33, 34, 35, 36]]
    # Two prompts padded to two tokens; a round of two; the second leaves and the third joins; the first leaves.
    assert seen == [(2, 2), (2, 1), (1, 3), (2, 1), (1, 1), (1, 1)]


def test_the_last_row_moves_into_a_gap():
    target = tiny_target()
    target.eos_ids = ()
    batch = Batch(target, NoProposer(), [Request([5, 6], 2), Request([7], 9), Request([8, 9, 10], 9)])
    batch.admit()
    kept = batch.cache.stores[0][:, :, 2, :, :3].clone()
    batch.round()
    assert batch.rows == [2, 1]
    assert batch.cache.lengths == [4, 2, 0]
    assert torch.equal(batch.cache.stores[0][:, :, 0, :, :3], kept)


def test_an_answer_has_its_own_clock(monkeypatch):
    """A tick for every look at the clock: the second request starts when the first has ended."""
    ticks = iter(range(1000))
    monkeypatch.setattr(loop.Clock, "now", lambda self: float(next(ticks)))
    target = ScriptedTarget([(i + 1) % 64 for i in range(64)])
    served = serve(target, NoProposer(), [Request([8], 3), Request([20], 2)], slots=1)
    # 0 start; 1-2 prefill; two rounds of five looks, 3..7 and 8..12; 13-14 prefill; 15..19 a round; 20 end.
    assert [a.prefill_seconds for a in served.answers] == [1.0, 1.0]
    assert [a.seconds for a in served.answers] == [12.0 - 2.0, 19.0 - 14.0]
    assert (served.seconds, served.prefill_seconds, served.tokens, served.rounds) == (20.0, 2.0, 5, 3)


def test_eos_as_first_token_lets_the_next_one_join():
    target = ScriptedTarget([0, 7, 2, 3, 5, EOS, EOS, 6], eos_ids=(EOS,))
    answers = generate(target, ScriptedProposer([5]), [Request([5], 4), Request([6], 4), Request([7], 3)], slots=1)
    assert tokens(answers) == [[EOS], [EOS], [6, EOS]]
    assert [len(a.rounds) for a in answers] == [0, 0, 1]


def test_memory_is_stated_and_a_long_request_is_refused_by_name():
    target = tiny_target()
    drafter = tiny_drafter(target)
    proposer = make_proposer(target, drafter, "dartree_pruned", OPTIONS)
    requests = [Request([5] * 20, 10, "short"), Request([5] * 100, 10, "gsm8k/7")]
    served = serve(target, proposer, requests, slots=1)
    # Columns: 100 + 10 + depth 4 + 10 nodes + 2; 2 x (4 target + 2 drafter layers) x 2 heads x 8 x 4 bytes a column.
    assert served.cache_bytes == 126 * 2 * 6 * 2 * 8 * 4
    assert serve(target, proposer, requests, slots=2).cache_bytes == 2 * served.cache_bytes
    assert serve(target, proposer, requests, slots=2, max_cache_gb=2 * served.cache_bytes / 1e9).tokens == 20
    with pytest.raises(ValueError, match=r"'gsm8k/7' needs 126 cache columns, but max_cache_gb .* holds 100 "):
        generate(target, proposer, requests, slots=1, max_cache_gb=100.5 / 126 * served.cache_bytes / 1e9)


class OnAndOff(BudgetPolicy):
    """Drafts in every third round only."""

    turn = 0

    def drafts(self, requests):
        self.turn += 1
        return self.turn % 3 == 0


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_rounds_without_a_draft_keep_the_drafters_context(slots):
    """Skipped drafts leave their context for the next one: texts and drafts are those of a drafter that read it all."""
    target = tiny_target()
    drafter = tiny_drafter(target)
    expected = tokens(generate(target, NoProposer(), REQUESTS))
    proposer = make_proposer(target, drafter, "dartree_pruned", OPTIONS, OnAndOff(OPTIONS))
    answers = generate(target, proposer, REQUESTS, slots=slots)
    assert tokens(answers) == expected
    sizes = {r.proposed for a in answers for r in a.rounds}
    assert 0 in sizes and max(sizes) > 4
    plain = make_proposer(target, drafter, "dartree_pruned", OPTIONS)
    for i, answer in enumerate(answers):
        position = 1
        for record in answer.rounds:
            if record.proposed:
                # The same anchor after the same text, in a fresh request: the same tree is accepted as deep.
                prompt = REQUESTS[i].prompt_ids + answer.tokens[: position - 1]
                fresh = generate(target, plain, [Request(prompt, REQUESTS[i].max_new_tokens - position + 1)])[0]
                assert fresh.rounds[0].accepted == record.accepted
            position += record.emitted


def test_adaptive_levels_follow_the_number_of_live_requests():
    target = tiny_target()
    target.eos_ids = ()
    policy = AdaptiveBudget(OPTIONS, [(1, 10, 4), (2, 6, 2), (3, 0, 0)])
    proposer = make_proposer(target, tiny_drafter(target), "dartree_pruned", OPTIONS, policy)
    assert proposer.size == 10
    batch = Batch(target, proposer, [Request([5, 6], 3), Request([7], 40), Request([8, 9], 60)])
    seen = set()
    while batch.admit():
        live = len(batch.rows)
        request = batch.rows[0]
        batch.round()
        seen.add((live, batch.answers[request].rounds[-1].proposed))
    assert seen == {(3, 0), (2, 6), (1, 10)}


def test_ragged_writes_reach_the_right_columns():
    cache = TreeCache(3, 2, 12, 4, torch.float32, ["cpu"])
    columns = torch.tensor([[3, 4, 5], [7, 8, 2]])
    assert cache.place(columns, first=1) == 9
    keys, values = torch.randn(2, 2, 2, 3, 4)
    seen_keys, seen_values = cache.update(keys, values, 0)
    assert seen_keys.shape == (2, 2, 9, 4)
    for row in range(2):
        for m in range(3):
            assert torch.equal(seen_keys[row, :, columns[row, m]], keys[row, :, m])
            assert torch.equal(seen_values[row, :, columns[row, m]], values[row, :, m])
    assert not cache.stores[0][:, :, 0].any()
    with pytest.raises(ValueError, match="holds 12 columns, this forward needs 13"):
        cache.place(torch.tensor([[12]]))
