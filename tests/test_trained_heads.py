"""Every head trained: golden losses of ten steps, and a scripted text learned and drafted through the decoding path."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from data.batches import collate
from data.options import RunConfig
from eval.decoding.proposals import DraftProposer, TreeOptions
from models.checkpoint import Drafter, load_drafter
from tiny import MASK, tiny_drafter, tiny_target
from trainers import block_hidden, logged, make_trainer
from training.checkpoints import newest_checkpoint
from training.forward import block_loss, capture_batch, capture_taps
from training.initialise import initialise_from_target, zero_correction
from training.objective import STATISTICS, Objective, Terms
from training.plan import build_spec
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
    "domino_shifted": (dict(), {}),
}
SHIFTED = ("dspark", "domino_shifted")


@pytest.mark.parametrize("name", RUNS)
def test_golden_run_of_each_head(tmp_path, name):
    """As test_trainer.test_golden_run, which holds Domino's in the fill-in layout, with the same tolerance."""
    spec, options = RUNS[name]
    trainer = make_trainer(tmp_path, head=spec, shifted=name in SHIFTED, options=options)
    trainer.train()
    # fp32 sums in another order (another CPU, another thread count) move the losses by about 1e-5 in ten steps.
    assert logged(trainer) == pytest.approx(GOLDEN[name], abs=2e-4)


@pytest.mark.parametrize("head", ["markov_vanilla", "markov_gated", "markov_rnn"])
def test_every_parameter_is_trained_and_survives_a_strict_reload(tmp_path, head):
    """TRAPS 50, as in test_trainer for Domino: the Markov heads, each with a confidence head."""
    spec, options = RUNS["dspark"]
    trainer = make_trainer(
        tmp_path, head={**spec, "head_type": head}, options={**options, "head": head}, max_steps=4,
        save_strategy="steps", save_steps=4,
    )  # fmt: skip
    zero_correction(trainer.model)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    assert {"confidence_head.proj.weight", "confidence_head.proj.bias", "markov_head.markov_w1.weight"} <= before.keys()
    trainer.train()
    assert [name for name, p in trainer.model.named_parameters() if torch.equal(before[name], p)] == []
    drafter, own = load_drafter(newest_checkpoint(str(tmp_path / "checkpoints"))), trainer.model.state_dict()
    assert drafter.spec == trainer.model.spec and drafter.spec.head_type == head and drafter.spec.confidence_head
    assert own.keys() == drafter.model.state_dict().keys()
    assert all(torch.equal(own[name], value) for name, value in drafter.model.state_dict().items())


def train(target, model, terms, steps=110, batch=12, lam=0.3, rate=1e-2):
    """Adam on counting rows, new anchors every step; returns the last step's sums."""
    data = TrainingRows(answer_rows(200), 64, 6, seed=0)
    objective = Objective(target, None, 0, terms)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
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


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize("head", ["none", "markov_vanilla", "markov_gated", "markov_rnn"])
def test_a_scripted_text_is_drafted_by_every_head(head, shifted):
    """TRAPS 1, 4, 5, 8 for the heads that test_trainer does not train; every token is the one before plus one."""
    target = tiny_target()
    spec = dict(head_type=head, shift_label=shifted, pure_draft_prefix_len=0, block_size=4)
    model = tiny_drafter(target, **spec).model.requires_grad_(True).train()
    initialise_from_target(model, target, torch.arange(3, 23)[None])
    zero_correction(model)
    # Without a head nothing knows the token before: the block alone has to learn it, which takes longer.
    train(target, model, Terms(), **(dict(steps=300, rate=2e-2) if head == "none" else {}))
    method = "dflash_chain" if head == "none" else "markov_chain"
    drafter, hits = Drafter(model.eval().requires_grad_(False)), 0
    depths = 4 if shifted else 3
    assert drafter.spec.num_proposals == depths
    for start in range(3, 43, 4):
        tokens = torch.arange(start, start + 9)[None]
        proposer = DraftProposer(target, drafter, method, TreeOptions())
        proposer.begin(1, 64)
        proposer.join(capture_taps(target, tokens[:, :8], (0, 2)), [8])
        tree = proposer.build(proposer.draft(tokens[:, 8]))
        hits += tree.tokens_RN[0].tolist() == list(range(start + 9, start + 9 + depths))
    assert hits >= 8


def test_a_confidence_head_learns_which_tokens_are_accepted():
    """A frozen random drafter, one batch: the confidence head, which sees slot and previous token, learns the share of
    each position that the target would accept, far beyond what a constant could say."""
    target = tiny_target()
    spec = dict(head_type="markov_vanilla", confidence_head=True, confidence_with_markov=True, block_size=4)
    model = tiny_drafter(target, **spec).model
    model.confidence_head.requires_grad_(True)
    data = TrainingRows(answer_rows(1), 64, 4, seed=0)
    batch = collate([data[0]], 4, 3, MASK, 4.0, teacher=True)
    objective = Objective(target, None, 0, Terms(Mixture(), confidence=1.0))
    optimizer = torch.optim.Adam(model.confidence_head.parameters(), lr=0.05)
    losses = []
    for _ in range(150):
        optimizer.zero_grad()
        sums = block_loss(model, model, objective, batch, 0.0)
        sums.numerator.backward()
        optimizer.step()
        rows = dict(zip(STATISTICS, sums.statistics_KT, strict=True))
        losses.append((rows["confidence_loss"].sum() / rows["weight"].sum()).item())
    taps = capture_batch(target, batch, (0, 2), True, None)
    slots = model.prediction_slots(block_hidden(target, model, taps).unflatten(1, (-1, 4)))
    said = torch.sigmoid(model.confidence_logits(slots, batch.block_ids_RNB[..., 0], batch.labels_RNT))
    codes = model.head.teacher_forced_codes(batch.block_ids_RNB[..., 0], batch.labels_RNT, target.embed, slots)
    drafted = (target.logits(slots) + codes @ model.head.rows().T).softmax(-1)
    drafted[:, :, 0] = target.logits(slots[:, :, 0]).softmax(-1)  # pure_draft_prefix_len 1
    places = batch.anchors_RN[0][:, None] + torch.arange(3)
    final = target.forward(data[0].tokens_S[None], (0,), with_final=True, with_logits=False).final[0]
    wanted = target.logits(final[places.clamp(max=len(final) - 1)]).softmax(-1)
    accepted = torch.minimum(drafted[0], wanted).sum(-1)  # the overlap: 1 - sum |p - q| / 2
    counted = batch.weights_RNT[0] > 0
    assert losses[-1] < losses[0]
    torch.testing.assert_close(said[0][counted], accepted[counted], atol=0.05, rtol=0)


def test_options_become_the_spec_of_the_drafter():
    options = dict(head="markov_gated", head_rank=8, block_size=4, shift_label=True, mask_token_id=MASK)
    config = RunConfig(**options, enable_confidence_head=True, confidence_head_with_markov=True, num_taps=2)
    _, spec = build_spec(config, tiny_target(layers=6), answer_rows(2))
    assert (spec.head_type, spec.pure_draft_prefix_len, spec.num_proposals) == ("markov_gated", 0, 4)
    assert spec.confidence_head and spec.confidence_with_markov
    with pytest.raises(ValueError, match="head must be one of none, domino, .*, got 'gru'"):
        build_spec(replace(config, head="gru"), tiny_target(layers=6), answer_rows(2))
    with pytest.raises(ValueError, match="confidence_head_with_markov needs a Markov head, the head is 'domino'"):
        build_spec(replace(config, head="domino", pure_draft_prefix_len=1), tiny_target(layers=6), answer_rows(2))
