"""Masks against naive double loops, and attention kernels against each other."""

import pytest
import torch

from models.attention import ancestor_mask, causal_mask, tree_mask, tree_positions, window_mask
from tiny import tiny_target


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


def test_windows_go_by_positions_along_the_path():
    """A chain of three and a second child of the root, after a context of four, window 3."""
    parents, depths = torch.tensor([[0, 0, 1, 2, 0]]), torch.tensor([[0, 1, 2, 3, 1]])
    lengths = torch.tensor([4])
    queries, keys = tree_positions(depths, lengths, 9)
    assert queries.tolist() == [[4, 5, 6, 7, 5]] and keys.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 5]]
    mask = (tree_mask(parents, lengths, 9) & window_mask(queries, keys, 3))[0, 0].long()
    assert mask.tolist() == [
        [0, 0, 1, 1, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 1, 1, 0],
        [0, 0, 0, 1, 1, 0, 0, 0, 1],
    ]


def kernel_logits(target, kernel, **inputs):
    target.model.set_attn_implementation(kernel)
    return target.forward(tap_ids=(), **inputs).logits


@pytest.mark.parametrize("family", ["qwen3", "llama-tied", "mistral", "qwen3-window", "gemma3"])
def test_eager_attention_sees_what_sdpa_sees(family, monkeypatch):
    """TRAPS 11: eager attention adds its mask to the scores, where a boolean one would shift them by one."""
    target = tiny_target(family)
    # A path longer than the window, with branches at several depths.
    parents = torch.tensor([[0, 0, 1, 2, 3, 4, 5, 6, 7, 0, 9, 10, 2]])
    depths = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 3]])
    masks = target.tree_masks(parents, depths, torch.zeros(1, dtype=torch.long), 13)
    assert isinstance(masks, dict) == (family in ("qwen3-window", "gemma3"))
    tree = dict(input_ids=torch.arange(5, 18)[None], position_ids=depths, mask=masks)
    rows = dict(input_ids=torch.arange(5, 23).view(2, 9), mask=target.causal_masks(torch.tensor([9, 9]), 9))
    for inputs in (tree, rows):
        expected = kernel_logits(target, "sdpa", **inputs)
        torch.testing.assert_close(kernel_logits(target, "eager", **inputs), expected, atol=1e-4, rtol=1e-4)
    monkeypatch.setattr(target, "_for_kernel", lambda mask: mask)
    assert float((kernel_logits(target, "eager", **rows) - expected).abs().max()) > 0.01
