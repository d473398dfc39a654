"""Figures against hand-computed values on a few made-up rounds."""

import json

import pytest

from eval import metrics
from eval.records import Divergence, Generation, Plan
from made_up import response, round_of


def test_tau_of_a_response_counts_the_bonus_token_and_the_last_round_untrimmed():
    one = response([3, 1], last_emitted=1)
    assert metrics.tau(one) == 3.0
    assert metrics.tau(one, trimmed=True) == 2.5


def test_tau_averages_over_responses_or_over_rounds():
    group = [response([4]), response([0, 0, 0], "p1")]
    assert metrics.tau_mean(group) == 3.0
    assert metrics.tau_rounds(group) == 2.0


def test_a_response_without_rounds_is_left_out_without_nan():
    empty = response([], "p1", tokens=[1], stop="eos", seconds=0.0)
    group = [response([2, 2]), empty]
    assert metrics.tau_mean(group) == 3.0
    assert metrics.tokens_per_second(group) == 6.0
    assert metrics.tau_mean([empty]) is None and metrics.tau_rounds([empty]) is None
    assert metrics.tokens_per_second([empty]) is None and metrics.ms_per_round([empty]) is None
    assert metrics.ms_per_round_total([empty]) is None and metrics.tree_share([empty]) is None
    assert metrics.speedup([empty], [empty]) is None and metrics.speedup_mean_of_ratios([empty], group) is None
    assert metrics.nodes_per_round([empty]) is None and metrics.whole_block_share([empty], 4) is None
    assert metrics.acceptance_by_position([empty]) == [] and metrics.accepted_histogram([empty]) == []


def test_speed_leaves_out_the_prefill_token_and_end_to_end_does_not():
    group = [response([1, 1], seconds=2.0)]
    assert metrics.tokens_per_second(group) == 2.0
    assert metrics.tokens_per_second_end_to_end(group) == 2.0
    assert metrics.tokens_per_second_end_to_end([response([1, 2], seconds=2.0)]) == 6 / 2.5


def test_speedup_as_ratio_of_sums_and_as_mean_of_ratios():
    ar = [response([0] * 4, "p0", "ar", seconds=4.0), response([0] * 4, "p1", "ar", seconds=8.0)]
    fast = [response([3], "p0", seconds=1.0), response([3], "p1", seconds=4.0)]
    assert metrics.speedup(fast, ar) == pytest.approx(12 / 5)
    assert metrics.speedup_mean_of_ratios(fast, ar) == pytest.approx((4 + 2) / 2)
    assert metrics.speedup(ar, ar) == 1.0


def test_published_clock_starts_after_the_first_draft():
    ar = [response([0] * 4, method="ar", seconds=4.0)]
    own = [response([1, 1], seconds=2.0)]
    own[0].rounds[0].draft = 0.5
    ar[0].rounds[0].draft = 0.0
    assert metrics.speedup(own, ar) == 2.0
    assert metrics.speedup(metrics.after_first_draft(own), metrics.after_first_draft(ar)) == pytest.approx(4 / 1.5)


def test_speedup_compares_only_prompts_that_both_decoded():
    ar = [response([0] * 4, "p0", "ar", seconds=4.0), response([0], "p1", "ar", seconds=100.0)]
    assert metrics.speedup([response([3], "p0", seconds=1.0)], ar) == 4.0


def test_time_split():
    group = [response([1, 1], seconds=0.03)]
    assert metrics.ms_per_round(group) == pytest.approx({"draft": 1.0, "tree": 2.0, "verify": 3.0, "commit": 4.0})
    assert metrics.ms_per_round_total(group) == pytest.approx(15.0)


def test_processor_time_needs_every_round():
    group = [response([1, 1])]
    assert metrics.busy_ms_per_round(group) is None
    group[0].rounds = [round_of(1, busy=(0.001, 0.002, 0.003, 0.004)), round_of(1, busy=(0.003, 0.002, 0.001, 0.0))]
    assert metrics.busy_ms_per_round(group) == pytest.approx({"draft": 2.0, "tree": 2.0, "verify": 2.0, "commit": 2.0})


def test_share_of_tree_building_and_nodes_and_memory():
    group = [response([1, 1], seconds=0.04, peak_memory_gb=1.5), response([1], "p1", seconds=0.02, peak_memory_gb=2.5)]
    assert metrics.tree_share(group) == pytest.approx(3 * 0.002 / 0.06)
    assert metrics.nodes_per_round(group) == 4.0
    assert metrics.peak_memory(group) == 2.5 and metrics.peak_memory([response([1])]) is None


def test_share_of_rounds_that_accept_the_whole_block():
    group = [response([4, 2, 4]), response([0], "p1")]
    assert metrics.whole_block_share(group, 4) == 0.5
    assert metrics.whole_block_share(group, 0) is None


def test_speed_counts_tokens_up_to_eos_only():
    """TRAPS 33, 54: a block accepted beyond eos or the limit adds to the published tau, never to the speed."""
    own = response([3, 3], seconds=2.0, stop="eos", last_emitted=1)
    assert metrics.tokens_per_second([own]) == (4 + 1) / 2.0
    assert (metrics.tau(own), metrics.tau(own, trimmed=True)) == (4.0, 2.5)
    ar = response([0] * 5, method="ar", seconds=5.0)
    assert metrics.speedup([own], [ar]) == pytest.approx(2.5)


def test_a_mean_of_ratios_is_over_answers_each_turn_its_own():
    ar = [response([0] * 4, "p0", "ar", seconds=4.0, turn=t) for t in (0, 1)]
    fast = [response([3], "p0", seconds=1.0, turn=0), response([3], "p0", seconds=4.0, turn=1)]
    assert metrics.speedup_mean_of_ratios(fast, ar) == pytest.approx((4 + 1) / 2)


def test_acceptance_by_position_counts_only_rounds_that_had_the_chance():
    # Depths accepted 0, 1, 2, 4 of 4, and one round that proposed a single token and had it accepted.
    group = [response([0, 1, 2, 4]), response([1], "p1")]
    group[1].rounds[0].max_depth = 1
    rows = metrics.acceptance_by_position(group)
    assert [r["depth"] for r in rows] == [1, 2, 3, 4]
    assert [r["trials"] for r in rows] == [5, 3, 2, 1]
    assert [r["conditional"] for r in rows] == [4 / 5, 2 / 3, 1 / 2, 1.0]
    assert [r["survival"] for r in rows] == [4 / 5, 2 / 5, 1 / 5, 1 / 5]
    assert metrics.accepted_histogram(group) == [1, 2, 1, 0, 1]


def test_acceptance_of_ar_is_empty():
    ar = response([0, 0], method="ar")
    for r in ar.rounds:
        r.max_depth = r.proposed = 0
    assert metrics.acceptance_by_position([ar]) == []
    assert metrics.tau_mean([ar]) == 1.0


def test_answer_quality():
    group = [response([2], stop="eos"), response([2], "p1")]
    assert metrics.eos_share(group) == 0.5
    assert metrics.distinct_ngram_ratio([[7] * 10]) == 1 / 7
    assert metrics.distinct_ngram_ratio([list(range(10)), [7] * 5]) == (7 + 1) / (7 + 2)
    assert metrics.distinct_ngram_ratio([[1, 2, 3]]) is None


def test_records_survive_json():
    one = response([2, 0], domain="maths", turn=1, plan=Plan("dartree_pruned", 64, 12, 64, -0.2, note="why"))
    one.rounds[0].busy = (0.1, 0.2, 0.3, 0.4)
    assert Generation.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    for gap in (1e-5, None):
        divergence = Divergence("p0", "m", 3, 5, 6, gap, 1e-4, gap is not None, "builtin", 1, "m-b4")
        assert Divergence.from_dict(json.loads(json.dumps(divergence.to_dict(), allow_nan=False))) == divergence
