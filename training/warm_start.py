"""Training that starts from a drafter checkpoint: its backbone, and its head where the head's options agree.

Shape suffixes: V draft vocabulary, E rank of the correction.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import Qwen3Config

from data.settings import RunConfig
from models.checkpoint import Drafter, load_drafter, read_config
from models.configuration import DrafterSpec
from models.drafter import DFlashDraftModel
from models.fitting import check_against_target, drop_equal_tables
from models.formats.folder import local_folder
from models.target import Target
from training.adapters import head_names

log = logging.getLogger(__name__)

HEAD_FIELDS = ("head_type", "pure_draft_prefix_len", "head_rank", "gru_hidden_dim")
CONFIDENCE_FIELDS = ("confidence_head", "confidence_with_markov")
# Options of ours that a checkpoint has fixed: a start under another value would train a drafter that drafts wrongly.
FIXED = ("block_size", "mask_token_id", "target_layer_ids", "shift_label")


def read_start(config: RunConfig, target: Target) -> Drafter | None:
    """The checkpoint of `init_drafter`, in fp32; None without one.

    Raises ValueError when it cannot be this target's, and as `start_folder` does.
    """
    folder = start_folder(config)
    if folder is None:
        return None
    start = load_drafter(folder, torch.float32, allow_extra=config.allow_extra)
    check_against_target(start.spec, start.model.config, target)
    start = drop_equal_tables(start, target)
    if start.tables(target) is not target:
        raise ValueError(
            f"init_drafter: {config.init_drafter} has an embedding or LM head of its own; training uses the target's"
        )
    return start


def outline_start(config: RunConfig, target: Target) -> Drafter | None:
    """As `read_start` without the weights, on torch's meta device: every size at no cost.

    What only the tensors tell is not looked at.
    """
    folder = start_folder(config)
    if folder is None:
        return None
    sizes = read_config(folder)
    spec = DrafterSpec.from_config(sizes)
    check_against_target(spec, sizes, target)
    with torch.device("meta"):
        kept = torch.empty(spec.draft_vocab_size) if spec.draft_vocab_size else None
        return Drafter(DFlashDraftModel(sizes), kept)


def start_folder(config: RunConfig) -> str | None:
    """The folder of `init_drafter`; None without one.

    Raises ValueError when there is none, and when `trainable` needs one or leaves nothing to train.
    """
    if config.trainable == "head" and config.head == "none":
        raise ValueError("trainable is head, but head is none: there is nothing to train")
    if not config.init_drafter:
        if config.trainable != "all":
            raise ValueError(f"trainable is {config.trainable}: give --init_drafter, whose backbone stays as it is")
        return None
    folder = local_folder(config.init_drafter, "init_drafter")
    if not Path(folder).is_dir():
        raise ValueError(f"init_drafter: no such folder: {folder}")
    return folder


def agree_with_start(
    start: Drafter, spec: DrafterSpec, draft_ids: Tensor | None, config: RunConfig
) -> tuple[Tensor | None, DrafterSpec]:
    """Draft vocabulary and spec of a run that starts from a checkpoint: its backbone's fields, the run's head.

    Raises ValueError that names every option in which the run disagrees with the checkpoint's backbone.
    """
    pairs = [(name, getattr(spec, name), getattr(start.spec, name)) for name in FIXED]
    pairs.append(("num_draft_layers", config.num_draft_layers, len(start.model.layers)))
    if start.draft_ids is not None:
        pairs.append(("draft_vocab_size", config.draft_vocab_size or len(start.draft_ids), len(start.draft_ids)))
        draft_ids = start.draft_ids
    wrong = [f"{name} is {theirs} there, {ours} here" for name, ours, theirs in pairs if ours != theirs]
    if wrong:
        raise ValueError(f"init_drafter: {config.init_drafter} does not fit this run: {'; '.join(wrong)}")
    head = {name: getattr(spec, name) for name in (*HEAD_FIELDS, *CONFIDENCE_FIELDS)}
    size = None if draft_ids is None else len(draft_ids)
    layers = start.spec.num_target_layers or spec.num_target_layers
    return draft_ids, replace(start.spec, **head, draft_vocab_size=size, num_target_layers=layers)


def start_config(start: Drafter, spec: DrafterSpec) -> Qwen3Config:
    """The checkpoint's sizes and rope, with the run's head."""
    keys = start.model.config.to_dict() | spec.to_config_keys() | {"architectures": ["DFlashDraftModel"]}
    return Qwen3Config(**keys)


@torch.no_grad()
def start_from(model: DFlashDraftModel, start: Drafter, draft_ids: Tensor | None) -> bool:
    """Copies the checkpoint's weights. Returns whether the correction head came along.

    Correction head and confidence head come along each for itself. One that does not keeps its own, said in the log.
    """
    own, theirs = model.state_dict(), start.model.state_dict()
    heads = head_names(model)
    confidence = {name for name in heads if name.startswith("confidence_head.")}
    warm = model.head is not None and _agree(model.spec, start.spec, HEAD_FIELDS)
    # What it looks at beside the hidden state are rows of the correction head.
    kept = _agree(model.spec, start.spec, CONFIDENCE_FIELDS) and (warm or not model.spec.confidence_with_markov)
    fresh = (set() if warm else heads - confidence) | (set() if kept else confidence)
    if warm and start.draft_ids is None and draft_ids is not None:
        # W2 has a row for every token there, and one for each kept token here.
        name = next(n for n, p in start.model.named_parameters() if p is start.model.head.output.weight)
        theirs = {**theirs, name: theirs[name][draft_ids]}
    for name, tensor in own.items():
        if name not in fresh:
            tensor.copy_(theirs[name])
    if model.head is not None and not warm:
        log.warning("the head is new: the checkpoint has %s, this run %s", start.spec.head_type, model.spec.head_type)
    if fresh & confidence:
        log.warning("the confidence head is new: the checkpoint has none, or one that looks at something else")
    return warm


def _agree(spec: DrafterSpec, other: DrafterSpec, names: tuple[str, ...]) -> bool:
    return all(getattr(spec, name) == getattr(other, name) for name in names)
