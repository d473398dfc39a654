"""Who sees whom in training, said once, in the two forms that kernels take.

The rule is a mask_mod of torch's flex_attention. Dense kernels get it evaluated to a boolean tensor, flex_attention
as a BlockMask that skips what nothing sees: with 512 anchors of 16 slots a dense mask has 8192 x 11264 entries a row.

Shape suffixes: R rows, S context length, N anchors a row, B block slots, T = S + N*B keys.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from models.configuration import DrafterSpec

KERNELS = {"sdpa": "sdpa", "flex": "flex_attention"}


def choose_attention(name: str, device: str, spec: DrafterSpec | None = None) -> str:
    """transformers' name of the kernel for `attention`.

    Args:
        spec: of the drafter, once it is known. Causal blocks and sliding windows narrow the mask in dense form.

    Raises ValueError for flex without a GPU, where it has no backward, and for flex with such a drafter.
    """
    if name == "flex" and not device.startswith("cuda"):
        raise ValueError(f"attention flex needs a CUDA device, the device is {device}: use sdpa or auto")
    dense = spec is not None and (spec.causal or bool(spec.sliding_layers))
    if name == "flex" and dense:
        what = "causal blocks" if spec.causal else "sliding windows"
        raise ValueError(f"attention flex does not support the {what} of this drafter: use sdpa or auto")
    if name == "auto":
        name = "flex" if device.startswith("cuda") and not dense else "sdpa"
    return KERNELS[name]


def block_rule(anchors_RN: Tensor, starts_RN: Tensor, context: int, block_size: int) -> Callable:
    """mask_mod(row, head, query, key): True where a block's slot sees a key (METHODS section 1).

    Keys are the context followed by all blocks. A slot sees the context of its own document strictly before its anchor,
    since the anchor's own feature does not exist yet at inference, and its whole own block; never another block. A
    padding anchor, at 0, sees its own block only.
    """
    last = anchors_RN.shape[1] - 1

    def visible(row, head, query, key):
        # Kernels ask for queries past the end when they round the length up to their tile (TRAPS 12).
        block = (query // block_size).clamp(max=last)
        own = (key - context) // block_size == block
        before = (key >= starts_RN[row, block]) & (key < anchors_RN[row, block])
        return torch.where(key < context, before, own)

    return visible


def dense_mask(anchors_RN: Tensor, starts_RN: Tensor, context: int, block_size: int) -> Tensor:
    """The rule as a boolean tensor [R, 1, N*B, T]."""
    rows, anchors = anchors_RN.shape
    device = anchors_RN.device
    row = torch.arange(rows, device=device)[:, None, None]
    # The slots of a block see the same keys: the rule is asked for the first one of each.
    query = torch.arange(anchors, device=device)[None, :, None] * block_size
    key = torch.arange(context + anchors * block_size, device=device)
    seen_RNT = block_rule(anchors_RN, starts_RN, context, block_size)(row, 0, query, key)
    return seen_RNT.repeat_interleave(block_size, dim=1)[:, None]


def flex_mask(anchors_RN: Tensor, starts_RN: Tensor, context: int, block_size: int) -> BlockMask:
    """The rule as a BlockMask of the same shape."""
    rows, anchors = anchors_RN.shape
    slots, device = anchors * block_size, anchors_RN.device
    rule = block_rule(anchors_RN, starts_RN, context, block_size)
    # Compiled, the mask is never laid out densely.
    compiled = device.type == "cuda"
    return create_block_mask(rule, rows, None, slots, context + slots, device=device, _compile=compiled)


def attention_mask(implementation: str, anchors_RN: Tensor, starts_RN: Tensor, context: int, block_size: int):
    """The mask in the form that transformers' attention `implementation` takes."""
    make = flex_mask if implementation == KERNELS["flex"] else dense_mask
    return make(anchors_RN, starts_RN, context, block_size)
