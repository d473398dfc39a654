"""Several conversations in a row: the same anchors, loss and gradients as each alone (TRAPS 9)."""

import pytest
import torch

from data.batches import Sample, collate, pack_samples
from tiny import FAMILIES, MASK, tiny_drafter, tiny_target
from training.forward import block_loss, capture_batch, capture_taps
from training.objective import Objective, Terms
from training.packing import best_fit
from training.rows import PackedRows, TrainingRows
from training.slot_loss import Mixture
from training_runs import answer_rows

HEADS = ["none", "domino", "markov_vanilla", "markov_gated", "markov_rnn"]
TEACHER = Terms(Mixture(0.2, 0.3, 0.5, 8))


def samples(count=5, anchors=4, epoch=0):
    data = TrainingRows(answer_rows(count), 64, anchors, seed=0)
    data.set_epoch(epoch)
    return [data[i] for i in range(count)]


def batch_of(model, rows, **options):
    spec = model.spec
    return collate(rows, spec.block_size, spec.num_proposals, spec.mask_token_id, 4.0, **options)


@pytest.mark.parametrize(("shifted", "terms"), [(False, Terms()), (True, TEACHER)], ids=["fill-in ce", "shifted kl+tv"])
@pytest.mark.parametrize("head", HEADS)
def test_alone_padded_or_packed_a_document_gives_the_same_loss_and_gradient(head, shifted, terms):
    target = tiny_target()
    model = tiny_drafter(target, head_type=head, shift_label=shifted, scale=0.3).model.requires_grad_(True)
    objective, rows = Objective(target, None, 16, terms), samples()
    teacher = objective.needs_teacher
    together = {
        "alone": [[row] for row in rows],
        "padded": [rows],
        "packed": [[pack_samples(rows[:3]), pack_samples(rows[3:])]],
    }
    results = {}
    for name, batches in together.items():
        model.zero_grad()
        numerators = []
        for batch in batches:
            sums = block_loss(model, model, objective, batch_of(model, batch, teacher=teacher), 0.4)
            sums.numerator.backward()
            numerators.append(sums.numerator.detach())
        gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
        results[name] = sum(numerators), gradients
    loss, gradients = results["alone"]
    assert loss > 0 and gradients
    for name in ("padded", "packed"):
        torch.testing.assert_close(results[name][0], loss, rtol=1e-5, atol=1e-5)
        for key, gradient in results[name][1].items():
            size = gradients[key].abs().max().clamp(min=1e-6)
            torch.testing.assert_close(gradient / size, gradients[key] / size, rtol=0, atol=1e-5, msg=f"{name} {key}")


def test_anchors_are_those_of_the_document_alone():
    alone, again = samples(3), samples(3, epoch=1)
    row = pack_samples(alone)
    lengths = [len(s.tokens_S) for s in alone]
    offsets = [0, lengths[0], lengths[0] + lengths[1]]
    assert row.anchors_N.tolist() == [int(a) + o for s, o in zip(alone, offsets, strict=True) for a in s.anchors_N]
    assert row.documents == tuple((s.id, n) for s, n in zip(alone, lengths, strict=True))
    assert row.starts_S.tolist() == [o for o, n in zip(offsets, lengths, strict=True) for _ in range(n)]
    assert pack_samples(again).anchors_N.tolist() != row.anchors_N.tolist()


def test_a_block_at_the_end_of_a_document_meets_no_label_of_the_next():
    first = Sample("a", torch.arange(10, 20), torch.arange(10) >= 4, torch.tensor([8]), None)
    # The next document begins with a supervised token: there is no prompt.
    second = Sample("b", torch.arange(40, 50), torch.ones(10, dtype=torch.bool), torch.tensor([0, 8]), None)
    batch = collate([pack_samples([first, second])], 4, 3, MASK, 4.0)
    assert (batch.weights_RNT > 0).int().tolist() == [[[1, 0, 0], [1, 1, 1], [1, 0, 0]]]
    assert batch.labels_RNT[0, :, 0].tolist() == [19, 41, 49]
    assert batch.anchors_RN.tolist() == [[8, 10, 18]] and batch.starts_RN.tolist() == [[0, 10, 10]]
    # Positions restart: context of both documents, then the slots of the three blocks.
    assert batch.position_ids_RP[0].tolist() == [*range(10), *range(8), *range(8, 12), *range(4), *range(8, 12)]
    assert batch.ids == ["a", "b"] and batch.documents == [[("a", 0, 10), ("b", 10, 10)]]


@pytest.mark.parametrize("family", [*FAMILIES])
def test_a_target_reads_packed_documents_apart(family):
    """Sliding windows and scaled embeddings included."""
    target, rows = tiny_target(family), samples(3)
    drafter = tiny_drafter(tiny_target())
    batch = batch_of(drafter.model, [pack_samples(rows[:2]), rows[2]], whole=True)
    packed = capture_batch(target, batch, (0, 2), True, None)
    for r, documents in enumerate(batch.documents):
        for name, start, length in documents:
            tokens = next(s.tokens_S for s in rows if s.id == name)[None]
            alone = target.forward(tokens, (0, 2), with_logits=False, with_final=True)
            place = slice(start, start + length)
            for ours, theirs in (
                (packed.taps_RSC[r, place], alone.taps[0]),
                (packed.final_RSD[r, place], alone.final[0]),
            ):
                size = theirs.abs().max()
                torch.testing.assert_close(ours / size, theirs / size, rtol=0, atol=1e-5)


def test_stored_features_of_a_packed_row_are_those_of_its_documents():
    target, rows = tiny_target(), samples(3)
    for row in rows:
        row.taps_SC = capture_taps(target, row.tokens_S[None], (0, 2))[0, :-1]  # all tokens but the last are stored
    batch = collate([pack_samples(rows)], 4, 3, MASK, 4.0, whole=True)
    for row, (_, start, length) in zip(rows, batch.documents[0], strict=True):
        assert torch.equal(batch.taps_RSC[0, start : start + length - 1], row.taps_SC)
        assert (batch.taps_RSC[0, start + length - 1] == 0).all()
    rows[1].taps_SC = rows[1].taps_SC[:3]
    with pytest.raises(ValueError, match="row row-1: 3 stored features, an anchor needs"):
        pack_samples(rows)


def test_rows_are_filled_without_losing_one():
    lengths = [7, 2, 5, 5, 9, 1, 3, 10, 4]
    bins = best_fit(lengths, 10)
    assert sorted(i for row in bins for i in row) == list(range(9))
    # Longest first, each into the fullest row that takes it.
    assert [[lengths[i] for i in row] for row in bins] == [[10], [9, 1], [7, 3], [5, 5], [4, 2]]
    packed = PackedRows(TrainingRows(answer_rows(30), 60, 4, seed=0))
    assert len(packed) < 20 and all(len(packed[i].tokens_S) <= 60 for i in range(len(packed)))
    assert sorted(name for i in range(len(packed)) for name, _ in packed[i].documents) == sorted(
        f"row-{i}" for i in range(30)
    )
    anchors, tokens = packed.sizes()
    assert anchors == max(len(packed[i].anchors_N) for i in range(len(packed)))
    assert tokens == max(len(packed[i].tokens_S) for i in range(len(packed)))


def test_a_document_without_an_anchor_is_counted_and_left_out():
    """TRAPS 10 in packed rows."""
    rows = answer_rows(4)
    rows[1] = type(rows[1])("long", "d", list(range(3, 60)), [5, 6, 7], "eos")
    packed = PackedRows(TrainingRows(rows, 50, 4, seed=0))
    assert packed.skipped == 1
    assert {name for i in range(len(packed)) for name, _ in packed[i].documents} == {"row-0", "row-2", "row-3"}
