"""Intervals on known data: their width, what pairing does, and what is drawn together."""

import math

import numpy as np
import pytest

from eval import bootstrap, metrics
from eval.bootstrap import Resampled, draws, resample
from made_up import response


def figures(group, seed=0, benchmark="b"):
    prompts = sorted({g.prompt_id for g in group})
    return resample(group, prompts, draws(len(prompts), seed, benchmark))


def test_draws_are_seeded_whole_and_start_with_every_prompt_once():
    weights = draws(5, seed=3, resamples=100)
    assert weights.shape == (101, 5) and (weights.sum(1) == 5).all() and (weights[0] == 1).all()
    assert (weights == draws(5, seed=3, resamples=100)).all()
    assert (weights != draws(5, seed=4, resamples=100)).any()
    # Two benchmarks of one size are drawn separately.
    assert (weights != draws(5, seed=3, benchmark="other", resamples=100)).any()


def test_interval_of_tau_has_the_width_of_the_standard_error():
    rng = np.random.default_rng(0)
    group = [response([int(rng.integers(0, 5))], f"p{i}") for i in range(200)]
    taus = np.array([metrics.tau(g) for g in group])
    own = figures(group).tau
    low, high = own.interval
    error = taus.std() / len(taus) ** 0.5
    assert own.estimate == pytest.approx(metrics.tau_mean(group))
    assert low == pytest.approx(taus.mean() - 1.96 * error, abs=0.02)
    assert high == pytest.approx(taus.mean() + 1.96 * error, abs=0.02)


def test_turns_of_one_conversation_are_drawn_together():
    """Ten conversations of two equal turns know as much as ten, not as twenty."""
    one = [response([n % 5], f"p{n}") for n in range(10)]
    both = [response([n % 5], f"p{n}", turn=t) for n in range(10) for t in (0, 1)]
    assert figures(both).tau.interval == figures(one).tau.interval
    alone = [response([n % 5], f"p{n}/{t}") for n in range(10) for t in (0, 1)]
    low, high = figures(one).tau.interval
    assert high - low > 1.3 * (figures(alone).tau.interval[1] - figures(alone).tau.interval[0])


def test_pairing_makes_a_difference_far_tighter_than_the_intervals():
    # Prompts differ a lot, the two methods differ by exactly one token on each.
    lengths = [0, 4, 8, 12, 16]
    a = figures([response([n + 1], f"p{n}") for n in lengths])
    b = figures([response([n], f"p{n}") for n in lengths])
    difference = a.tau - b.tau
    assert difference.estimate == pytest.approx(1.0) and difference.interval == pytest.approx([1.0, 1.0])
    assert a.tau.interval[1] - a.tau.interval[0] > 5
    # Five prompts that agree: the sign test's 2 * (1/2)**5.
    assert difference.p_value == 1 / 16 and (a.tau - a.tau).p_value == 1.0


def test_speedup_is_a_ratio_of_sums_with_an_interval_around_it():
    ar = [response([0] * 4, f"p{n}", "ar", seconds=4.0 + n) for n in range(8)]
    fast = [response([3], f"p{n}", seconds=2.0) for n in range(8)]
    ratio = figures(ar).seconds_per_token / figures(fast).seconds_per_token
    assert ratio.estimate == pytest.approx(metrics.speedup(fast, ar)) == pytest.approx((4 * 8 + 28) / 16)
    low, high = ratio.interval
    assert low < ratio.estimate < high


def test_equal_samples_in_another_order_do_not_differ():
    a = figures([response([n % 3], f"p{n}") for n in range(12)])
    b = figures([response([(n + 1) % 3], f"p{n}") for n in range(12)])
    low, high = (a.tau - b.tau).interval
    assert low < 0 < high and (a.tau - b.tau).p_value > 0.5


def test_p_value_is_twice_the_smaller_tail_and_never_zero():
    values = np.concatenate([[0.5], np.full(97, 1.0), np.full(3, -1.0)])
    assert Resampled(values, (50,)).p_value == pytest.approx(0.06)
    assert Resampled(np.ones(101), (50,)).p_value == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("prompts", "expected"), [((5,), 1 / 16), ((2,), 1 / 2), ((20,), 2 / 10_000), ((3, 4), 1 / 64)]
)
def test_p_value_is_never_below_what_so_many_prompts_can_show(prompts, expected):
    assert Resampled(np.ones(10_001), prompts).p_value == pytest.approx(expected)


def test_holm_multiplies_by_the_tests_that_are_left_and_never_falls():
    """Sorted: 0.01 x 4, 0.03 x 3, then 0.04 x 2 = 0.08, which may not be below 0.09, and 0.5 x 1."""
    assert bootstrap.holm([0.01, 0.04, 0.03, None, 0.5]) == pytest.approx([0.04, 0.09, 0.09, None, 0.5])
    assert bootstrap.holm([0.6, 0.7]) == [1.0, 1.0] and bootstrap.holm([None]) == [None] and bootstrap.holm([]) == []


def test_one_prompt_has_no_interval_and_no_p_value():
    one = figures([response([3], "p0")])
    other = figures([response([1], "p0")])
    assert (one.tau - other.tau).estimate == 2.0
    assert (one.tau - other.tau).interval is None and (one.tau - other.tau).p_value is None
    assert one.seconds_per_token.interval is None and (one.tau / other.tau).interval is None
    # In an average it would count as known exactly.
    many = figures([response([n % 3], f"p{n}") for n in range(9)], benchmark="many")
    average = bootstrap.mean([one.tau, many.tau])
    assert average.prompts == (1, 9) and average.interval is None and average.p_value is None


def test_an_average_is_over_benchmarks_not_over_prompts():
    large = figures([response([3], f"p{n}") for n in range(30)], benchmark="large")
    small = figures([response([1], f"p{n}") for n in range(2)], benchmark="small")
    assert bootstrap.mean([large.tau, small.tau]).estimate == 3.0


def test_a_ratio_of_several_runs_has_students_interval_on_its_logarithm():
    assert bootstrap.runs_interval([2.0]) is None
    # Logarithms 0.9, 1.0, 1.1: mean 1, deviation 0.1, and t = 4.303 at two degrees of freedom.
    margin = 4.303 * 0.1 / math.sqrt(3)
    found = bootstrap.runs_interval([math.exp(x) for x in (0.9, 1.0, 1.1)])
    assert found == pytest.approx([math.exp(1 - margin), math.exp(1 + margin)])
    assert bootstrap.runs_interval([2.0] * 20) == pytest.approx([2.0, 2.0])
