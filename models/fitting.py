"""Drafter and target brought together: whether they belong together, and what each can say that the other knows."""

from __future__ import annotations

import warnings
from dataclasses import replace

import torch
from torch import Tensor
from transformers import Qwen3Config

from .checkpoint import Drafter
from .configuration import DrafterSpec
from .tables import same_rows
from .target import Target


def check_against_target(spec: DrafterSpec, config: Qwen3Config, target: Target) -> None:
    """Refuses a drafter that cannot belong to this target, before anything runs."""
    if config.hidden_size != target.config.hidden_size:
        raise ValueError(f"drafter has hidden_size {config.hidden_size}, target {target.config.hidden_size}")
    if spec.num_target_layers not in (None, target.num_layers):
        raise ValueError(
            f"drafter belongs to a target of {spec.num_target_layers} layers, this one has {target.num_layers}"
        )
    check_mask_token(spec.mask_token_id, target)
    own = getattr(target.tokenizer, "mask_token_id", None)
    if own is not None and own != spec.mask_token_id:
        warnings.warn(
            f"the tokenizer's mask token is {own}, the drafter was trained with {spec.mask_token_id}, which is used",
            stacklevel=2,
        )


def fit_to_target(drafter: Drafter, target: Target) -> Drafter:
    """Checks that a drafter belongs to the target, and limits its proposals to tokens that can really be emitted.

    Embedding tables are often padded beyond what the tokenizer can decode, and the drafter's and the target's may be
    padded differently (TRAPS 18). Rows beyond the common part are cut from the head's output projection, in place.
    """
    model = drafter.model
    check_against_target(drafter.spec, model.config, target)
    name_layers(drafter, target)
    drafter = drop_equal_tables(drafter, target)
    known = target.vocab_size if target.tokenizer is None else len(target.tokenizer)
    usable = min(target.vocab_size, model.config.vocab_size, known)
    check_vocabulary(drafter, min(target.vocab_size, known))
    if drafter.draft_ids is None:
        if usable == target.vocab_size == model.config.vocab_size:
            return drafter
        ids = torch.arange(usable, device=target.device)
    else:
        ids = drafter.draft_ids[drafter.draft_ids < usable]
    model.spec = replace(model.spec, draft_vocab_size=len(ids))
    if model.head is not None:
        output = model.head.output  # ids ascend, so that the rows to keep are the first ones
        output.weight = torch.nn.Parameter(output.weight[: len(ids)], requires_grad=False)
        output.out_features = len(ids)
    head_VD = None if drafter.head_VD is None else drafter.head_VD[: len(ids)]
    return replace(drafter, draft_ids=ids, head_VD=head_VD)


def name_layers(drafter: Drafter, target: Target) -> None:
    """Tells a drafter whose checkpoint does not say it how many layers its target has; checks its taps by that."""
    if drafter.spec.num_target_layers is None:
        drafter.model.spec = replace(drafter.spec, num_target_layers=target.num_layers)
        drafter.model.config.num_target_layers = target.num_layers


def drop_equal_tables(drafter: Drafter, target: Target) -> Drafter:
    """Without the embedding and LM head that are only copies of the target's; others get the drafter's dtype."""
    if not drafter.own_tables:
        return drafter
    embedding_VD = _own(drafter.embedding_VD, target.model.get_input_embeddings().weight, drafter.model.dtype)
    head_VD = _own(drafter.head_VD, rows_of_head(target, drafter.draft_ids), drafter.model.dtype)
    return replace(drafter, embedding_VD=embedding_VD, head_VD=head_VD)


def _own(table_VD: Tensor | None, theirs_VD: Tensor, dtype: torch.dtype) -> Tensor | None:
    return None if table_VD is None or same_rows(table_VD, theirs_VD) else table_VD.to(dtype)


def rows_of_head(target: Target, draft_ids: Tensor | None) -> Tensor:
    """The target's LM head [V, D], or its rows for the draft vocabulary that it has."""
    weight = target.model.get_output_embeddings().weight
    return weight if draft_ids is None else weight[draft_ids[draft_ids < len(weight)].to(weight.device)]


def check_vocabulary(drafter: Drafter, emitted: int) -> None:
    """Raises ValueError when a table that is looked up by the target's tokens has no rows for some of them."""
    head = drafter.model.head
    looked_up = drafter.embedding_VD is not None or (head is not None and head.previous_size)
    if looked_up and drafter.model.config.vocab_size < emitted:
        raise ValueError(
            f"drafter has vocab_size {drafter.model.config.vocab_size}, but the target emits {emitted} tokens, and the "
            "drafter looks each of them up"
        )


def check_mask_token(mask_token_id: int | None, target: Target) -> None:
    """The mask id is explicit, inside the embedding table, and neither an eos nor the pad id (TRAPS 15, 16)."""
    if mask_token_id is None:
        raise ValueError("mask_token_id is not set: give --mask_token_id, the id of a token the target never emits")
    if not 0 <= mask_token_id < target.vocab_size:
        raise ValueError(f"mask_token_id {mask_token_id} lies outside the target's {target.vocab_size} embeddings")
    if mask_token_id in target.eos_ids:
        raise ValueError(f"mask_token_id {mask_token_id} is an eos id of the target: choose another --mask_token_id")
    pad = getattr(target.config, "pad_token_id", None)
    if mask_token_id == pad:
        raise ValueError(f"mask_token_id {mask_token_id} is the target's pad id: choose another --mask_token_id")
