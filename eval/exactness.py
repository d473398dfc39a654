"""Where a method's text leaves the autoregressive one, and whether rounding alone explains it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import DynamicCache

from models.target import Target

from .cells import Cell
from .records import AR, Divergence, Generation
from .store import Asking, asking

# In bf16 two tokens whose logits are this many units in the last place apart can swap with the shape of a kernel.
BF16_ULPS = 2.0
# Beyond this many units no rounding is taken as an explanation, whatever the target picks in other pieces.
MOST_ULPS = 8.0
# Numbers of last tokens that are read at once after the rest, to see how far shapes alone move the choice: as in a step
# of AR, in a chain's block and in trees of common sizes.
PIECES = (1, 2, 4, 8, 16, 24, 32, 64)


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
    """The first difference from AR with the gap to the target's highest logit there; None when the texts are equal.

    Args:
        threshold: gap in logits up to which the difference counts as a near tie in fp32. In bf16 the threshold is
            `BF16_ULPS` units in the last place of the highest logit, and a wider gap counts where the target alone
            picks the token while it reads the same text in other pieces (`pieces_that_pick`), up to `MOST_ULPS`.
        names: the record's fields that name the answer.
    """
    position = first_difference(ar_tokens, tokens)
    if position is None:
        return None
    if position >= min(len(ar_tokens), len(tokens)):
        # One text is a prefix of the other: lengths differ although the tokens agree, which no rounding explains.
        return Divergence(position=position, ar_token=-1, token=-1, gap=None, threshold=None, near_tie=False, **names)
    ids = torch.tensor([prompt_ids + ar_tokens[:position]], device=target.device)
    logits_V = target.forward(ids, (), keep=1).logits[0, -1].float()
    a, b = ar_tokens[position], tokens[position]
    top = float(logits_V.max())
    # Two tokens that are equally far below the highest are no tie of greedy decoding.
    gap = top - float(logits_V[[a, b]].min())
    if target.dtype == torch.bfloat16:
        # The spacing of bf16 numbers (8 significant bits) at this magnitude.
        threshold = BF16_ULPS * 2.0 ** (math.floor(math.log2(abs(top))) - 7) if top else 0.0
    near, pieces = gap <= threshold, None
    if not near and target.dtype == torch.bfloat16 and gap <= threshold * MOST_ULPS / BF16_ULPS:
        pieces = pieces_that_pick(target, ids, b)
    near = near or pieces is not None
    return Divergence(
        position=position, ar_token=a, token=b, gap=gap, threshold=threshold, near_tie=near, pieces=pieces, **names
    )


@torch.inference_mode()
def pieces_that_pick(target: Target, ids_1S: Tensor, token: int) -> int | None:
    """The first of `PIECES` at which greedy decoding gives `token` after the text; None when none does.

    The text is the same and no drafter takes part: what differs is the shape of the target's last forward.
    """
    length = ids_1S.shape[1]
    for count in (count for count in PIECES if count < length):
        cache = DynamicCache(config=target.config)
        target.forward(ids_1S[:, :-count], (), cache=cache, with_logits=False)
        if int(target.forward(ids_1S[:, -count:], (), cache=cache, keep=1).logits[0, -1].argmax()) == token:
            return count
    return None


def find_divergences(
    target: Target,
    generations: Sequence[Generation],
    prompt_ids: Mapping[Asking, list[int]],
    threshold: float,
) -> list[Divergence]:
    """A record for each greedy answer that differs from AR's to the same question."""
    reference = {asking(g): g.tokens for g in generations if g.method == AR}
    found = []
    for g in generations:
        where = asking(g)
        if g.temperature != 0 or g.method == AR or reference.get(where, g.tokens) == g.tokens:
            continue
        names = {name: getattr(g, name) for name in ("benchmark", "prompt_id", "turn", "method", "phase")}
        ids = prompt_ids[where]
        found.append(divergence(target, ids, reference[where], g.tokens, threshold, plan=g.plan.id, **names))
    return found


def compare_cells(
    target: Target, cells: Sequence[Cell], prompts: Sequence[list[int]], threshold: float
) -> dict[tuple, tuple[int, int]]:
    """(Answers that differ from AR's, those of them that a near tie explains) of each cell, by its key; empty when they
    are no greedy answers.

    AR's are those of the fewest requests at once: a fault of decoding several at once may be in all others alike.

    Args:
        cells: of the same prompts, AR's among them.
        prompts: token ids, in the order of the cells' answers.
    """
    if not cells or cells[0].temperature != 0:
        return {}
    reference = min((c for c in cells if c.plan.method == AR), key=lambda c: (c.concurrency, c.run)).answers
    near: dict[tuple, bool] = {}  # runs and plans mostly differ in the same way
    counts = {}
    for cell in cells:
        found = [(i, tuple(own)) for i, own in enumerate(cell.answers) if own != reference[i]]
        for i, own in set(found) - near.keys():
            names = {"prompt_id": str(i), "method": cell.plan.method}
            near[i, own] = divergence(target, prompts[i], reference[i], list(own), threshold, **names).near_tie
        counts[cell.key] = len(found), sum(near[key] for key in found)
    return counts
