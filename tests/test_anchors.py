"""Anchors, labels, slot weights and batches: pure functions."""

import math

import pytest
import torch

from data.batches import Sample, block_labels, collate, row_tensors
from training.anchors import draw_anchors, eligible_anchors
from training.rows import TrainingRows
from training.vocabulary import choose_draft_ids, coverage
from training_runs import answer_rows

MASK = 2


def sample(length=40, start=8, anchors=(20,), row="row"):
    return Sample(
        row,
        torch.arange(100, 100 + length),
        torch.arange(length) >= start,
        torch.tensor(anchors, dtype=torch.long),
        None,
    )


def test_anchors_need_two_adjacent_supervised_tokens():
    supervised = torch.tensor([0, 1, 1, 0, 1, 1, 1, 0, 1]).bool()
    assert eligible_anchors(supervised).tolist() == [1, 4, 5]


def test_anchors_are_distinct_ascending_and_limited():
    supervised = torch.arange(60) >= 10
    drawn = draw_anchors(supervised, 12, seed=3, epoch=0, row_id="a")
    assert len(drawn) == 12 and (drawn.diff() > 0).all() and drawn.min() >= 10 and drawn.max() <= 58
    assert draw_anchors(supervised, 500, 3, 0, "a").tolist() == list(range(10, 59))


def test_anchors_depend_on_seed_epoch_and_row_only():
    supervised = torch.arange(60) >= 10
    # A fixed value: the draw is the same in every process, version and world size.
    expected = draw_anchors(supervised, 5, seed=0, epoch=0, row_id="row-0").tolist()
    assert expected == [17, 21, 35, 38, 52]
    torch.manual_seed(99)
    assert draw_anchors(supervised, 5, 0, 0, "row-0").tolist() == expected
    for changed in ((1, 0, "row-0"), (0, 1, "row-0"), (0, 0, "row-1")):
        assert draw_anchors(supervised, 5, *changed).tolist() != expected


def test_anchors_are_uniform():
    supervised = torch.arange(12) >= 2
    counts = torch.zeros(12)
    for epoch in range(3000):
        counts[draw_anchors(supervised, 3, 0, epoch, "row")] += 1
    # 9 eligible positions, 3 drawn: 1000 each, standard deviation below 26.
    assert counts[2:11].min() > 890 and counts[2:11].max() < 1110 and counts[:2].sum() + counts[11:].sum() == 0


def test_mask_is_read_at_the_predicted_token():
    # The answer spans 8..39 of 45 tokens: a separator follows it. Anchor 37, shifted block 4 predicts 38..41.
    row = Sample("r", torch.arange(45), (torch.arange(45) >= 8) & (torch.arange(45) < 40), torch.tensor([37]), None)
    labels, weights = block_labels(row, depths=4, gamma=4.0)
    assert (weights > 0).int().tolist() == [[1, 1, 0, 0]]
    assert labels.tolist() == [[38, 39, 40, 41]]
    # Fill-in, block 4: three predictions 38..40.
    assert (block_labels(row, depths=3, gamma=4.0)[1] > 0).int().tolist() == [[1, 1, 0]]


def test_labels_past_the_end_of_a_row_do_not_count():
    labels, weights = block_labels(sample(length=40, anchors=(38,)), depths=3, gamma=4.0)
    assert labels.tolist() == [[139, 0, 0]] and (weights > 0).tolist() == [[True, False, False]]


@pytest.mark.parametrize("shifted", [False, True])
def test_slot_weights_of_both_layouts(shifted):
    gamma, block = 4.0, 5
    depths = block if shifted else block - 1
    _, weights = block_labels(sample(), depths, gamma)
    slots = range(0, block) if shifted else range(1, block)
    expected = [math.exp(-(j if shifted else j - 1) / gamma) for j in slots]
    assert weights[0].tolist() == pytest.approx(expected)


def test_a_label_outside_the_draft_vocabulary_ends_the_prefix():
    row = sample(anchors=(20, 21))
    known = torch.ones(200, dtype=torch.bool)
    known[123] = False  # the token at position 23
    _, weights = block_labels(row, 5, 4.0, known)
    assert (weights > 0).int().tolist() == [[1, 1, 0, 0, 0], [1, 0, 0, 0, 0]]


def test_a_row_contributes_the_same_alone_and_in_a_batch():
    short = Sample("s", torch.arange(50, 70), torch.arange(20) >= 5, torch.tensor([7, 9]), torch.randn(19, 6))
    long = Sample("l", torch.arange(20, 60), torch.arange(40) >= 5, torch.tensor([6, 20, 38]), torch.randn(39, 6))
    options = dict(block_size=4, depths=3, mask_token_id=MASK, gamma=4.0)
    alone, both = collate([short], **options), collate([long, short], **options)
    assert both.anchors_RN[1].tolist() == [7, 9, 0] and alone.anchors_RN.tolist() == [[7, 9]]
    for name in ("block_ids_RNB", "labels_RNT", "weights_RNT"):
        assert torch.equal(getattr(both, name)[1, :2], getattr(alone, name)[0])
    assert both.weights_RNT[1, 2].sum() == 0
    assert torch.equal(both.taps_RSC[1, :9], alone.taps_RSC[0])
    assert both.context_mask_RS.sum(1).tolist() == [38, 20]
    assert both.position_ids_RP.shape == (2, 38 + 12) and both.position_ids_RP[1, 38:42].tolist() == [7, 8, 9, 10]


def test_blocks_hold_the_anchor_token_then_masks():
    batch = collate([sample(anchors=(20, 30))], 4, 3, MASK, 4.0)
    assert batch.block_ids_RNB[0].tolist() == [[120, 2, 2, 2], [130, 2, 2, 2]]
    # Previous token of slot 1 is the anchor, of slot j the label j - 1: labels follow the anchor without a gap.
    assert batch.labels_RNT[0].tolist() == [[121, 122, 123], [131, 132, 133]]


def test_features_too_short_for_an_anchor_are_an_error():
    row = Sample("row-7", torch.arange(20), torch.arange(20) >= 5, torch.tensor([15]), torch.zeros(12, 4))
    with pytest.raises(ValueError, match="row row-7: 12 stored features, an anchor needs 15"):
        collate([row], 4, 3, MASK, 4.0)
    # The last answer token as the boundary: an anchor at len - 2 needs len - 2 features, len - 1 are stored.
    row = Sample("row-7", torch.arange(20), torch.arange(20) >= 5, torch.tensor([18]), torch.ones(19, 4))
    assert collate([row], 4, 3, MASK, 4.0).taps_RSC.shape == (1, 18, 4)


def test_rows_without_an_anchor_are_skipped_and_counted(caplog):
    rows = answer_rows(4)
    rows = [rows[0], type(rows[2])("long", "d", list(range(3, 60)), [5, 6, 7], "eos"), rows[3]]
    kept = TrainingRows(rows, limit=50, anchors_per_row=4, seed=0)
    assert len(kept) == 2 and kept.skipped == 1
    assert "1 of 3 rows hold no two adjacent answer tokens" in caplog.text
    assert [kept[i].id for i in range(2)] == [rows[0].id, rows[2].id]


def test_rows_redraw_their_anchors_each_epoch():
    rows = TrainingRows(answer_rows(1), 50, 4, seed=0)
    first = rows[0].anchors_N.tolist()
    rows.set_epoch(1)
    assert rows[0].anchors_N.tolist() != first
    rows.set_epoch(0)
    assert rows[0].anchors_N.tolist() == first


def test_row_is_cut_at_the_limit():
    tokens, supervised = row_tensors([1, 2, 3], [4, 5, 6], limit=5)
    assert tokens.tolist() == [1, 2, 3, 4, 5] and supervised.tolist() == [False, False, False, True, True]


def test_draft_vocabulary_is_the_most_frequent_tokens():
    rows = [type(answer_rows(1)[0])("a", "d", [9], [5, 5, 5, 7, 7, 6, 8], "length")]
    # eos 1 always, mask 2 never; ties go to the lower id.
    assert choose_draft_ids(rows, 4, 64, always=[1], never=2).tolist() == [1, 5, 6, 7]
    assert coverage(rows, torch.tensor([1, 5, 6, 7]), 64) == pytest.approx(6 / 7)
    assert choose_draft_ids(rows, 0, 64, [1], 2) is None and choose_draft_ids(rows, 64, 64, [1], 2) is None
