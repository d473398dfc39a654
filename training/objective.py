"""The distillation loss: a mixture of terms by base and corrected logits, on the target's own tokens (METHODS 1, 2).

    slot loss = (1 - lam) * mixture(final logits) + lam * mixture(base logits)
    mixture   = ce * CE + kl * KL(target || drafter) + tv * sum |target - drafter|
    loss      = sum over slots of weight * (slot loss + confidence * BCE(confidence head, acceptance of final logits))

Slots that no head corrects have base logits alone. The confidence head is judged by the final logits and takes no part
in the curriculum; its target, the chance that a sample of the drafter at T=1 is accepted, is sum min(p, target). Under
a draft vocabulary the mixture's t is renormalised there, but the overlap is with the target's whole distribution.

Nothing is divided here: numerators and weights are summed over the whole optimizer step first, and the trainer divides
once. Vocabulary logits exist at supervised slots only and for one chunk at a time (training/slot_loss.py).

Shape suffixes: R rows, N anchors, B slots, T depths, S tokens, D hidden, E rank of the correction, M slots of a chunk
(or all R*N*T slots), K statistics, V (draft) vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from data.batches import Batch
from data.settings import RunConfig
from models.drafter import DFlashDraftModel
from models.target import Target
from training.slot_loss import (
    VALUES,
    Chunk,
    Mixture,
    SlotLoss,
    Teacher,
    Whole,
    dpace_weights,
    is_best,
    label_probabilities,
    make_teacher,
)

# Sums by depth. `X_loss` is weighted (of the final logits but for `base_loss`, both cross entropies), `X_hits` counts
# slots: `recall` a label among the best base candidates, `agreement` a label that is the target's argmax (among the
# draft vocabulary, unless the confidence head had all tokens looked at). `X_run`
# counts blocks whose slots up to this depth are all hits: the sum over depths is the teacher-forced leading run, which
# ends with the block's supervised prefix. Rows that a loss without the target's distribution cannot know are NaN.
STATISTICS = (
    "weight", "base_loss", "final_loss", "count", "base_hits", "final_hits",
    "recall_hits", "agreement_hits", "kl_loss", "tv_loss", "confidence_loss", "base_run", "final_run",
)  # fmt: skip
OF_TEACHER = ("agreement_hits", "kl_loss", "tv_loss")
CHUNK_BYTES = 64 * 2**20  # of one fp32 array [chunk, V]


@dataclass(frozen=True)
class Terms:
    """What the loss is made of; the fields are the options of the same names.

    Attributes:
        mixture: weights of the terms over the vocabulary.
        confidence: weight of the confidence head's loss, 0 without one.
        detach: whether that loss leaves backbone and correction head alone.
        weights: exponential slot weights come with the batch; D-PACE's are made here from the drafter's probabilities,
            and the batch holds the mask, by whose sum the trainer then divides.
        dpace_alpha: smoothing of D-PACE.
    """

    mixture: Mixture = field(default_factory=Mixture)
    confidence: float = 0.0
    detach: bool = True
    weights: Literal["exponential", "dpace"] = "exponential"
    dpace_alpha: float = 0.5

    @classmethod
    def of(cls, config: RunConfig) -> Terms:
        mixture = Mixture(config.ce_weight, config.kl_weight, config.tv_weight, config.candidates)
        confidence = config.confidence_weight if config.enable_confidence_head else 0.0
        return cls(mixture, confidence, config.confidence_detach, config.position_weights, config.dpace_alpha)


def curriculum(config: RunConfig, progress: float) -> float:
    """Share of the base loss: linear from `lambda_start` to `lambda_end` over the first `lambda_horizon` of the run.

    Args:
        progress: 0 at the first step, 1 at the last.
    """
    reached = min(1.0, progress / config.lambda_horizon)
    return config.lambda_start + (config.lambda_end - config.lambda_start) * reached


def batch_gamma(config: RunConfig) -> float:
    """Gamma of the weights in a batch: infinite for D-PACE, whose batches hold the mask."""
    return math.inf if config.position_weights == "dpace" else config.loss_gamma


def loss_chunk(vocabulary: int, chunk: int = 0) -> int:
    """Slots whose logits over so many tokens exist at once: `chunk`, or for 0 as many as CHUNK_BYTES hold."""
    return chunk or max(1, CHUNK_BYTES // (4 * vocabulary))


@dataclass
class LossSums:
    """Sums over the supervised slots of one micro-batch.

    Attributes:
        numerator: scalar with gradient, sum of weight * slot loss, fp32.
        statistics_KT: detached fp32 sums by depth, the rows named by `STATISTICS`.
    """

    numerator: Tensor
    statistics_KT: Tensor


class Objective:
    """The loss of one run: what does not change between steps.

    Args:
        target: frozen; its LM head gives the base logits and its own distribution, its embedding table feeds the head.
        draft_ids: ascending token ids of the draft vocabulary, on the target's device, or None.
        chunk: of `loss_chunk`.
    """

    def __init__(self, target: Target, draft_ids: Tensor | None, chunk: int = 0, terms: Terms | None = None):
        self.target, self.draft_ids, self.terms = target, draft_ids, terms or Terms()
        self.chunk = loss_chunk(target.vocab_size if draft_ids is None else len(draft_ids), chunk)
        self.index_V = None
        if draft_ids is not None:
            self.index_V = torch.zeros(target.vocab_size, dtype=torch.long, device=draft_ids.device)
            self.index_V[draft_ids] = torch.arange(len(draft_ids), device=draft_ids.device)
            target.head_rows(draft_ids)  # gathered now: it reads the ids, which no step should wait for

    @property
    def needs_teacher(self) -> bool:
        """Whether a batch must hold the target's final hidden states."""
        return self.terms.mixture.kl > 0 or self.terms.mixture.tv > 0 or self.terms.confidence > 0

    def __call__(self, model: DFlashDraftModel, batch: Batch, lam: float, hidden_RQD: Tensor) -> LossSums:
        """Sums over the batch; runs inside the drafter's forward (its `loss_fn`).

        Args:
            lam: share of the base loss.
            hidden_RQD: output of the backbone at all slots, Q = N*B.
        """
        slots = self._slots(model, batch, hidden_RQD)
        chunks, rows_VE = list(self._chunks(model, batch)), None if model.head is None else model.head.rows()
        if self.terms.weights == "dpace":
            probs_M = label_probabilities(
                self._logits, chunks, slots.labels_M, slots.hidden_MD, slots.codes_ME, rows_VE
            )
            mask_RNT = slots.counts_M.view(batch.labels_RNT.shape).float()
            weights_RNT = dpace_weights(probs_M.view(mask_RNT.shape), mask_RNT, self.terms.dpace_alpha)
            slots.weights_M = weights_RNT.flatten()
        teacher_of = partial(self.teacher, FinalStates(batch)) if self.needs_teacher else None
        numerator, values = SlotLoss.apply(
            self._logits, self.terms.mixture, lam, chunks, slots.labels_M, slots.weights_M, teacher_of, slots.hidden_MD,
            slots.codes_ME, rows_VE,
        )  # fmt: skip
        values = dict(zip(VALUES, values, strict=True))
        confidence_M = torch.zeros_like(slots.weights_M)
        if self.terms.confidence:
            logits_RNT = model.confidence_logits(
                slots.hidden_MD.view(*batch.labels_RNT.shape, -1),
                batch.block_ids_RNB[..., 0],
                batch.labels_RNT,
                self.terms.detach,
            )
            accepted_M = values["overlap"].clamp(0, 1)
            confidence_M = binary_cross_entropy_with_logits(logits_RNT.flatten().float(), accepted_M, reduction="none")
            numerator = numerator + self.terms.confidence * (slots.weights_M * confidence_M).sum()
        return LossSums(numerator, _statistics(slots, values, confidence_M.detach(), self.terms, self.needs_teacher))

    def _slots(self, model: DFlashDraftModel, batch: Batch, hidden_RQD: Tensor) -> _Slots:
        rows, anchors, depths = batch.labels_RNT.shape
        hidden_RNTD = model.prediction_slots(hidden_RQD.view(rows, anchors, model.spec.block_size, -1))
        codes_ME = None
        if model.head is not None:
            anchor_RN = batch.block_ids_RNB[..., 0]
            codes = model.head.teacher_forced_codes(anchor_RN, batch.labels_RNT, self.target.embed, hidden_RNTD)
            codes_ME = codes.flatten(0, 2)
        labels_M = batch.labels_RNT.flatten()
        if self.index_V is not None:
            labels_M = self.index_V[labels_M]
        weights_M = batch.weights_RNT.flatten()
        return _Slots(
            labels_M=labels_M,
            weights_M=weights_M,
            counts_M=weights_M > 0,
            hidden_MD=hidden_RNTD.flatten(0, 2),
            codes_ME=codes_ME,
            depths=depths,
        )

    def _chunks(self, model: DFlashDraftModel, batch: Batch) -> Iterator[Chunk]:
        """The supervised slots, those without and those with a correction apart. Nothing waits for the device."""
        plain, depths = model.plain_depths, len(batch.supervised_T)
        counts = [sum(batch.supervised_T[:plain]), sum(batch.supervised_T[plain:])]
        kinds = ((False, range(plain)), (True, range(plain, depths)))
        for (corrected, own), index_M in zip(kinds, batch.supervised_M.split(counts), strict=True):
            if own and not len(index_M):
                # A rank without supervised slots still needs every parameter in its graph, or the ranks' reductions no
                # longer match: it runs one slot of no weight, the first block's at the first of these depths.
                index_M = torch.arange(own[0], own[0] + 1, device=index_M.device)
            yield from (Chunk(piece, corrected) for piece in index_M.split(self.chunk) if len(piece))

    def teacher(self, final_of: Callable[[Tensor], Tensor], index_M: Tensor, labels_M: Tensor) -> Teacher:
        """The target's distribution at slots.

        Args:
            final_of: as `FinalStates`.
            labels_M: places in the draft vocabulary.
        """
        final_MD, whole = final_of(index_M), None
        if self.terms.confidence and self.draft_ids is not None:
            whole = self._whole(final_MD, self.draft_ids[labels_M])
        return make_teacher(self._logits(final_MD).float(), labels_M, whole)

    def _whole(self, final_MD: Tensor, tokens_M: Tensor) -> Whole:
        """Over all tokens, a few slots at a time: no array exceeds those of a chunk over the draft vocabulary."""
        few = max(1, self.chunk * len(self.draft_ids) // self.target.vocab_size)
        parts = []
        for states_MD, tokens in zip(final_MD.split(few), tokens_M.split(few), strict=True):
            scores_MV = self.target.logits(states_MD.to(self.target.dtype), wide=True).float()
            parts.append((scores_MV.logsumexp(dim=-1), is_best(scores_MV, tokens)))
        return Whole(*(torch.cat(values) for values in zip(*parts, strict=True)))

    def _logits(self, hidden_MD: Tensor) -> Tensor:
        return self.target.logits(hidden_MD.to(self.target.dtype), self.draft_ids, wide=True)


@dataclass
class _Slots:
    """All R*N*T prediction slots of a batch, flat. `counts_M` marks the supervised ones."""

    labels_M: Tensor
    weights_M: Tensor
    counts_M: Tensor
    hidden_MD: Tensor
    codes_ME: Tensor | None
    depths: int


class FinalStates:
    """The target's final hidden states [m, D] at the tokens before the labels of m slots.

    The label at depth t = 1..T stands at anchor + t, so that its distribution is read at anchor + t - 1.
    """

    def __init__(self, batch: Batch):
        assert batch.final_RSD is not None, "the batch lacks the target's final hidden states"
        rows, length, _ = batch.final_RSD.shape
        self.flat = batch.final_RSD.detach().flatten(0, 1)
        device, depths = batch.anchors_RN.device, batch.labels_RNT.shape[2]
        # Beyond the row nothing is supervised.
        places_RNT = (batch.anchors_RN[..., None] + torch.arange(depths, device=device)).clamp(max=length - 1)
        self.place_M = (places_RNT + length * torch.arange(rows, device=device)[:, None, None]).flatten()

    def __call__(self, index_M: Tensor) -> Tensor:
        return self.flat[self.place_M[index_M]]


def _statistics(
    slots: _Slots, values: dict[str, Tensor], confidence_M: Tensor, terms: Terms, has_teacher: bool
) -> Tensor:
    """Sums by depth [K, T] of what the slots gave."""
    weights_M, counts_M = slots.weights_M, slots.counts_M.float()
    losses = {"base": values["base_ce"], "final": values["final_ce"], "kl": values["kl"], "tv": values["tv"]}
    losses["confidence"] = confidence_M
    rows = {f"{name}_loss": weights_M * loss_M for name, loss_M in losses.items()}
    rows |= {"weight": weights_M, "count": counts_M}
    for name in ("base", "final", "recall", "agreement"):
        rows[f"{name}_hits"] = counts_M * values[f"{name}_hits"]
    for name in ("base", "final"):
        rows[f"{name}_run"] = rows[f"{name}_hits"].view(-1, slots.depths).cumprod(dim=1).flatten()
    unknown = {name: not has_teacher for name in OF_TEACHER} | {"confidence_loss": not terms.confidence}
    sums = [rows[name].view(-1, slots.depths).sum(dim=0) for name in STATISTICS]
    return torch.stack([x * torch.nan if unknown.get(name) else x for name, x in zip(STATISTICS, sums, strict=True)])
