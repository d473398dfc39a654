"""Loss terms of slots over the vocabulary, chunk by chunk, each with its gradient.

The gradient of a chunk is computed in closed form together with its loss, so that nothing of the vocabulary's size is
kept for, or recomputed in, the backward pass. What a chunk holds at once is at most seven arrays [M, V]: base logits in
the model's dtype and in fp32, the target's distribution, the gradient of the base logits, and for the final logits
log-probabilities, difference and correction. All of it is fp32 (TRAPS 26) but what goes into the matrix products, and,
on CPUs, what comes out of them (models/products.py).

Shape suffixes: R rows, N anchors, T depths, M slots of a chunk (or all R*N*T), D hidden, E rank of the
correction, K statistics, V (draft) vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from models.products import wide_linear

Logits = Callable[[Tensor], Tensor]  # the target's LM head on hidden states [M, D], over the draft vocabulary
TeacherOf = Callable[[Tensor, Tensor], "Teacher"]  # of slots, by their places [m] and labels [m]


@dataclass(frozen=True)
class Mixture:
    """What one slot's loss is made of.

    Attributes:
        ce: weight of -log p(label).
        kl: weight of the forward KL, sum t log(t / p), t being the target's distribution.
        tv: weight of the un-halved total variation, sum |t - p|.
        candidates: K of the recall of the label among the best base candidates.
    """

    ce: float = 1.0
    kl: float = 0.0
    tv: float = 0.0
    candidates: int = 64


@dataclass
class Teacher:
    """The target's distribution over the draft vocabulary, renormalised there: what a drafter cannot propose it cannot
    learn. Not differentiated (TRAPS 27).

    Attributes:
        probs_MV: fp32.
        negative_entropy_M: sum t log t.
        hits_M: whether the label is the target's own argmax, ties included; of all tokens where they were looked at,
            else of the draft vocabulary.
        inside_M: share of the target's whole distribution that lies in the draft vocabulary; None for all of it.
    """

    probs_MV: Tensor
    negative_entropy_M: Tensor
    hits_M: Tensor
    inside_M: Tensor | None = None


class Whole(NamedTuple):
    """What the target's logits over all tokens say of slots. Attributes: normaliser_M: their logsumexp; hits_M: whether
    the label is their argmax, ties included."""

    normaliser_M: Tensor
    hits_M: Tensor


@dataclass
class Scores:
    """Terms of slots under one set of logits: loss of the mixture, its parts, whether the label is the argmax, and the
    overlap with the target's whole distribution, sum of min(p, target): the chance that a sample is accepted."""

    loss_M: Tensor
    ce_M: Tensor
    kl_M: Tensor
    tv_M: Tensor
    hits_M: Tensor
    overlap_M: Tensor


# Rows of what `SlotLoss` returns beside the numerator.
VALUES = ("base_ce", "final_ce", "base_hits", "final_hits", "recall_hits", "agreement_hits", "kl", "tv", "overlap")


class Chunk(NamedTuple):
    """Slots whose vocabulary logits exist at once. Attributes: index_M: their places; corrected: codes change them."""

    index_M: Tensor
    corrected: bool


class SlotLoss(torch.autograd.Function):
    """Numerator sum(weight * loss) and values [K, M] of slots, zero at those in no chunk.

    Args of `apply`:
        teacher_of: gives the target's distribution at the tokens before the labels; None when nothing asks for it.
        hidden_MD, codes_ME, rows_VE: what gets gradients; the last two are None without a correction head.
    """

    @staticmethod
    def forward(
        ctx,
        logits: Logits,
        mixture: Mixture,
        lam: float,
        chunks: Sequence[Chunk],
        labels_M: Tensor,
        weights_M: Tensor,
        teacher_of: TeacherOf | None,
        hidden_MD: Tensor,
        codes_ME: Tensor | None,
        rows_VE: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        hidden_gradient_MD = torch.zeros_like(hidden_MD)
        codes_gradient_ME = None if codes_ME is None else torch.zeros_like(codes_ME)
        rows_gradient_VE = None if rows_VE is None else torch.zeros_like(rows_VE, dtype=torch.float32)
        numerator, values_KM = weights_M.new_zeros(()), weights_M.new_zeros(len(VALUES), len(weights_M))
        for index, corrected in chunks:
            labels, weights = labels_M[index], weights_M[index]
            teacher = None if teacher_of is None else teacher_of(index, labels)
            codes = codes_ME[index] if corrected else None
            part, values_KM[:, index], hidden_gradient_MD[index], final_gradient_MV = _chunk(
                logits, mixture, lam, labels, weights, teacher, hidden_MD[index], codes, rows_VE
            )
            numerator = numerator + part
            if corrected:
                codes_gradient_ME[index] = final_gradient_MV @ rows_VE
                rows_gradient_VE += final_gradient_MV.T @ codes
        if rows_gradient_VE is not None:
            rows_gradient_VE = rows_gradient_VE.to(rows_VE.dtype)
        ctx.gradients = hidden_gradient_MD, codes_gradient_ME, rows_gradient_VE
        ctx.mark_non_differentiable(values_KM)
        return numerator, values_KM

    @staticmethod
    def backward(ctx, gradient: Tensor, _):
        # Scaled in place: a second array of the output projection's size would be the largest of the backward pass.
        scaled = [None if g is None else g.mul_(gradient.to(g.dtype)) for g in ctx.gradients]
        ctx.gradients = None
        return (None,) * 7 + tuple(scaled)


def _chunk(logits, mixture, lam, labels_M, weights_M, teacher, hidden_MD, codes_ME, rows_VE):
    """Numerator, values [K, M], the gradient of the hidden states, and that of the final logits in the rows' dtype
    (None without codes), of one chunk."""
    with torch.enable_grad():
        hidden_MD = hidden_MD.detach().requires_grad_(True)
        base_MV = logits(hidden_MD)
    scores_MV = base_MV.detach().float()
    recall_M = _rank(scores_MV, labels_M) < mixture.candidates
    share = 1.0 if codes_ME is None else lam
    base, gradient_MV = score(scores_MV, labels_M, weights_M * share, mixture, teacher)
    final, final_gradient_MV = base, None
    if codes_ME is not None:
        scores_MV = wide_linear(codes_ME, rows_VE).float().add_(scores_MV)
        final, final_gradient_MV = score(scores_MV, labels_M, weights_M * (1 - lam), mixture, teacher)
        gradient_MV += final_gradient_MV
        final_gradient_MV = final_gradient_MV.to(rows_VE.dtype)
    (hidden_gradient_MD,) = torch.autograd.grad(base_MV, hidden_MD, gradient_MV.to(base_MV.dtype))
    agreement_M = torch.zeros_like(recall_M) if teacher is None else teacher.hits_M
    hits = (base.hits_M, final.hits_M, recall_M, agreement_M)
    values = (base.ce_M, final.ce_M, *hits, final.kl_M, final.tv_M, final.overlap_M)
    numerator = (weights_M * (share * base.loss_M + (1 - share) * final.loss_M)).sum()
    return numerator, torch.stack([v.float() for v in values]), hidden_gradient_MD, final_gradient_MV


def score(
    logits_MV: Tensor, labels_M: Tensor, scales_M: Tensor, mixture: Mixture, teacher: Teacher | None
) -> tuple[Scores, Tensor]:
    """Terms of each slot, and the gradient [M, V] of sum(scale * loss) by the logits.

    With p = softmax(logits): d CE = p - onehot(label); d KL = p - t; d TV = p (sign(p-t) - sum sign(p-t) p).
    """
    log_p_MV = torch.log_softmax(logits_MV, dim=-1)
    picked_M1 = log_p_MV.gather(1, labels_M[:, None])
    # A label that ties with the best counts as a hit; argmax would cost five times as much here.
    hits_M = picked_M1[:, 0] >= log_p_MV.amax(dim=-1)
    ce_M = -picked_M1[:, 0]
    kl_M = tv_M = overlap_M = torch.zeros_like(ce_M)
    if teacher is None:
        gradient_MV = log_p_MV.exp_()
        if mixture.ce != 1:
            gradient_MV.mul_(mixture.ce)
    else:
        kl_M = teacher.negative_entropy_M - _dot(teacher.probs_MV, log_p_MV)
        probs_MV = log_p_MV.exp_()
        gradient_MV = probs_MV - teacher.probs_MV
        tv_M = torch.linalg.vector_norm(gradient_MV, ord=1, dim=-1)
        overlap_M = 1 - 0.5 * tv_M
        if teacher.inside_M is not None:
            # The target's own probability of a token is inside * t. Into the same memory, which is then filled anew.
            torch.addcmul(probs_MV, teacher.probs_MV, teacher.inside_M[:, None], value=-1, out=gradient_MV)
            distance_M = torch.linalg.vector_norm(gradient_MV, ord=1, dim=-1) + (1 - teacher.inside_M)
            overlap_M = 1 - 0.5 * distance_M
            torch.sub(probs_MV, teacher.probs_MV, out=gradient_MV)
        gradient_MV.sign_().mul_(mixture.tv)
        gradient_MV += (mixture.ce + mixture.kl - _dot(gradient_MV, probs_MV))[:, None]
        gradient_MV.mul_(probs_MV).add_(teacher.probs_MV, alpha=-mixture.kl)
    gradient_MV.scatter_add_(1, labels_M[:, None], torch.full_like(picked_M1, -mixture.ce))
    loss_M = mixture.ce * ce_M + mixture.kl * kl_M + mixture.tv * tv_M
    return Scores(loss_M, ce_M, kl_M, tv_M, hits_M, overlap_M), gradient_MV.mul_(scales_M[:, None])


def make_teacher(logits_MV: Tensor, labels_M: Tensor, whole: Whole | None = None) -> Teacher:
    """The target's distribution from its fp32 logits over the draft vocabulary.

    Args:
        whole: of the same slots over all tokens; None where the draft vocabulary is all of them, or nothing asks.
    """
    probs_MV = torch.softmax(logits_MV.detach(), dim=-1)
    normaliser_M = torch.logsumexp(logits_MV, dim=-1)
    # sum t log t = sum t z - log sum exp z: no second array of the vocabulary's size.
    negative_entropy_M = _dot(probs_MV, logits_MV) - normaliser_M
    if whole is None:
        return Teacher(probs_MV, negative_entropy_M, is_best(logits_MV, labels_M))
    # Two products of the LM head may round apart: no share exceeds one.
    inside_M = (normaliser_M - whole.normaliser_M).exp().clamp(max=1)
    return Teacher(probs_MV, negative_entropy_M, whole.hits_M, inside_M)


def is_best(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """Whether the label's logit is the largest, ties included."""
    return logits_MV.gather(1, labels_M[:, None])[:, 0] >= logits_MV.amax(dim=-1)


@torch.no_grad()
def label_probabilities(
    logits: Logits,
    chunks: Sequence[Chunk],
    labels_M: Tensor,
    hidden_MD: Tensor,
    codes_ME: Tensor | None,
    rows_VE: Tensor | None,
) -> Tensor:
    """p(label) of each slot under the final logits, [M] fp32, one at slots in no chunk: the pre-pass of weights that
    depend on the drafter."""
    probs_M = torch.ones(len(labels_M), device=hidden_MD.device)
    for index, corrected in chunks:
        scores_MV = logits(hidden_MD[index]).float()
        if corrected:
            scores_MV = wide_linear(codes_ME[index], rows_VE).float().add_(scores_MV)
        picked_M = scores_MV.gather(1, labels_M[index, None])[:, 0]
        probs_M[index] = (picked_M - scores_MV.logsumexp(dim=-1)).exp()
    return probs_M


def dpace_weights(probs_RNT: Tensor, mask_RNT: Tensor, alpha: float) -> Tensor:
    """D-PACE slot weights (arXiv 2605.18810): the gradient of the expected accepted length by log p(label).

    s = (1-alpha) p + alpha where the mask is 1, else 1; w_t = sum over u >= t of mask_u * s_1 ... s_u, which is the
    part of the expected length that slot t shares in.

    Args:
        probs_RNT: detached p(label) in [0, 1].
        mask_RNT: 1 at supervised slots, which are a prefix of each block.
    """
    survival_RNT = torch.where(mask_RNT > 0, (1 - alpha) * probs_RNT + alpha, 1.0).cumprod(dim=-1) * mask_RNT
    return survival_RNT.flip(-1).cumsum(dim=-1).flip(-1) * mask_RNT


def _rank(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
    """How many logits exceed the label's."""
    return (logits_MV > logits_MV.gather(1, labels_M[:, None])).sum(dim=-1)


def _dot(a_MV: Tensor, b_MV: Tensor) -> Tensor:
    return torch.linalg.vecdot(a_MV, b_MV)
