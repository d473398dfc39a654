"""Masks against naive double loops."""

import pytest
import torch

from models.attention import ancestor_mask, block_mask, causal_mask, tree_mask


@pytest.mark.parametrize(("anchors", "block"), [(3, 4), (1, 127), (2, 64), (43, 3), (25, 10)])
def test_block_mask_equals_its_definition(anchors, block):
    """Sizes around 128 included: builders that pad the query length are the fault of TRAP 12."""
    generator = torch.Generator().manual_seed(anchors)
    context = 12
    positions = torch.randint(0, context, (2, anchors), generator=generator)
    real = torch.arange(context)[None] < torch.tensor([[context], [7]])
    mask = block_mask(positions, real, block)
    assert mask.shape == (2, 1, anchors * block, context + anchors * block)
    expected = torch.zeros_like(mask)
    for r in range(2):
        for n in range(anchors):
            rows = slice(n * block, (n + 1) * block)
            for s in range(context):
                expected[r, 0, rows, s] = bool(real[r, s]) and s < int(positions[r, n])
            expected[r, 0, rows, context + n * block : context + (n + 1) * block] = True
    assert torch.equal(mask, expected)


def test_causal_mask_has_no_empty_row():
    mask = causal_mask(torch.tensor([2, 4]), 4)[:, 0]
    assert mask[0].tolist() == [
        [True, False, False, False],
        [True, True, False, False],
        [True, True, True, False],
        [True, True, False, True],
    ]
    assert torch.equal(mask[1], torch.ones(4, 4).tril().bool())


def test_ancestor_mask_equals_walking_up():
    generator = torch.Generator().manual_seed(0)
    parents = [0, 0, *[int(torch.randint(0, i, (), generator=generator)) for i in range(2, 40)]]
    mask = ancestor_mask(torch.tensor([parents]))[0]
    for i in range(40):
        line = {i, 0}
        while i:
            i = parents[i]
            line.add(i)
        i = max(line)
        assert set(mask[i].nonzero().flatten().tolist()) == line


def test_a_long_chain_sees_all_its_ancestors():
    parents = torch.arange(33).sub(1).clamp(min=0)[None]
    assert torch.equal(ancestor_mask(parents)[0], torch.ones(33, 33).tril().bool())


def test_tree_mask_places_each_request_after_its_own_length():
    parents = torch.tensor([[0, 0, 1], [0, 0, 0]])
    mask = tree_mask(parents, torch.tensor([2, 4]), 7)[:, 0].long()
    assert mask[0].tolist() == [[1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 0, 0]]
    assert mask[1].tolist() == [[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 0, 1]]
