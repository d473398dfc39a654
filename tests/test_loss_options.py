"""What options make of the loss, and those that are refused."""

import math

import pytest

from data.settings import RunConfig
from training.objective import Terms, batch_gamma, curriculum
from training.slot_loss import Mixture


@pytest.mark.parametrize("horizon, expected", [(1.0, [1.0, 0.8, 0.6, 0.4, 0.2]), (0.5, [1.0, 0.6, 0.2, 0.2, 0.2])])
def test_curriculum_ends_at_its_horizon(horizon, expected):
    config = RunConfig(lambda_start=1.0, lambda_end=0.2, lambda_horizon=horizon)
    assert [curriculum(config, step / 4) for step in range(5)] == pytest.approx(expected)


def test_options_become_terms():
    options = dict(ce_weight=0.1, kl_weight=0.2, tv_weight=0.9, candidates=32)
    config = RunConfig(**options, head="markov_gated", enable_confidence_head=True, confidence_weight=0.7)
    assert Terms.of(config) == Terms(Mixture(0.1, 0.2, 0.9, 32), confidence=0.7)
    assert config.needs_teacher and config.pure_draft_prefix_len == 0 and batch_gamma(config) == 4.0
    other = RunConfig(position_weights="dpace", dpace_alpha=0.3, confidence_detach=False)
    assert Terms.of(other) == Terms(detach=False, weights="dpace", dpace_alpha=0.3)
    assert not other.needs_teacher and other.pure_draft_prefix_len == 1 and batch_gamma(other) == math.inf


@pytest.mark.parametrize(
    "options, message",
    [
        ({"ce_weight": 0.0}, "ce_weight, kl_weight and tv_weight are all 0"),
        ({"kl_weight": -1.0}, "kl_weight must be >= 0, got -1.0"),
        ({"lambda_end": 1.5}, "lambda_end must lie in 0..1, got 1.5"),
        ({"lambda_horizon": 0.0}, "lambda_horizon must lie above 0 and at most at 1, got 0.0"),
        ({"loss_gamma": 0.0}, "loss_gamma must be above 0, got 0.0"),
        ({"dpace_alpha": 2.0}, "dpace_alpha must lie in 0..1, got 2.0"),
        ({"enable_confidence_head": True, "confidence_weight": 0.0}, "needs a confidence_weight > 0"),
    ],
)  # fmt: skip
def test_losses_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        RunConfig(**options)
