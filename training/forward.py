"""The training forward: frozen target around the drafter, loss inside it.

Shape suffixes: R rows, S context tokens, C concatenated tap width L*D, N anchors, B slots.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from torch import Tensor, nn

from data.batches import Batch
from models.attention import block_mask
from models.drafter import DFlashDraftModel
from models.target import Target
from training.objective import LossSums, Objective


def capture_taps(target: Target, tokens_RS: Tensor, tap_ids: Sequence[int]) -> Tensor:
    """Taps [R, S, C] of right-padded context tokens, by one forward of the target.

    Attention is causal, so padding on the right changes nothing before it and needs no mask.
    """
    output = target.forward(tokens_RS, tuple(tap_ids), with_logits=False)
    return output.taps.clone()  # a tensor made in inference mode cannot be saved for the backward pass


def block_loss(
    engine: nn.Module, drafter: DFlashDraftModel, objective: Objective, batch: Batch, lam: float
) -> LossSums:
    """Loss of all blocks of a batch. Takes stored taps, or captures them from the target.

    Args:
        engine: the drafter itself, or the DeepSpeed engine around it; called once, with the loss inside its forward.
        lam: share of the base loss.
    """
    target, taps_RSC = objective.target, batch.taps_RSC
    if taps_RSC is None:
        taps_RSC = capture_taps(target, batch.tokens_RS, drafter.spec.target_layer_ids)
    return engine(
        noise_embeds=target.embed(batch.block_ids_RNB.flatten(1)),
        context_hidden_states=taps_RSC,
        attention_mask=block_mask(batch.anchors_RN, batch.context_mask_RS, drafter.spec.block_size),
        position_ids=batch.position_ids_RP,
        loss_fn=functools.partial(objective, drafter, batch, lam),
    )
