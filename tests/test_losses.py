"""Every term of the loss, for every head and layout, against plain autograd over the whole vocabulary at once."""

import math
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

from data.batches import collate, supervised_slots
from models.heads import HEADS
from tiny import MASK, VOCAB, tiny_drafter, tiny_target
from trainers import block_hidden
from training.forward import block_loss, capture_batch
from training.objective import STATISTICS, Objective, Terms
from training.rows import TrainingRows
from training.slot_loss import Mixture, dpace_weights, score
from training_runs import answer_rows

BLOCK, GAMMA = 5, 3.0
ALL_HEADS = ("none", *HEADS)
MIXTURES = {
    "ce": Mixture(),
    "kl": Mixture(0.0, 1.0, 0.0),
    "tv": Mixture(0.0, 0.0, 1.0),
    "dspark": Mixture(0.1, 0.3, 0.9),
}


def setup(terms, head="domino", shifted=False, draft=False, chunk=1000, rows=3, target=None, **spec):
    """Target, trainable drafter, objective, and a batch with the taps and final states that it needs."""
    target = target or tiny_target()
    ids = torch.arange(1, VOCAB, 2) if draft else None
    options = dict(head_type=head, shift_label=shifted, draft_vocab_size=None if ids is None else len(ids), **spec)
    model = tiny_drafter(target, block_size=BLOCK, scale=0.5, pure_draft_prefix_len=1, **options).model
    model.requires_grad_(True)
    known = None
    if draft:
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[ids] = True
    data, gamma = TrainingRows(answer_rows(rows), 64, 4, seed=0), math.inf if terms.weights == "dpace" else GAMMA
    objective = Objective(target, ids, chunk, terms)
    samples = [data[i] for i in range(rows)]
    batch = collate(samples, BLOCK, model.spec.num_proposals, MASK, gamma, known, teacher=objective.needs_teacher)
    batch = capture_batch(target, batch, model.spec.target_layer_ids, objective.needs_teacher, None)
    return target, model, objective, batch


def run(model, objective, batch, lam=0.4):
    """Sums and gradients by name."""
    model.zero_grad()
    sums = block_loss(model, model, objective, batch, lam)
    sums.numerator.backward()
    return sums, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class Reference:
    """The loss written from METHODS sections 1 and 2: all logits at once, autograd for every gradient."""

    def __init__(self, target, objective, lam=0.4):
        self.target, self.terms, self.ids, self.lam = target, objective.terms, objective.draft_ids, lam
        self.index = objective.index_V

    def __call__(self, model, batch, lam, hidden):
        slots = model.prediction_slots(hidden.unflatten(1, (-1, BLOCK)))
        head = self.target.model.get_output_embeddings().weight
        head = head if self.ids is None else head[self.ids]
        base = slots @ head.T
        final = base
        if model.head is not None:
            anchors = batch.block_ids_RNB[..., 0]
            codes = model.head.teacher_forced_codes(anchors, batch.labels_RNT, self.target.embed, slots)
            final = torch.where(model.corrected_depths()[:, None], base + codes @ model.head.rows().T, base)
        labels = batch.labels_RNT if self.index is None else self.index[batch.labels_RNT]
        whole = teacher = self.teacher(batch) if batch.final_RSD is not None else None
        if self.ids is not None and whole is not None:  # learned is its part inside the draft vocabulary, renormalised
            whole = whole[..., self.ids]
            teacher = whole / whole.sum(-1, keepdim=True).clamp(min=1e-30)
        share = torch.where(model.corrected_depths(), lam, 1.0)
        mixed = (1 - share) * self.mixture(final, labels, teacher) + share * self.mixture(base, labels, teacher)
        weights = self.weights(batch, final, labels)
        total = (weights * mixed).sum()
        if self.terms.confidence:
            inputs = slots.detach() if self.terms.detach else slots
            if model.spec.confidence_with_markov:
                previous = torch.cat([anchors[..., None], batch.labels_RNT[..., :-1]], dim=-1)
                rows = model.head.markov_head.markov_w1(previous)
                inputs = torch.cat([inputs, rows.detach() if self.terms.detach else rows], dim=-1)
            logits = (inputs @ model.confidence_head.proj.weight.T + model.confidence_head.proj.bias)[..., 0]
            accepted = torch.minimum(final.softmax(-1), whole).sum(-1).detach()  # what is outside is never proposed
            losses = binary_cross_entropy_with_logits(logits, accepted.clamp(0, 1), reduction="none")
            total = total + self.terms.confidence * (weights * losses).sum()
        return total

    def teacher(self, batch):
        """The target's distribution over all tokens at the token before each label, position by position."""
        rows, anchors, depths = batch.labels_RNT.shape
        head = self.target.model.get_output_embeddings().weight
        probs = torch.zeros(rows, anchors, depths, len(head))
        for r, n, t in torch.cartesian_prod(*map(torch.arange, (rows, anchors, depths))).tolist():
            if batch.weights_RNT[r, n, t] > 0:
                place = int(batch.anchors_RN[r, n]) + t  # the label stands at anchor + t + 1
                probs[r, n, t] = (batch.final_RSD[r, place] @ head.T).softmax(-1)
        return probs

    def mixture(self, logits, labels, teacher):
        mixture, log_p = self.terms.mixture, logits.log_softmax(-1)
        total = mixture.ce * cross_entropy(logits.movedim(-1, 1), labels, reduction="none")
        if teacher is not None:
            total = total + mixture.kl * (torch.xlogy(teacher, teacher) - teacher * log_p).sum(-1)
            total = total + mixture.tv * (log_p.exp() - teacher).abs().sum(-1)
        return total

    def weights(self, batch, final, labels):
        if self.terms.weights == "exponential":
            return batch.weights_RNT
        probs = final.softmax(-1).gather(-1, labels[..., None])[..., 0].detach()
        weights = torch.zeros_like(probs)
        for r, n in torch.cartesian_prod(*map(torch.arange, probs.shape[:2])).tolist():
            length, survival, products = int(batch.weights_RNT[r, n].sum()), 1.0, []
            for q in probs[r, n, :length].tolist():
                survival *= (1 - self.terms.dpace_alpha) * q + self.terms.dpace_alpha
                products.append(survival)
            for t in range(length):
                weights[r, n, t] = sum(products[t:])
        return weights


def check(terms, lam=0.4, **options):
    """The chunked loss equals the reference in value and in every gradient."""
    target, model, objective, batch = setup(terms, chunk=3, **options)
    sums, found = run(model, objective, batch, lam)
    model.zero_grad()
    loss = Reference(target, objective)(model, batch, lam, block_hidden(target, model, batch))
    loss.backward()
    torch.testing.assert_close(sums.numerator, loss, rtol=1e-5, atol=1e-5)
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert found.keys() == expected.keys() == dict(model.named_parameters()).keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")
    return sums


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("head", ALL_HEADS)
def test_chunked_loss_equals_the_full_one(head, mixture):
    check(Terms(MIXTURES[mixture]), head=head, shifted=head in ("markov_gated", "domino"))


@pytest.mark.parametrize("head", ALL_HEADS)
def test_chunked_loss_with_confidence_and_dpace_over_a_draft_vocabulary(head):
    terms = Terms(Mixture(0.1, 0.0, 0.9), confidence=1.0, weights="dpace", dpace_alpha=0.3)
    markov = head.startswith("markov")
    check(terms, head=head, draft=True, confidence_head=True, confidence_with_markov=markov)


def test_confidence_counts_what_the_target_gives_to_tokens_outside_the_draft_vocabulary():
    """t = (.36, .24 | .40 outside) and p = (.6, .4): nothing is left to learn, and .6 of the samples are accepted."""
    target, labels = tiny_target(), torch.tensor([0, 1])
    head = target.model.get_output_embeddings().weight.data
    head.zero_()
    head[:, 0] = -100.0
    head[[3, 7, 8], 0] = torch.tensor([0.36, 0.24, 0.40]).log()
    objective = Objective(target, torch.tensor([3, 7]), 0, Terms(MIXTURES["dspark"], confidence=1.0))
    final = torch.eye(head.shape[1])[:1].expand(2, -1)
    teacher = objective.teacher(lambda index: final[index], torch.arange(2), labels)
    scores, _ = score(torch.tensor([0.6, 0.4]).log().expand(2, -1), labels, torch.ones(2), Mixture(), teacher)
    assert scores.overlap_M.tolist() == pytest.approx([0.6, 0.6])
    assert max(scores.tv_M.abs().max(), scores.kl_M.abs().max()) < 1e-6
    assert teacher.hits_M.tolist() == [False, False]  # token 8 is the target's own
    without = Objective(target, objective.draft_ids, 0, Terms(MIXTURES["dspark"]))
    teacher = without.teacher(lambda index: final[index], torch.arange(2), labels)
    assert teacher.inside_M is None and teacher.hits_M.tolist() == [True, False]


def test_an_attached_confidence_head_trains_the_backbone_too():
    terms = Terms(Mixture(), confidence=2.0, detach=False)
    check(terms, head="markov_rnn", confidence_head=True, confidence_with_markov=True)
    gradients = []
    for detach in (True, False):
        options = dict(head="markov_rnn", confidence_head=True, confidence_with_markov=True)
        target, model, objective, batch = setup(replace(terms, detach=detach), **options)
        gradients.append(run(model, objective, batch)[1])
    assert torch.equal(gradients[0]["confidence_head.proj.weight"], gradients[1]["confidence_head.proj.weight"])
    assert not torch.allclose(gradients[0]["fc.weight"], gradients[1]["fc.weight"])


@pytest.mark.parametrize("lam", [0.0, 1.0])
def test_ends_of_the_curriculum(lam):
    check(Terms(MIXTURES["dspark"]), lam=lam, head="domino")


@pytest.mark.parametrize("head", ALL_HEADS)
def test_no_supervised_slot_leaves_every_parameter_in_the_graph(head):
    terms = Terms(MIXTURES["dspark"], confidence=1.0)
    _, model, objective, batch = setup(terms, head=head, confidence_head=True)
    batch.weights_RNT.zero_()
    batch.supervised_M, batch.supervised_T = supervised_slots(batch.weights_RNT)
    sums, found = run(model, objective, batch)
    assert sums.numerator.item() == 0 and sums.statistics_KT.sum() == 0
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all((gradient == 0).all() for gradient in found.values())


@pytest.mark.parametrize("head", ALL_HEADS)
def test_a_row_alone_or_in_a_batch_gives_the_same_loss_and_gradient(head):
    """TRAPS 9 for every head, the target's distribution included."""
    terms = Terms(MIXTURES["dspark"], weights="dpace")
    target, totals = tiny_target(), []
    data = TrainingRows(answer_rows(3), 64, 4, seed=0)
    for groups in ([[0], [1], [2]], [[0, 1, 2]]):
        _, model, objective, _ = setup(terms, head=head, target=target)
        value, gradients = 0.0, {}
        for group in groups:
            samples = [data[i] for i in group]
            batch = collate(samples, BLOCK, model.spec.num_proposals, MASK, math.inf, teacher=True)
            sums, found = run(model, objective, batch)
            value += sums.numerator.item()
            gradients = {name: gradients.get(name, 0) + g for name, g in found.items()}
        totals.append((value, gradients))
    assert totals[0][0] == pytest.approx(totals[1][0], rel=1e-5)
    for name, gradient in totals[0][1].items():
        torch.testing.assert_close(gradient, totals[1][1][name], atol=2e-5, rtol=1e-3)


@pytest.mark.parametrize("head", ALL_HEADS)
def test_an_all_masked_block_changes_nothing(head):
    """TRAPS 7; D-PACE reads the drafter's probabilities, which a masked block has too."""
    results = []
    for extra in (False, True):
        _, model, objective, batch = setup(Terms(MIXTURES["dspark"], weights="dpace"), head=head)
        if extra:
            for name in ("anchors_RN", "starts_RN", "block_ids_RNB", "labels_RNT", "weights_RNT"):
                value = getattr(batch, name)
                setattr(batch, name, torch.cat([value, torch.zeros_like(value[:, :1])], dim=1))
            more = torch.arange(BLOCK).expand(len(batch.ids), -1)
            batch.position_ids_RP = torch.cat([batch.position_ids_RP, more], dim=1)
            batch.supervised_M, batch.supervised_T = supervised_slots(batch.weights_RNT)
        results.append(run(model, objective, batch))
    torch.testing.assert_close(results[0][0].numerator, results[1][0].numerator)
    torch.testing.assert_close(results[0][0].statistics_KT, results[1][0].statistics_KT, equal_nan=True)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("head", ["domino", "markov_rnn"])
def test_the_teacher_gets_no_gradient(head):
    """TRAPS 27: neither its hidden states nor its LM head."""
    target, model, objective, batch = setup(Terms(MIXTURES["dspark"]), head=head)
    batch.final_RSD.requires_grad_(True)
    run(model, objective, batch)
    assert batch.final_RSD.grad is None
    assert all(p.grad is None for p in target.model.parameters())


def test_stored_and_captured_final_states_give_equal_losses():
    target, model, objective, batch = setup(Terms(MIXTURES["dspark"]))
    stored, _ = run(model, objective, batch)
    captured, _ = run(model, objective, replace(batch, final_RSD=None))  # taps stored alone: the target is asked
    assert captured.numerator.item() == stored.numerator.item()
    samples = [TrainingRows(answer_rows(3), 64, 4, seed=0)[i] for i in range(3)]
    whole = [target.forward(s.tokens_S[None], (0, 2), with_final=True, with_logits=False) for s in samples]
    for sample, output in zip(samples, whole, strict=True):  # the last token has no feature: it predicts nothing
        sample.taps_SC, sample.final_SD = output.taps[0, :-1].clone(), output.final[0, :-1].clone()
    read = collate(samples, BLOCK, model.spec.num_proposals, MASK, GAMMA, teacher=True)
    torch.testing.assert_close(run(model, objective, read)[0].numerator, stored.numerator)
    without = collate(samples, BLOCK, model.spec.num_proposals, MASK, GAMMA)
    assert without.final_RSD is None and without.tokens_RS.shape[1] < read.tokens_RS.shape[1]


def test_dpace_weights_by_hand():
    """alpha 0.5, p = (1, .5, 0) then a masked slot: s = (1, .75, .5), products (1, .75, .375)."""
    probs, mask = torch.tensor([[[1.0, 0.5, 0.0, 0.9]]]), torch.tensor([[[1.0, 1.0, 1.0, 0.0]]])
    assert dpace_weights(probs, mask, 0.5).tolist() == [[[2.125, 1.125, 0.375, 0.0]]]
    assert dpace_weights(probs, 0 * mask, 0.5).abs().sum() == 0


def test_dpace_is_the_gradient_of_the_expected_length():
    """With alpha 0, sum of w log p has the gradient of the expected accepted length sum_t p_1 ... p_t."""
    log_p = torch.randn(1, 1, 4).clamp(max=0).requires_grad_(True)
    length = log_p.cumsum(-1).exp().sum()
    (expected,) = torch.autograd.grad(length, log_p)
    torch.testing.assert_close(dpace_weights(log_p.detach().exp(), torch.ones(1, 1, 4), 0.0), expected)


def test_statistics_against_a_loop_over_blocks():
    terms = Terms(replace(MIXTURES["dspark"], candidates=3), confidence=1.0)
    target, model, objective, batch = setup(terms, rows=4, shifted=True, confidence_head=True)
    # A label that the drafter finds likely now and then: its own argmax at a few slots.
    hidden = block_hidden(target, model, batch)
    base = target.logits(hidden.unflatten(1, (-1, BLOCK)))
    batch.labels_RNT[:, ::2, :2] = base.argmax(-1)[:, ::2, :2]
    codes = model.head.teacher_forced_codes(
        batch.block_ids_RNB[..., 0],
        batch.labels_RNT,
        target.embed,
        model.prediction_slots(hidden.unflatten(1, (-1, BLOCK))),
    )
    final = torch.where(model.corrected_depths()[:, None], base + codes @ model.head.rows().T, base)
    sums, _ = run(model, objective, batch)
    rows = dict(zip(STATISTICS, sums.statistics_KT, strict=True))
    depths = model.spec.num_proposals
    expected = {
        name: torch.zeros(depths) for name in ("base_hits", "recall_hits", "agreement_hits", "base_run", "final_run")
    }
    for r, n in torch.cartesian_prod(*map(torch.arange, batch.anchors_RN.shape)).tolist():
        running = {"base": True, "final": True}
        for t in range(depths):
            if batch.weights_RNT[r, n, t] == 0:
                break
            label = int(batch.labels_RNT[r, n, t])
            expected["base_hits"][t] += int(base[r, n, t].argmax()) == label
            expected["recall_hits"][t] += label in base[r, n, t].topk(3).indices.tolist()
            teacher = target.logits(batch.final_RSD[r, int(batch.anchors_RN[r, n]) + t][None])
            expected["agreement_hits"][t] += int(teacher.argmax()) == label
            for name, logits in (("base", base), ("final", final)):
                running[name] &= int(logits[r, n, t].argmax()) == label
                expected[f"{name}_run"][t] += running[name]
    for name, values in expected.items():
        assert rows[name].tolist() == values.tolist(), name
    assert rows["base_run"].sum() > 0 and rows["final_run"].sum() > 0 and rows["recall_hits"].sum() > 0
    # The count at depth 1 is the number of blocks with a supervised slot.
    assert rows["count"][0] == (batch.weights_RNT[..., 0] > 0).sum()


def test_what_a_loss_cannot_know_is_nan():
    _, model, objective, batch = setup(Terms())
    rows = dict(zip(STATISTICS, run(model, objective, batch)[0].statistics_KT, strict=True))
    unknown = {name for name, values in rows.items() if values.isnan().any()}
    assert unknown == {"agreement_hits", "kl_loss", "tv_loss", "confidence_loss"}


def test_logits_never_exceed_a_chunk():
    terms = Terms(MIXTURES["dspark"], weights="dpace")
    target, model, objective, batch = setup(terms, rows=4, chunk=5)
    sizes, whole = [], target.logits
    target.logits = lambda hidden, ids, wide: sizes.append(len(hidden)) or whole(hidden, ids, wide)
    run(model, objective, batch)
    # Each supervised slot in D-PACE's pre-pass, for the drafter and for the target.
    assert max(sizes) <= 5 and sum(sizes) == 3 * (batch.weights_RNT > 0).sum()


def test_logits_over_all_tokens_take_no_more_than_a_chunk_over_the_draft_vocabulary():
    terms = Terms(MIXTURES["dspark"], confidence=1.0)
    target, model, objective, batch = setup(terms, "none", rows=4, chunk=5, draft=True, confidence_head=True)
    sizes, whole = {True: [], False: []}, target.logits
    target.logits = lambda hidden, ids=None, **more: sizes[ids is None].append(len(hidden)) or whole(hidden, ids)
    run(model, objective, batch)
    slots = (batch.weights_RNT > 0).sum()
    assert max(sizes[True]) == 5 * len(objective.draft_ids) // VOCAB and sum(sizes[True]) == slots
    assert max(sizes[False]) == 5 and sum(sizes[False]) == 2 * slots


def test_the_default_chunk_holds_64_mib():
    target = tiny_target()
    assert Objective(target, None).chunk * VOCAB * 4 == 64 * 2**20
    assert Objective(target, torch.arange(2), 0).chunk == 8 * 2**20 and Objective(target, None, 7).chunk == 7


@pytest.mark.parametrize("mixture", ["ce", "kl", "tv"])
@pytest.mark.parametrize("head", ["none", "domino", "markov_gated"])
def test_bf16_models_get_the_gradient_of_fp32_losses(head, mixture):
    """Near convergence softmax in bf16 loses most of the gradient 1 - p (TRAPS 26): states point at the labels."""
    terms = Terms(MIXTURES[mixture])
    _, model, objective, batch = setup(terms, head=head)
    weight = objective.target.model.get_output_embeddings().weight.data
    weight.copy_(weight.bfloat16())
    labels = batch.labels_RNT
    rows = weight[labels]
    hidden = torch.zeros(*batch.block_ids_RNB.shape, 32)
    hidden[:, :, 1:] = (rows / rows.pow(2).sum(-1, keepdim=True) * 9).bfloat16()
    for parameter in model.parameters():
        parameter.data = (0.1 * parameter.data).bfloat16().float()
    gradients = []
    for dtype in (torch.float32, torch.bfloat16):
        model.to(dtype), objective.target.model.to(dtype)
        leaf = hidden.to(dtype).flatten(1, 2).requires_grad_(True)
        objective(model, replace(batch, final_RSD=_like(batch, dtype)), 0.3, leaf).numerator.backward()
        gradients.append(leaf.grad.float())
    error = (gradients[1] - gradients[0]).norm() / gradients[0].norm()
    assert error < 0.05


def _like(batch, dtype):
    return None if batch.final_RSD is None else batch.final_RSD.bfloat16().to(dtype)
