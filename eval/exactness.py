"""Where a method's text leaves the autoregressive one, and whether rounding alone explains it."""

from __future__ import annotations

import torch

from models.target import Target

from .records import Divergence

# In bf16 two tokens whose logits are this many units in the last place apart can swap with the shape of a kernel.
BF16_ULPS = 2.0


def first_difference(ar_tokens: list[int], tokens: list[int]) -> int | None:
    """Index of the first differing token; a missing tail differs at the shorter length; None when equal."""
    for i, (a, b) in enumerate(zip(ar_tokens, tokens, strict=False)):
        if a != b:
            return i
    return None if len(ar_tokens) == len(tokens) else min(len(ar_tokens), len(tokens))


@torch.inference_mode()
def divergence(
    target: Target, prompt_ids: list[int], ar_tokens: list[int], tokens: list[int], threshold: float, **names
) -> Divergence | None:
    """The first difference from AR with the gap between the two tokens' logits there; None when the texts are equal.

    Args:
        threshold: gap in logits under which the difference counts as a near tie in fp32. In bf16 the threshold is
            `BF16_ULPS` units in the last place of the larger logit.
        names: prompt_id and method of the record.
    """
    position = first_difference(ar_tokens, tokens)
    if position is None:
        return None
    if position >= min(len(ar_tokens), len(tokens)):
        # One text is a prefix of the other: lengths differ although the tokens agree, which no rounding explains.
        return Divergence(position=position, ar_token=-1, token=-1, gap=None, near_tie=False, **names)
    ids = torch.tensor([prompt_ids + ar_tokens[:position]], device=target.device)
    logits_V = target.forward(ids, (), keep=1).logits[0, -1].float()
    a, b = ar_tokens[position], tokens[position]
    gap = abs(float(logits_V[a] - logits_V[b]))
    if target.dtype == torch.bfloat16:
        top = logits_V[[a, b]].abs().max()
        # The spacing of bf16 numbers (8 significant bits) at this magnitude.
        threshold = BF16_ULPS * float(2 ** (torch.floor(torch.log2(top)) - 7))
    return Divergence(position=position, ar_token=a, token=b, gap=gap, near_tie=gap <= threshold, **names)
