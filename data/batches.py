"""Training samples and batches: from an answered row and its anchors to padded tensors. Pure functions, torch only.

Shape suffixes: R rows, S tokens of a row (or context length of a batch), C concatenated tap width L*D, N anchors a row,
B block slots, T depths (predicted tokens of a block), M supervised slots, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class Sample:
    """One row with the anchors of one epoch: a document, or several that share the row (`pack_samples`).

    Attributes:
        id: row id, for messages.
        tokens_S: int64 prompt and answer tokens, cut to the row limit.
        supervised_S: bool, True at answer tokens; never at the first token of a row's later documents.
        anchors_N: int64 ascending anchor positions, at least one.
        taps_SC: taps of (at least) the tokens before the last anchor; None when they are captured online.
        final_SD: the target's final hidden states (input of its LM head) of all tokens but perhaps the last of each
            document, where they are stored, else None.
        documents: (id, length) of each document of a packed row; empty for a row that is one document.
    """

    id: str
    tokens_S: Tensor
    supervised_S: Tensor
    anchors_N: Tensor
    taps_SC: Tensor | None
    final_SD: Tensor | None = None
    documents: tuple[tuple[str, int], ...] = ()

    @property
    def starts_S(self) -> Tensor:
        """Position at which each token's document starts."""
        if not self.documents:
            return torch.zeros_like(self.tokens_S)
        lengths_K = torch.tensor([length for _, length in self.documents])
        return (lengths_K.cumsum(0) - lengths_K).repeat_interleave(lengths_K)


@dataclass
class Batch:
    """Rows padded to common sizes. Padding anchors sit at position 0 and have no weight.

    Attributes:
        ids: ids of the documents.
        documents: of each row, (id, start, length) of its documents.
        tokens_RS: int64 context tokens; S is the last anchor of the batch, since no block sees further, or the last
            anchor + T where the loss needs the target's distribution, which is read at the token before each label.
        context_mask_RS: bool, True at real tokens.
        anchors_RN: int64 anchor positions in the row.
        starts_RN: int64 position at which the anchor's document starts: its block sees nothing before.
        block_ids_RNB: int64 input ids of the blocks: the anchor token, then mask tokens.
        labels_RNT: int64 true tokens at anchor+1 .. anchor+T, in the target's ids; 0 past the end of a row.
        weights_RNT: fp32 slot weights, zero where a slot is not supervised.
        supervised_M: int64 places of the supervised slots among all R*N*T, by depth; found here, on the CPU, because a
            GPU that is asked for them in every step makes its host wait.
        supervised_T: how many of them each depth has, plain numbers.
        position_ids_RP: int64 [R, S + N*B] positions of the context and of the slots, each inside its document.
        taps_RSC: taps of the context; None when they are captured online.
        final_RSD: the target's final hidden states of the same tokens; None when captured online or not needed.
    """

    ids: list[str]
    documents: list[list[tuple[str, int, int]]]
    tokens_RS: Tensor
    context_mask_RS: Tensor
    anchors_RN: Tensor
    starts_RN: Tensor
    block_ids_RNB: Tensor
    labels_RNT: Tensor
    weights_RNT: Tensor
    supervised_M: Tensor
    supervised_T: list[int]
    position_ids_RP: Tensor
    taps_RSC: Tensor | None = None
    final_RSD: Tensor | None = None


def row_tensors(prompt_ids: list[int], answer_ids: list[int], limit: int) -> tuple[Tensor, Tensor]:
    """Tokens and supervised mask of a row, both [S] with S <= limit. Only answer tokens are supervised."""
    tokens = torch.tensor((prompt_ids + answer_ids)[:limit], dtype=torch.long)
    return tokens, torch.arange(len(tokens)) >= len(prompt_ids)


def block_labels(sample: Sample, depths: int, gamma: float, draft_V: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Labels and slot weights [N, T] of a sample.

    The mask is read at the *predicted* token, never at the slot (TRAPS 6). A depth counts only while all depths before
    it count too (contiguous prefix, DSpark's rule), and has weight exp(-(t-1)/gamma) at depth t = 1..T, which is the
    rule of both label layouts (METHODS section 1). An infinite gamma gives the mask alone, as D-PACE needs it.

    Args:
        draft_V: bool, True at the tokens that the drafter can propose; a label outside ends the block's prefix.
    """
    positions_NT = sample.anchors_N[:, None] + torch.arange(1, depths + 1)
    inside_NT = positions_NT < len(sample.tokens_S)
    positions_NT = positions_NT.clamp(max=len(sample.tokens_S) - 1)
    labels_NT = sample.tokens_S[positions_NT] * inside_NT
    counts_NT = inside_NT & sample.supervised_S[positions_NT]
    if draft_V is not None:
        counts_NT &= draft_V[labels_NT]
    decay_T = torch.exp(-torch.arange(depths) / gamma)
    return labels_NT, counts_NT.cumprod(dim=1) * decay_T


def supervised_slots(weights_RNT: Tensor) -> tuple[Tensor, list[int]]:
    """`supervised_M` and `supervised_T` of a batch with these weights."""
    depth_M, block_M = (weights_RNT > 0).flatten(0, 1).T.nonzero(as_tuple=True)
    depths = weights_RNT.shape[2]
    return block_M * depths + depth_M, torch.bincount(depth_M, minlength=depths).tolist()


def collate(
    samples: list[Sample],
    block_size: int,
    depths: int,
    mask_token_id: int,
    gamma: float,
    draft_V: Tensor | None = None,
    sizes: tuple[int, int] = (1, 1),
    whole: bool = False,
    teacher: bool = False,
) -> Batch:
    """Pads samples to one batch. What a row contributes does not depend on the others (TRAPS 9).

    Args:
        sizes: least number of anchors and of context tokens: with those of the whole data set every batch has the same
            shape, as compiled kernels want it.
        whole: keep the tokens after the last anchor, for features that are stored.
        teacher: whether the loss needs the target's distribution at the labels (`RunConfig.needs_teacher`).
    """
    rows = len(samples)
    anchors = max(sizes[0], *(len(s.anchors_N) for s in samples))
    # The context is cut at the last anchor: its own feature and all later ones are seen by no block.
    ends = [len(s.tokens_S) if whole else int(s.anchors_N[-1]) + depths * teacher for s in samples]
    context = max(sizes[1], *(min(end, len(s.tokens_S)) for end, s in zip(ends, samples, strict=True)))
    tokens_RS = torch.zeros(rows, context, dtype=torch.long)
    lengths_R = torch.tensor([min(context, len(s.tokens_S)) for s in samples])
    positions_RS = torch.arange(context).repeat(rows, 1)
    anchors_RN = torch.zeros(rows, anchors, dtype=torch.long)
    starts_RN = torch.zeros_like(anchors_RN)
    block_ids_RNB = torch.full((rows, anchors, block_size), mask_token_id)
    labels_RNT = torch.zeros(rows, anchors, depths, dtype=torch.long)
    weights_RNT = torch.zeros(rows, anchors, depths)
    for r, sample in enumerate(samples):
        n = len(sample.anchors_N)
        tokens_RS[r, : lengths_R[r]] = sample.tokens_S[:context]
        anchors_RN[r, :n], starts_S = sample.anchors_N, sample.starts_S
        starts_RN[r, :n] = starts_S[sample.anchors_N]
        positions_RS[r, : lengths_R[r]] -= starts_S[:context]
        block_ids_RNB[r, :, 0] = sample.tokens_S[anchors_RN[r]]
        labels_RNT[r, :n], weights_RNT[r, :n] = block_labels(sample, depths, gamma, draft_V)
    supervised_M, supervised_T = supervised_slots(weights_RNT)
    slots = ((anchors_RN - starts_RN)[..., None] + torch.arange(block_size)).flatten(1)
    documents = [_places(s) for s in samples]
    return Batch(
        ids=[name for row in documents for name, _, _ in row],
        documents=documents,
        tokens_RS=tokens_RS,
        context_mask_RS=torch.arange(context) < lengths_R[:, None],
        anchors_RN=anchors_RN,
        starts_RN=starts_RN,
        block_ids_RNB=block_ids_RNB,
        labels_RNT=labels_RNT,
        weights_RNT=weights_RNT,
        supervised_M=supervised_M,
        supervised_T=supervised_T,
        position_ids_RP=torch.cat([positions_RS, slots], dim=1),
        taps_RSC=_pad(samples, "taps_SC", context),
        final_RSD=_pad(samples, "final_SD", context) if teacher else None,
    )


def pack_samples(samples: list[Sample]) -> Sample:
    """One row of several documents. Anchors, labels and weights stay those of each document alone."""
    for sample in samples:
        _check_taps(sample)
    lengths = [len(s.tokens_S) for s in samples]
    starts = [sum(lengths[:i]) for i in range(len(samples))]
    supervised_S = torch.cat([s.supervised_S for s in samples])
    supervised_S[starts] = False  # a block that runs past its document's end meets no label there
    return Sample(
        id="+".join(s.id for s in samples),
        tokens_S=torch.cat([s.tokens_S for s in samples]),
        supervised_S=supervised_S,
        anchors_N=torch.cat([s.anchors_N + start for s, start in zip(samples, starts, strict=True)]),
        taps_SC=_join([s.taps_SC for s in samples], lengths),
        final_SD=_join([s.final_SD for s in samples], lengths),
        documents=tuple((s.id, length) for s, length in zip(samples, lengths, strict=True)),
    )


def _check_taps(sample: Sample) -> None:
    needed = int(sample.anchors_N[-1])
    if sample.taps_SC is not None and len(sample.taps_SC) < needed:
        raise ValueError(f"row {sample.id}: {len(sample.taps_SC)} stored features, an anchor needs {needed}")


def _join(features: list[Tensor | None], lengths: list[int]) -> Tensor | None:
    """Features of documents in a row; a document has one feature less than tokens, or more when it was cut."""
    if any(f is None for f in features):
        return None
    pieces = [f[:length] for f, length in zip(features, lengths, strict=True)]
    padding = [f.new_zeros(length - len(f), f.shape[1]) for f, length in zip(pieces, lengths, strict=True)]
    return torch.cat([part for pair in zip(pieces, padding, strict=True) for part in pair])


def _places(sample: Sample) -> list[tuple[str, int, int]]:
    documents, places = sample.documents or ((sample.id, len(sample.tokens_S)),), []
    for name, length in documents:
        places.append((name, places[-1][1] + places[-1][2] if places else 0, length))
    return places


def _pad(samples: list[Sample], name: str, context: int) -> Tensor | None:
    """Stored features of the rows; None when any row lacks them, so that the target is asked for all."""
    features = [getattr(s, name) for s in samples]
    if any(f is None for f in features):
        return None
    padded = features[0].new_zeros(len(samples), context, features[0].shape[1])
    for row, sample, stored in zip(padded, samples, features, strict=True):
        _check_taps(sample)
        length = min(context, len(stored))
        row[:length] = stored[:length]
    return padded
