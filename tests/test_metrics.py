"""Figures against hand-computed values on a few made-up rounds."""

import json

import numpy as np
import pytest

from eval import metrics
from eval.records import Divergence, Generation, RoundRecord


def round_of(accepted, depth=4, emitted=None, ms=(1.0, 2.0, 3.0, 4.0)):
    emitted = accepted + 1 if emitted is None else emitted
    return RoundRecord(depth, depth, accepted, emitted, *(part / 1000 for part in ms))


def response(accepted, prompt="p0", method="m", seconds=1.0, stop="length", last_emitted=None, tokens=None, **more):
    rounds = [round_of(a) for a in accepted]
    if last_emitted is not None:
        rounds[-1].emitted = last_emitted
    ids = list(range(1 + sum(r.emitted for r in rounds))) if tokens is None else tokens
    fields = {"benchmark": "b", "temperature": 0.0, "budget": 4, "prefill_seconds": 0.5} | more
    return Generation(
        prompt_id=prompt, method=method, tokens=ids, stop=stop, rounds=rounds, seconds=seconds,
        target_forwards=len(rounds) + 1, **fields,
    )  # fmt: skip


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
    assert metrics.ms_per_round_total([empty]) is None and metrics.tau_interval([empty], 0) is None
    assert metrics.speedup([empty], [empty]) is None and metrics.paired_difference([empty], group, group, 0) is None
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


def test_bootstrap_is_seeded_and_draws_every_resample_whole():
    weights = metrics.bootstrap_weights(5, seed=3, resamples=100)
    assert weights.shape == (100, 5) and (weights.sum(1) == 5).all()
    assert (weights == metrics.bootstrap_weights(5, seed=3, resamples=100)).all()
    assert (weights != metrics.bootstrap_weights(5, seed=4, resamples=100)).any()


def test_interval_of_tau_has_the_width_of_the_standard_error():
    rng = np.random.default_rng(0)
    group = [response([int(rng.integers(0, 5))], f"p{i}") for i in range(200)]
    taus = np.array([metrics.tau(g) for g in group])
    low, high = metrics.tau_interval(group, seed=0)
    error = taus.std() / len(taus) ** 0.5
    assert low == pytest.approx(taus.mean() - 1.96 * error, abs=0.02)
    assert high == pytest.approx(taus.mean() + 1.96 * error, abs=0.02)


def test_paired_difference_is_far_tighter_than_unpaired_intervals():
    # Prompts differ a lot, the two methods differ by exactly one token on each.
    lengths = [0, 4, 8, 12, 16]
    a = [response([n + 1], f"p{n}", "a", seconds=1.0) for n in lengths]
    b = [response([n], f"p{n}", "b", seconds=1.0) for n in lengths]
    ar = [response([0] * 10, f"p{n}", "ar", seconds=10.0) for n in lengths]
    row = metrics.paired_difference(a, b, ar, seed=0)
    assert row["tau_difference"] == pytest.approx(1.0)
    assert row["tau_interval"] == pytest.approx([1.0, 1.0])
    assert row["speedup_difference"] == pytest.approx(1.0)
    assert row["speedup_interval"] == pytest.approx([1.0, 1.0])
    assert metrics.tau_interval(a, 0)[1] - metrics.tau_interval(a, 0)[0] > 5
    assert metrics.paired_difference(b, a, ar, seed=0)["tau_difference"] == pytest.approx(-1.0)


def test_paired_difference_of_equal_methods_is_zero_and_of_mixed_ones_covers_zero():
    a = [response([n % 3], f"p{n}") for n in range(12)]
    assert metrics.paired_difference(a, a, [], seed=0)["tau_interval"] == [0.0, 0.0]
    b = [response([(n + 1) % 3], f"p{n}") for n in range(12)]
    low, high = metrics.paired_difference(a, b, [], seed=0)["tau_interval"]
    assert low < 0 < high
    assert metrics.paired_difference(a, b, [], seed=0)["speedup_difference"] is None


def test_speedup_interval_contains_the_estimate():
    ar = [response([0] * 4, f"p{n}", "ar", seconds=4.0 + n) for n in range(8)]
    fast = [response([3], f"p{n}", seconds=2.0) for n in range(8)]
    low, high = metrics.speedup_interval(fast, ar, seed=0)
    assert low < metrics.speedup(fast, ar) < high


def test_records_survive_json():
    one = response([2, 0], domain="maths")
    assert Generation.from_dict(json.loads(json.dumps(one.to_dict()))) == one
    for gap in (1e-5, None):
        divergence = Divergence("p0", "m", 3, 5, 6, gap, gap is not None)
        assert Divergence.from_dict(json.loads(json.dumps(divergence.to_dict(), allow_nan=False))) == divergence
