"""The distillation loss: cross entropy of base and corrected logits on the target's own tokens (METHODS section 2).

Nothing is divided here: numerators and weights are summed over the whole optimizer step first, and the trainer divides
once. Vocabulary logits exist at supervised slots only and for one chunk at a time: the gradient of a chunk is computed
together with its loss, so that nothing of the vocabulary's size is kept for, or recomputed in, the backward pass.

Shape suffixes: R rows, N anchors, B slots, T depths, D hidden, E rank of the correction, M slots of a chunk (or all
R*N*T slots), K statistics, V (draft) vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import linear

from data.batches import Batch
from models.drafter import DFlashDraftModel
from models.target import Target

STATISTICS = ("weight", "base_loss", "final_loss", "count", "base_hits", "final_hits")


@dataclass
class LossSums:
    """Sums over the supervised slots of one micro-batch.

    Attributes:
        numerator: scalar with gradient, sum of weight * ((1 - lam) * CE(final) + lam * CE(base)), fp32.
        statistics_KT: detached fp32 sums by depth, the rows named by `STATISTICS`; losses are weighted, hits are not.
    """

    numerator: Tensor
    statistics_KT: Tensor


class Objective:
    """The loss of one run: what does not change between steps.

    Args:
        target: frozen; its LM head gives the base logits, its embedding table feeds the head.
        draft_ids: ascending token ids of the draft vocabulary, on the target's device, or None.
        chunk: slots whose vocabulary logits exist at once.
    """

    def __init__(self, target: Target, draft_ids: Tensor | None, chunk: int):
        self.target, self.draft_ids, self.chunk = target, draft_ids, chunk
        self.index_V = None
        if draft_ids is not None:
            self.index_V = torch.zeros(target.vocab_size, dtype=torch.long, device=draft_ids.device)
            self.index_V[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)

    def __call__(self, model: DFlashDraftModel, batch: Batch, lam: float, hidden_RQD: Tensor) -> LossSums:
        """Sums over the batch; runs inside the drafter's forward (its `loss_fn`).

        Args:
            lam: share of the base loss.
            hidden_RQD: output of the backbone at all slots, Q = N*B.
        """
        rows, anchors, depths = batch.labels_RNT.shape
        hidden_RNTD = model.prediction_slots(hidden_RQD.view(rows, anchors, model.spec.block_size, -1))
        codes_ME = self._codes(model, batch, hidden_RNTD)
        hidden_MD, labels_M = hidden_RNTD.flatten(0, 2), batch.labels_RNT.flatten()
        if self.index_V is not None:
            labels_M = self.index_V[labels_M]
        weights_M = batch.weights_RNT.flatten()
        depth_M = torch.arange(depths, device=hidden_MD.device).expand(rows, anchors, depths).flatten()
        corrected_T = model.corrected_depths(hidden_MD.device)

        numerator = hidden_MD.new_zeros((), dtype=torch.float32)
        statistics_KT = numerator.new_zeros(len(STATISTICS), depths)
        for corrected in (False, True):
            if not (corrected_T == corrected).any():
                continue
            of_kind_M = (corrected_T == corrected)[depth_M]
            slots = ((weights_M > 0) & of_kind_M).nonzero().flatten()
            # A rank without supervised slots still needs every parameter in its graph, or the ranks' reductions no
            # longer match: it runs one slot of no weight.
            slots = slots if len(slots) else of_kind_M.nonzero().flatten()[:1]
            codes = (codes_ME[slots], model.head.rows()) if corrected else (None, None)
            part, values_KM = _SlotLoss.apply(
                self._base_logits, self.chunk, lam, labels_M[slots], weights_M[slots], hidden_MD[slots], *codes
            )
            numerator = numerator + part
            statistics_KT.index_add_(1, depth_M[slots], values_KM)
        return LossSums(numerator, statistics_KT)

    def _codes(self, model: DFlashDraftModel, batch: Batch, hidden_RNTD: Tensor) -> Tensor | None:
        if model.head is None:
            return None
        anchor_RN = batch.block_ids_RNB[..., 0]
        codes = model.head.teacher_forced_codes(anchor_RN, batch.labels_RNT, self.target.embed, hidden_RNTD)
        return codes.flatten(0, 2)

    def _base_logits(self, hidden_MD: Tensor) -> Tensor:
        return self.target.logits(hidden_MD, self.draft_ids)


class _SlotLoss(torch.autograd.Function):
    """Numerator and statistics [K, M] of slots, chunk by chunk, each with its gradient."""

    @staticmethod
    def forward(
        ctx,
        base_logits: Callable[[Tensor], Tensor],
        chunk: int,
        lam: float,
        labels_M: Tensor,
        weights_M: Tensor,
        hidden_MD: Tensor,
        codes_ME: Tensor | None,
        rows_VE: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        pieces = []
        rows_gradient_VE = None if rows_VE is None else torch.zeros_like(rows_VE, dtype=torch.float32)
        for start in range(0, len(labels_M), chunk):
            piece = slice(start, start + chunk)
            codes = None if codes_ME is None else codes_ME[piece]
            result = _chunk(base_logits, lam, labels_M[piece], weights_M[piece], hidden_MD[piece], codes, rows_VE)
            *result, rows_part_VE = result
            if rows_gradient_VE is not None:
                rows_gradient_VE += rows_part_VE
            pieces.append(result)
        numerators, values, hidden_gradients, codes_gradients = zip(*pieces, strict=True)
        statistics_KM = torch.cat(values, dim=1)
        ctx.gradients = [torch.cat(hidden_gradients), None, None]
        if rows_VE is not None:
            ctx.gradients[1:] = torch.cat(codes_gradients), rows_gradient_VE.to(rows_VE.dtype)
        ctx.mark_non_differentiable(statistics_KM)
        return torch.stack(numerators).sum(), statistics_KM

    @staticmethod
    def backward(ctx, gradient: Tensor, _):
        scaled = [None if g is None else g * gradient.to(g.dtype) for g in ctx.gradients]
        return (None,) * 5 + tuple(scaled)


def _chunk(base_logits, lam, labels_M, weights_M, hidden_MD, codes_ME, rows_VE):
    """Numerator, statistics [K, M], and the gradients of hidden states, codes and output rows, of one chunk.

    The losses are computed in fp32 (TRAPS 26). Without codes, the final logits are the base logits.
    """
    with torch.enable_grad():
        hidden_MD = hidden_MD.detach().requires_grad_(True)
        base_MV = base_logits(hidden_MD)
    share = 1.0 if codes_ME is None else lam
    base_M, base_hits_M, gradient_MV = _cross_entropy(base_MV.detach().float(), labels_M, weights_M * share)
    final_M, final_hits_M, codes_gradient, rows_gradient = base_M, base_hits_M, None, None
    if codes_ME is not None:
        final_MV = base_MV.detach().float() + linear(codes_ME, rows_VE)
        final_M, final_hits_M, final_gradient_MV = _cross_entropy(final_MV, labels_M, weights_M * (1 - lam))
        gradient_MV += final_gradient_MV
        final_gradient_MV = final_gradient_MV.to(rows_VE.dtype)
        codes_gradient, rows_gradient = final_gradient_MV @ rows_VE, final_gradient_MV.T @ codes_ME
    (hidden_gradient,) = torch.autograd.grad(base_MV, hidden_MD, gradient_MV.to(base_MV.dtype))
    counts_M = (weights_M > 0).float()
    losses = (weights_M, weights_M * base_M, weights_M * final_M)
    statistics_KM = torch.stack([*losses, counts_M, counts_M * base_hits_M, counts_M * final_hits_M])
    numerator = (weights_M * (share * base_M + (1 - share) * final_M)).sum()
    return numerator, statistics_KM, hidden_gradient, codes_gradient, rows_gradient


def _cross_entropy(logits_MV: Tensor, labels_M: Tensor, scales_M: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and hit of each slot, and scale * (softmax - one-hot), the gradient of sum(scale * loss) by the logits."""
    log_p_MV = torch.log_softmax(logits_MV, dim=-1)
    picked_M1 = log_p_MV.gather(1, labels_M[:, None])
    # A label that ties with the best counts as a hit; argmax would cost five times as much here.
    hits_M = picked_M1[:, 0] >= log_p_MV.amax(dim=-1)
    gradient_MV = log_p_MV.exp_()
    gradient_MV.scatter_add_(1, labels_M[:, None], torch.full_like(picked_M1, -1.0))
    return -picked_M1[:, 0], hits_M, gradient_MV.mul_(scales_M[:, None])
