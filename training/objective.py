"""The distillation loss: cross entropy of base and corrected logits on the target's own tokens (METHODS section 2).

Nothing is divided here: numerators and weights are summed over the whole optimizer step first, and the trainer divides
once. Vocabulary logits exist at supervised slots only and for one chunk at a time.

Shape suffixes: R rows, N anchors, B slots, T depths, D hidden, E rank of the correction, M slots of a chunk (or all
R*N*T slots), V (draft) vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

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
        codes_ME = None
        if model.head is not None:
            anchor_RN = batch.block_ids_RNB[..., 0]
            codes = model.head.teacher_forced_codes(anchor_RN, batch.labels_RNT, self.target.embed, hidden_RNTD)
            codes_ME = codes.flatten(0, 2)
        hidden_MD = hidden_RNTD.flatten(0, 2)
        labels_M = batch.labels_RNT.flatten()
        if self.index_V is not None:
            labels_M = self.index_V[labels_M]
        weights_M = batch.weights_RNT.flatten()
        depth_M = torch.arange(depths, device=hidden_MD.device).expand(rows, anchors, depths).flatten()
        corrected_T = model.corrected_depths(hidden_MD.device)

        numerator = hidden_MD.new_zeros((), dtype=torch.float32)
        statistics_KT = numerator.new_zeros(len(STATISTICS), depths)
        for corrected in (False, True):
            of_kind_M = (corrected_T == corrected)[depth_M]
            if not (corrected_T == corrected).any():
                continue
            slots = ((weights_M > 0) & of_kind_M).nonzero().flatten()
            # A rank without supervised slots still needs every parameter in its graph, or the ranks' reductions no
            # longer match: it runs one slot of no weight.
            slots = slots if len(slots) else of_kind_M.nonzero().flatten()[:1]
            pieces = slots.split(self.chunk)
            for piece in pieces:
                codes = codes_ME[piece] if corrected else None
                arguments = (model, hidden_MD[piece], codes, labels_M[piece], weights_M[piece], lam)
                # One chunk alone is within the memory limit already, so recomputing it would only cost time.
                if len(pieces) > 1:
                    part, values_KM = checkpoint(self._chunk, *arguments, use_reentrant=False, preserve_rng_state=False)
                else:
                    part, values_KM = self._chunk(*arguments)
                numerator = numerator + part
                statistics_KT.index_add_(1, depth_M[piece], values_KM)
        return LossSums(numerator, statistics_KT)

    def _chunk(self, model, hidden_MD, codes_ME, labels_M, weights_M, lam) -> tuple[Tensor, Tensor]:
        """Numerator and statistics [K, M] of one chunk. The losses are computed in fp32 (TRAPS 26)."""
        base_MV = self.target.logits(hidden_MD, self.draft_ids).float()
        base_M = cross_entropy(base_MV, labels_M, reduction="none")
        hits_M = base_MV.argmax(-1) == labels_M
        final_M, final_hits_M = base_M, hits_M
        if codes_ME is not None:
            final_MV = base_MV + linear(codes_ME, model.head.rows()).float()
            final_M = cross_entropy(final_MV, labels_M, reduction="none")
            final_hits_M = final_MV.argmax(-1) == labels_M
        counts_M = (weights_M > 0).float()
        losses = (weights_M, weights_M * base_M, weights_M * final_M)
        values = (*losses, counts_M, counts_M * hits_M, counts_M * final_hits_M)
        mixed_M = base_M if codes_ME is None else (1 - lam) * final_M + lam * base_M
        return (weights_M * mixed_M).sum(), torch.stack([v.detach().float() for v in values])
