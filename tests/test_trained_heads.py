"""Every head trained: golden losses of ten steps, and a scripted text learned and drafted through the decoding path."""

import json
from pathlib import Path

import pytest
import torch

from data.batches import collate
from eval.decoding.proposals import DraftProposer, TreeOptions
from models.checkpoint import Drafter
from tiny import MASK, tiny_drafter, tiny_target
from trainers import logged, make_trainer
from training.forward import block_loss, capture_taps
from training.initialise import initialise_from_target, zero_correction
from training.objective import Objective, Terms
from training.rows import TrainingRows
from training.slot_loss import Mixture
from training_runs import answer_rows

GOLDEN = json.loads((Path(__file__).parent / "golden.json").read_text())
DSPARK = dict(ce_weight=0.1, tv_weight=0.9, lambda_start=0.0, lambda_end=0.0, enable_confidence_head=True)
# Name in golden.json: (fields of the DrafterSpec, options).
RUNS = {
    "none": (dict(head_type="none"), {}),
    "markov_vanilla": (dict(head_type="markov_vanilla", pure_draft_prefix_len=0), {}),
    "markov_gated": (dict(head_type="markov_gated", pure_draft_prefix_len=0), {}),
    "markov_rnn": (dict(head_type="markov_rnn", pure_draft_prefix_len=0), {}),
    "dspark": (
        dict(head_type="markov_vanilla", pure_draft_prefix_len=0, confidence_head=True, confidence_with_markov=True),
        dict(**DSPARK, head="markov_vanilla", confidence_head_with_markov=True),
    ),
    "domino_kl_dpace": (dict(), dict(kl_weight=0.5, position_weights="dpace")),
}


@pytest.mark.parametrize("name", RUNS)
def test_golden_run_of_each_head(tmp_path, name):
    """As test_trainer.test_golden_run, which holds Domino's, with the same tolerance."""
    spec, options = RUNS[name]
    trainer = make_trainer(tmp_path, head=spec, shifted=name == "dspark", options=options)
    trainer.train()
    # fp32 sums in another order (another CPU, another thread count) move the losses by about 1e-5 in ten steps.
    assert logged(trainer) == pytest.approx(GOLDEN[name], abs=2e-4)


def train(target, model, terms, steps=110, batch=12, lam=0.3):
    """Adam on counting rows, new anchors every step; returns the last step's sums."""
    data = TrainingRows(answer_rows(200), 64, 6, seed=0)
    objective = Objective(target, None, 0, terms)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for step in range(steps):
        data.set_epoch(step)
        samples = [data[(step * batch + i) % len(data)] for i in range(batch)]
        rows = collate(
            samples, model.spec.block_size, model.spec.num_proposals, MASK, 4.0, teacher=objective.needs_teacher
        )
        sums = block_loss(model, model, objective, rows, lam)
        optimizer.zero_grad()
        (sums.numerator / rows.weights_RNT.sum()).backward()
        optimizer.step(), schedule.step()
    return sums


@pytest.mark.parametrize("head", ["markov_vanilla", "markov_gated", "markov_rnn"])
def test_a_scripted_text_is_drafted_by_every_head(head):
    """TRAPS 1, 4, 5, 8 for the heads that test_trainer does not train; every token is the one before plus one."""
    target, shifted = tiny_target(), head == "markov_gated"
    spec = dict(head_type=head, shift_label=shifted, pure_draft_prefix_len=0, block_size=4)
    model = tiny_drafter(target, **spec).model.requires_grad_(True).train()
    initialise_from_target(model, target, torch.arange(3, 23)[None])
    zero_correction(model)
    train(target, model, Terms())
    drafter, hits = Drafter(model.eval().requires_grad_(False)), 0
    depths = 4 if shifted else 3
    assert drafter.spec.num_proposals == depths
    for start in range(3, 43, 4):
        tokens = torch.arange(start, start + 9)[None]
        proposer = DraftProposer(target, drafter, "markov_chain", TreeOptions())
        proposer.begin(1, 64)
        proposer.join(capture_taps(target, tokens[:, :8], (0, 2)), [8])
        tree = proposer.build(proposer.draft(tokens[:, 8]))
        hits += tree.tokens_RN[0].tolist() == list(range(start + 9, start + 9 + depths))
    assert hits >= 8


def test_a_confidence_head_learns_where_the_drafter_is_right():
    """Trained alone beside a frozen drafter that knows one half of the vocabulary, it tells the halves apart."""
    target = tiny_target()
    model = tiny_drafter(target, head_type="none", confidence_head=True, block_size=4).model
    torch.nn.init.zeros_(model.confidence_head.proj.weight)
    torch.nn.init.zeros_(model.confidence_head.proj.bias)
    hidden_MD = torch.randn(64, 32)
    accepted_M = (hidden_MD[:, 0] > 0).float() * 0.8 + 0.1
    weights_M = torch.ones(64)
    objective = Objective(target, None, 0, Terms(Mixture(), confidence=1.0))
    slots = type("Slots", (), dict(hidden_MD=hidden_MD, previous_ME=None, weights_M=weights_M))
    model.confidence_head.requires_grad_(True)
    optimizer = torch.optim.Adam(model.confidence_head.parameters(), lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        # sum |t - p| = 2 (1 - accepted): the head's target is the accepted share itself.
        objective._confidence(model, slots, 2 * (1 - accepted_M)).mean().backward()
        optimizer.step()
    with torch.no_grad():
        said_M = torch.sigmoid(model.confidence_head(hidden_MD, None))
    right = (said_M > 0.5) == (accepted_M > 0.5)
    assert right.float().mean() > 0.95 and said_M.max() < 0.999
