"""The training forward: frozen target around the drafter, loss inside it.

Shape suffixes: R rows, S context tokens, C concatenated tap width L*D, D hidden, N anchors, B slots,
Q = N*B, K statistics, T depths.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import Tensor, nn

from data.batches import Batch
from data.feature_cache import capture
from models.drafter import DFlashDraftModel
from models.target import Target
from training.attention import attention_mask
from training.objective import LossSums, Objective
from training.sources import OnlineSource


def capture_taps(target: Target, tokens_RS: Tensor, tap_ids: Sequence[int]) -> Tensor:
    """Taps [R, S, C] of right-padded rows of one document each, by one forward of the target."""
    return capture(target, tokens_RS, tap_ids)[0]


def capture_batch(
    target: Target, batch: Batch, tap_ids: Sequence[int], teacher: bool, source: OnlineSource | None
) -> Batch:
    """The batch with the taps that it lacks, and with final hidden states where the loss needs them.

    Args:
        teacher: whether the loss needs the target's distribution.
        source: one that `keeps` is given the features of the batch's documents, rounded to bf16 first, as they are
            stored, so that later epochs see the same numbers.
    """
    keeps = source is not None and source.keeps
    packed = any(len(row) > 1 for row in batch.documents)
    positions_RS = batch.position_ids_RP[:, : batch.tokens_RS.shape[1]] if packed else None
    taps_RSC, final_RSD = capture(target, batch.tokens_RS, tap_ids, positions_RS, with_final=keeps or teacher)
    if keeps:
        taps_RSC, final_RSD = taps_RSC.bfloat16().to(taps_RSC), final_RSD.bfloat16().to(final_RSD)
        for r, documents in enumerate(batch.documents):
            for name, start, length in documents:
                place = slice(start, start + length)
                source.add(name, taps_RSC[r, place], final_RSD[r, place])
    return replace(batch, taps_RSC=taps_RSC, final_RSD=final_RSD if teacher else None)


def block_loss(
    engine: nn.Module,
    drafter: DFlashDraftModel,
    objective: Objective,
    batch: Batch,
    lam: float,
    source: OnlineSource | None = None,
) -> LossSums:
    """Loss of all blocks of a batch. Takes stored taps, or captures them from the target.

    Args:
        engine: the drafter itself, or the DeepSpeed engine around it; called once, with the loss inside its forward.
        lam: share of the base loss.
        source: of `capture_batch`.
    """
    target = objective.target
    teacher = getattr(objective, "needs_teacher", False)
    if batch.taps_RSC is None or (teacher and batch.final_RSD is None):
        batch = capture_batch(target, batch, drafter.spec.target_layer_ids, teacher, source)
    kernel, context = drafter.config._attn_implementation, batch.tokens_RS.shape[1]

    def loss_of(hidden_RQD: Tensor) -> tuple[Tensor, Tensor]:
        # A plain tuple: ZeRO-3 hangs its hooks on the tensors of a module's output, and finds them in no class of ours.
        sums = objective(drafter, batch, lam, hidden_RQD)
        return sums.numerator, sums.statistics_KT

    numerator, statistics_KT = engine(
        noise_embeds=target.embed(batch.block_ids_RNB.flatten(1)),
        context_hidden_states=batch.taps_RSC,
        attention_mask=attention_mask(kernel, batch.anchors_RN, batch.starts_RN, context, drafter.spec.block_size),
        position_ids=batch.position_ids_RP,
        loss_fn=loss_of,
    )
    return LossSums(numerator, statistics_KT)
