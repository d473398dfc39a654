"""The distillation loss against hand-made references, and the training forward against the inference path."""

import functools

import pytest
import torch
from torch.nn.functional import cross_entropy

from data.batches import collate, supervised_slots
from eval.decoding.proposals import DraftProposer, TreeOptions
from models.checkpoint import Drafter
from tiny import MASK, VOCAB, tiny_drafter, tiny_target
from training.attention import dense_mask
from training.forward import block_loss, capture_taps
from training.objective import STATISTICS, Objective
from training.rows import TrainingRows
from training_runs import answer_rows

LAYOUTS = pytest.mark.parametrize("shifted", [False, True])
HEADS = pytest.mark.parametrize("head", ["none", "domino", "markov_vanilla", "markov_gated", "markov_rnn"])
BLOCK = 6


def setup(shifted=False, rows=2, anchors=3, draft_ids=None, chunk=1000, target=None, taps=True, **spec):
    """Target, trainable drafter, objective and a batch with stored taps."""
    target = target or tiny_target()
    size = None if draft_ids is None else len(draft_ids)
    drafter = tiny_drafter(
        target, block_size=BLOCK, shift_label=shifted, draft_vocab_size=size, scale=0.3, **spec
    ).model
    drafter.requires_grad_(True)
    data = TrainingRows(answer_rows(rows), 64, anchors, seed=0)
    known = None
    if draft_ids is not None:
        known = torch.zeros(VOCAB, dtype=torch.bool)
        known[draft_ids] = True
    samples = [data[i] for i in range(len(data))]
    batch = collate(samples, BLOCK, drafter.spec.num_proposals, MASK, 4.0, known)
    if taps:
        batch.taps_RSC = capture_taps(target, batch.tokens_RS, drafter.spec.target_layer_ids)
    return target, drafter, Objective(target, draft_ids, chunk), batch


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def backward(model, objective, batch, lam=0.4):
    model.zero_grad()
    sums = block_loss(model, model, objective, batch, lam)
    sums.numerator.backward()
    return sums


def block_mask(batch):
    return dense_mask(batch.anchors_RN, batch.starts_RN, batch.tokens_RS.shape[1], BLOCK)


def hidden_states(target, model, batch):
    return model(
        noise_embeds=target.embed(batch.block_ids_RNB.flatten(1)),
        context_hidden_states=batch.taps_RSC,
        attention_mask=block_mask(batch),
        position_ids=batch.position_ids_RP,
    ).last_hidden_state


@LAYOUTS
def test_loss_equals_a_loop_over_blocks_and_slots(shifted):
    target, model, objective, batch = setup(shifted)
    lam, first = 0.4, 0 if shifted else 1
    hidden = hidden_states(target, model, batch).unflatten(1, (-1, BLOCK))
    expected, weight_sum = 0.0, 0.0
    for r, n in [(r, n) for r in range(2) for n in range(batch.anchors_RN.shape[1])]:
        state = model.head.initial_state(batch.block_ids_RNB[r, n, :1], target.embed)
        for t in range(batch.labels_RNT.shape[2]):
            slot = hidden[r, n, first + t][None]
            base = target.logits(slot)
            prepared = model.head.prepare(slot)
            # One leading token is predicted by base logits alone (pure_draft_prefix_len 1).
            final = base if t < 1 else base + model.head.code(state, prepared) @ model.head.rows().T
            label, weight = batch.labels_RNT[r, n, t : t + 1], batch.weights_RNT[r, n, t]
            mixed = (1 - lam) * cross_entropy(final, label) + lam * cross_entropy(base, label)
            expected, weight_sum = expected + weight * mixed, weight_sum + weight
            state = model.head.advance(state, label, target.embed, prepared)
    sums = block_loss(model, model, objective, batch, lam)
    torch.testing.assert_close(sums.numerator, expected)
    torch.testing.assert_close(sums.statistics_KT[0].sum(), weight_sum)


@HEADS
def test_statistics_agree_with_the_loss(head):
    _, model, objective, batch = setup(head_type=head)
    sums = block_loss(model, model, objective, batch, 0.4)
    by_name = dict(zip(STATISTICS, sums.statistics_KT, strict=True))
    mixed = 0.6 * by_name["final_loss"].sum() + 0.4 * by_name["base_loss"].sum()
    torch.testing.assert_close(sums.numerator.detach(), mixed)
    torch.testing.assert_close(by_name["weight"], batch.weights_RNT.sum((0, 1)))
    assert by_name["count"].tolist() == (batch.weights_RNT > 0).sum((0, 1)).tolist()


@pytest.mark.parametrize("draft", [False, True])
def test_chunks_change_neither_value_nor_gradient(draft):
    ids = torch.arange(1, VOCAB, 2) if draft else None
    results = []
    for chunk in (1000, 3):
        _, model, objective, batch = setup(rows=4, draft_ids=ids, chunk=chunk)
        sums = backward(model, objective, batch)
        results.append((sums.numerator.detach(), sums.statistics_KT, gradients(model)))
    torch.testing.assert_close(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1], equal_nan=True)
    assert results[0][2].keys() == results[1][2].keys()
    for name, gradient in results[0][2].items():
        torch.testing.assert_close(gradient, results[1][2][name], atol=1e-5, rtol=1e-4)


def test_logits_never_exceed_a_chunk():
    target, model, objective, batch = setup(rows=4, chunk=5)
    sizes, whole = [], target.logits
    target.logits = lambda hidden, ids, wide: sizes.append(len(hidden)) or whole(hidden, ids, wide)
    backward(model, objective, batch)
    # Every supervised slot once, never more than five at once.
    assert max(sizes) <= 5 and sum(sizes) == (batch.weights_RNT > 0).sum()


def test_draft_vocabulary_loss_equals_the_loss_over_its_columns():
    ids = torch.arange(1, VOCAB, 2)
    target, model, objective, batch = setup(draft_ids=ids, head_type="none", anchors=8)
    hidden = hidden_states(target, model, batch).unflatten(1, (-1, BLOCK))[:, :, 1:]
    logits = target.logits(hidden)[..., ids]
    supervised = batch.weights_RNT > 0
    index = torch.searchsorted(ids, batch.labels_RNT)
    losses = cross_entropy(logits[supervised], index[supervised], reduction="none")
    sums = block_loss(model, model, objective, batch, 1.0)
    assert supervised.any() and not supervised.all()
    torch.testing.assert_close(sums.numerator, (losses * batch.weights_RNT[supervised]).sum())


@LAYOUTS
@HEADS
def test_features_at_or_after_the_anchor_get_no_gradient(shifted, head):
    target, model, objective, batch = setup(shifted, rows=1, anchors=1, head_type=head)
    anchor = int(batch.anchors_RN[0, 0])
    tokens = torch.cat([batch.tokens_RS, torch.full((1, 5), 7)], dim=1)
    batch.tokens_RS, batch.context_mask_RS = tokens, torch.ones_like(tokens, dtype=torch.bool)
    slots = batch.position_ids_RP[:, -BLOCK:]
    batch.position_ids_RP = torch.cat([torch.arange(tokens.shape[1])[None], slots], dim=1)
    batch.taps_RSC = capture_taps(target, tokens, model.spec.target_layer_ids).requires_grad_(True)
    backward(model, objective, batch)
    gradient = batch.taps_RSC.grad[0].abs().sum(-1)
    assert (gradient[anchor:] == 0).all() and len(gradient[anchor:]) == 5
    assert (gradient[:anchor] > 0).all()


def draft_logits(target, model, batch, hidden):
    """(Base, final) logits [R, N, T, V] as a chain of the batch's own labels is drafted: the first token, where
    pure_draft_prefix_len is 1, and a drafter without a head have base logits alone."""
    slots = model.prediction_slots(hidden.unflatten(1, (-1, BLOCK)))
    base = final = target.logits(slots)
    if model.head is not None:
        codes = model.head.teacher_forced_codes(batch.block_ids_RNB[..., 0], batch.labels_RNT, target.embed, slots)
        final = base + (codes @ model.head.rows().T) * model.corrected_depths()[:, None]
    return base, final


@torch.inference_mode()
def decoded_logits(target, model, draft, labels_RT):
    """Final logits [R, T, V] of a draft, token by token as trees and chains are built, these labels drafted."""
    if model.head is None:
        return draft.logits_RTV
    state, slots = model.head.initial_state(draft.anchor_R, target.embed), model.head.prepare(draft.hidden_RTD)
    logits, corrected = draft.logits_RTV.clone(), model.corrected_depths().tolist()
    for t, label_R in enumerate(labels_RT.unbind(1)):
        if corrected[t]:
            logits[:, t] += model.head.code(state, slots[:, t]) @ model.head.rows().T
        state = model.head.advance(state, label_R, target.embed, slots[:, t])
    return logits


@LAYOUTS
@HEADS
def test_blocks_are_bidirectional(shifted, head):
    """A causal block would hide slot 5 from slot 2 (TRAPS 2): the mask embedding there moves what slot 2 drafts."""
    target, model, _, batch = setup(shifted, rows=1, anchors=1, head_type=head)
    before = hidden_states(target, model, batch)
    embeds = target.embed(batch.block_ids_RNB.flatten(1))
    embeds[0, 5] += 1.0
    mask = block_mask(batch)
    after = model(embeds, batch.taps_RSC, mask, batch.position_ids_RP).last_hidden_state
    assert (after[0, 2] - before[0, 2]).abs().max() > 1e-3
    place = 2 - model.spec.first_slot  # of slot 2 among the depths
    for old, new in zip(*(draft_logits(target, model, batch, hidden) for hidden in (before, after)), strict=True):
        assert (new[0, 0, place] - old[0, 0, place]).abs().max() > 1e-3


@LAYOUTS
@HEADS
def test_the_anchor_token_moves_every_slot(shifted, head):
    """TRAPS 3: through the block itself, not only through a head that reads the anchor."""
    target, model, _, batch = setup(shifted, rows=1, anchors=1, head_type=head)
    before = hidden_states(target, model, batch)
    old = draft_logits(target, model, batch, before)
    batch.block_ids_RNB[0, 0, 0] = 40
    after = hidden_states(target, model, batch)
    assert ((after - before).abs().amax(-1) > 1e-3).all()
    for was, now in zip(old, draft_logits(target, model, batch, after), strict=True):
        assert was.shape[2] == model.spec.num_proposals and ((now - was).abs().amax(-1) > 1e-3).all()


def test_blocks_do_not_see_each_other():
    target, model, _, batch = setup(rows=1, anchors=2)
    before = hidden_states(target, model, batch)
    batch.block_ids_RNB[0, 1] = 40
    change = (hidden_states(target, model, batch) - before).abs().amax(-1)[0]
    assert (change[:BLOCK] == 0).all() and (change[BLOCK:] > 0).all()


@LAYOUTS
@HEADS
def test_slot_zero_is_trained_when_shifted_only(shifted, head):
    target, model, objective, batch = setup(shifted, head_type=head)
    hidden = hidden_states(target, model, batch).detach().requires_grad_(True)
    objective(model, batch, 0.4, hidden).numerator.backward()
    slots = hidden.grad.unflatten(1, (-1, BLOCK)).abs().sum((0, 1, 3))
    assert (slots[0] > 0) == shifted and (slots[1:] > 0).all()


@LAYOUTS
def test_a_masked_block_changes_nothing(shifted):
    results = []
    for extra in (False, True):
        _, model, objective, batch = setup(shifted)
        if extra:
            rows = batch.anchors_RN.shape[0]
            batch.anchors_RN = torch.cat([batch.anchors_RN, torch.zeros(rows, 1, dtype=torch.long)], dim=1)
            batch.starts_RN = torch.zeros_like(batch.anchors_RN)
            for name in ("block_ids_RNB", "labels_RNT", "weights_RNT"):
                value = getattr(batch, name)
                block = torch.zeros_like(value[:, :1]) if name == "weights_RNT" else torch.full_like(value[:, :1], 9)
                setattr(batch, name, torch.cat([value, block], dim=1))
            batch.position_ids_RP = torch.cat([batch.position_ids_RP, torch.arange(BLOCK).expand(rows, -1)], dim=1)
            batch.supervised_M, batch.supervised_T = supervised_slots(batch.weights_RNT)
        sums = backward(model, objective, batch)
        results.append((sums.numerator.detach(), gradients(model)))
    torch.testing.assert_close(results[0][0], results[1][0])
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], atol=1e-6, rtol=1e-4)


def test_heads_read_the_previous_label_of_their_own_block():
    """Identity tables: the vanilla Markov code is the previous token itself (TRAPS 8)."""
    target, model, _, batch = setup(head_type="markov_vanilla", head_rank=VOCAB)
    with torch.no_grad():
        model.head.markov_head.markov_w1.weight.copy_(torch.eye(VOCAB))
    hidden = torch.zeros(*batch.labels_RNT.shape, 32)
    codes = model.head.teacher_forced_codes(batch.block_ids_RNB[..., 0], batch.labels_RNT, target.embed, hidden)
    previous = codes.argmax(-1)
    assert torch.equal(previous[..., 0], batch.block_ids_RNB[..., 0])
    assert torch.equal(previous[..., 1:], batch.labels_RNT[..., :-1])


def test_domino_state_does_not_leak_between_blocks():
    target, model, _, batch = setup()
    hidden = torch.randn(*batch.labels_RNT.shape, 32)
    codes = functools.partial(model.head.teacher_forced_codes, embed=target.embed, hidden=hidden)
    before = codes(batch.block_ids_RNB[..., 0], batch.labels_RNT)
    labels = batch.labels_RNT.clone()
    labels[:, 0] = 50
    after = codes(batch.block_ids_RNB[..., 0], labels)
    assert torch.equal(before[:, 1:], after[:, 1:]) and torch.equal(before[:, 0, 0], after[:, 0, 0])
    assert not torch.equal(before[:, 0, 1:], after[:, 0, 1:])


@pytest.mark.parametrize("head", ["none", "domino"])
def test_a_batch_without_supervised_slots_keeps_every_parameter_in_the_graph(head):
    _, model, objective, batch = setup(head_type=head)
    batch.weights_RNT.zero_()
    batch.supervised_M, batch.supervised_T = supervised_slots(batch.weights_RNT)
    sums = backward(model, objective, batch)
    assert sums.numerator.item() == 0 and sums.statistics_KT.nansum() == 0
    found = gradients(model)
    # The last GRU step of a block feeds no code, but its weights are shared with the earlier ones.
    assert found.keys() == dict(model.named_parameters()).keys()
    assert all((gradient == 0).all() for gradient in found.values())


@LAYOUTS
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_row_alone_padded_in_a_batch_same_loss_and_gradient(shifted, family):
    target = tiny_target(family)
    data = TrainingRows(answer_rows(3), 64, 3, seed=0)
    results = []
    for groups in ([[0], [1], [2]], [[0, 1, 2]]):
        _, model, objective, _ = setup(shifted, target=target)
        model.zero_grad()
        total = 0.0
        for group in groups:
            batch = collate([data[i] for i in group], BLOCK, model.spec.num_proposals, MASK, 4.0)
            sums = block_loss(model, model, objective, batch, 0.4)
            sums.numerator.backward()
            total += sums.numerator.item()
        results.append((total, gradients(model)))
    assert results[0][0] == pytest.approx(results[1][0], rel=1e-5)
    for name, gradient in results[0][1].items():
        torch.testing.assert_close(gradient, results[1][1][name], atol=2e-5, rtol=1e-3)


def test_eager_and_sdpa_attention_agree():
    results = []
    for attention in ("eager", "sdpa"):
        target, model, objective, batch = setup()
        model.config._attn_implementation = attention
        hidden = hidden_states(target, model, batch)
        results.append((hidden, backward(model, objective, batch).numerator))
    torch.testing.assert_close(results[0][0], results[1][0], atol=1e-4, rtol=0)
    torch.testing.assert_close(results[0][1], results[1][1], atol=1e-4, rtol=1e-5)


@LAYOUTS
@HEADS
def test_training_blocks_equal_the_drafts_of_decoding(shifted, head):
    """TRAPS 13: the proposer reads the same tokens round by round into its cache, a draft at each anchor."""
    target, model, _, batch = setup(shifted, rows=1, anchors=5, head_type=head)
    hidden = hidden_states(target, model, batch)
    states = model.prediction_slots(hidden.unflatten(1, (-1, BLOCK)))
    base, final = draft_logits(target, model, batch, hidden)
    proposer = DraftProposer(target, Drafter(model), "dflash_chain", TreeOptions())
    anchors, done = batch.anchors_RN[0].tolist(), 0
    assert len(set(anchors)) == 5 and anchors == sorted(anchors) and anchors[0] > 0
    proposer.begin(1, 64)
    for n, anchor in enumerate(anchors):
        taps = batch.taps_RSC[:, done:anchor]
        proposer.commit(taps, [anchor - done]) if n else proposer.join(taps, [anchor])
        draft, done = proposer.draft(batch.block_ids_RNB[:, n, 0]), anchor
        torch.testing.assert_close(draft.hidden_RTD, states[:, n], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(draft.logits_RTV, base[:, n], atol=1e-5, rtol=1e-5)
        decoded = decoded_logits(target, model, draft, batch.labels_RNT[:, n])
        torch.testing.assert_close(decoded, final[:, n], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("anchors", [1, 7])
def test_training_blocks_equal_the_inference_path(anchors):
    """One block with the context strictly before its anchor and 0-based positions (TRAPS 13)."""
    target, model, _, batch = setup(rows=1, anchors=anchors)
    training = hidden_states(target, model, batch).unflatten(1, (-1, BLOCK))
    for n, anchor in enumerate(batch.anchors_RN[0].tolist()):
        ids = batch.block_ids_RNB[:, n]
        inference = model(target.embed(ids), batch.taps_RSC[:, :anchor]).last_hidden_state
        torch.testing.assert_close(training[:, n], inference, rtol=1e-5, atol=1e-5)


def test_stored_and_online_features_give_equal_losses():
    _, model, objective, batch = setup(rows=4)
    stored = block_loss(model, model, objective, batch, 0.4).numerator
    batch.taps_RSC = None
    assert block_loss(model, model, objective, batch, 0.4).numerator.item() == stored.item()


def test_losses_of_bf16_states_are_computed_in_fp32():
    """Near convergence, softmax in bf16 loses most of the gradient 1 - p (TRAPS 26)."""
    target, model, _, batch = setup(head_type="none")
    target.model.bfloat16()
    objective = Objective(target, None, 1000)
    labels = batch.labels_RNT.flatten()
    # States that point at the label: its probability is about 0.99, so that 1 - p is the whole gradient.
    rows = target.model.get_output_embeddings().weight[labels]
    slots = (rows / rows.float().pow(2).sum(-1, keepdim=True) * 9).bfloat16()
    hidden = torch.zeros(*batch.block_ids_RNB.shape, 32, dtype=torch.bfloat16)
    hidden[:, :, 1:] = slots.view(*batch.labels_RNT.shape, 32)
    hidden.requires_grad_(True)
    objective(model, batch, 1.0, hidden.flatten(1, 2)).numerator.backward()
    exact = hidden.detach().float().requires_grad_(True)
    supervised = batch.weights_RNT > 0
    logits = exact[:, :, 1:][supervised] @ target.model.get_output_embeddings().weight.float().T
    losses = cross_entropy(logits, batch.labels_RNT[supervised], reduction="none")
    (losses * batch.weights_RNT[supervised]).sum().backward()
    error = (hidden.grad.float() - exact.grad).norm() / exact.grad.norm()
    assert error < 0.02
