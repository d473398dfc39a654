"""All that a training run needs, checked before the process group starts.

Shape suffixes: R rows, S tokens.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from data.answers import AnswerRow, check_origin
from data.chat import ChatFormat
from data.environment import check_compiler
from data.feature_cache import cache_settings
from data.features import resolve_taps
from data.fetch_target import resolve_target
from data.rows import Rows, answers_of, as_rows, open_answers
from data.settings import RunConfig
from models.checkpoint import Drafter
from models.configuration import DrafterSpec, build_drafter_config
from models.fitting import check_mask_token
from models.placement import placement
from models.streaming import stream_target
from models.target import Target, choose_dtype, load_target
from training.agreement import label_agreement
from training.arguments import check_training_options, rank_device, set_threads, spread_batch, world
from training.attention import KERNELS, choose_attention
from training.checkpoints import (
    PROVENANCE,
    STATE,
    check_same_run,
    read_json,
    semantic_options,
)
from training.progress import LOW_AGREEMENT
from training.resume import find_resume, operational_options
from training.rows import PackedRows, TrainingRows, TrainingSet
from training.sources import open_source
from training.vocabulary import choose_draft_ids, coverage
from training.warm_start import agree_with_start, read_start, start_config

log = logging.getLogger(__name__)


@dataclass
class TrainingPlan:
    """A checked run.

    Attributes:
        arguments: parsed keys of TrainingArguments.
        target: with its layers or, where no step needs them, without (`models.streaming`).
        resume: checkpoint folder to continue from, or None.
        semantic: options that a resume must share.
        operational: the other options, which a resume may change.
        coverage: share of answer tokens that the draft vocabulary holds.
        agreement: share of sampled answer tokens that are the target's own argmax.
        start: checkpoint whose weights the drafter starts from, or None.
    """

    config: RunConfig
    arguments: argparse.Namespace
    target: Target
    spec: DrafterSpec
    drafter_config: Any
    data: TrainingSet
    draft_ids: Tensor | None
    resume: str | None
    semantic: dict[str, Any]
    operational: dict[str, Any]
    coverage: float
    agreement: float
    start: Drafter | None = None


def prepare(config: RunConfig) -> TrainingPlan | None:
    """Checks everything and loads target and rows; None when the run is finished already. Raises ValueError."""
    rank, world_size, _ = world()
    arguments, device = begin(config)
    path = resolve_target(config)
    rows, manifest = open_answers(config)
    dtype = choose_dtype(config.dtype, device)
    # A mistake is found, and a finished run said, before the layers are loaded; training may need none.
    target = stream_target(path, dtype, device, config.trust_remote_code) if config.quantization == "none" else None
    target = target or load_whole(config, path, dtype, device)
    form, taps = ChatFormat.of(config), resolve_taps(config, target.num_layers)
    needed = cache_settings(target, path, taps, config.quantization, form)
    check_origin(manifest, needed, answers_of(config), form)
    check_ids(rows, target, answers_of(config))
    start = read_start(config, target)
    draft_ids, spec = build_spec(config, target, rows)
    if start is not None:
        draft_ids, spec = agree_with_start(start, spec, draft_ids, config)
    semantic = semantic_options(config, arguments, spec.target_layer_ids, world_size, rows)
    if finished := read_json(config.path("drafter", PROVENANCE)):
        check_same_run(finished["semantic"], semantic, config.path("drafter"), ignored=STATE)
        return None
    operational = operational_options(config, arguments, semantic)
    resume = find_resume(config, arguments, semantic, operational, spec)
    fresh = build_drafter_config(target.config, spec, config.num_draft_layers)
    drafter_config = fresh if start is None else start_config(start, spec)
    drafter_config._attn_implementation = choose_attention(config.attention, device, spec)
    needed["tap_ids"] = list(spec.target_layer_ids)
    data = build_data(config, rows, needed, target, drafter_config._attn_implementation == KERNELS["flex"])
    if len(data) < world_size:
        raise ValueError(f"{len(data)} rows with anchors are fewer than the {world_size} ranks")
    if target.streams and (decodes(config, arguments) or not data.source.complete(data.documents.rows)):
        target = load_whole(config, path, dtype, device)
    plan = TrainingPlan(
        config=config,
        arguments=arguments,
        target=target,
        spec=spec,
        drafter_config=drafter_config,
        data=data,
        draft_ids=draft_ids,
        resume=resume,
        semantic=semantic,
        operational=operational,
        coverage=coverage(rows, draft_ids, target.vocab_size),
        agreement=label_agreement(target, data),
        start=start,
    )
    if rank == 0:
        _introduce(plan)
    return plan


def load_whole(config: RunConfig, path: str, dtype: torch.dtype, device: str) -> Target:
    """The target with its layers. Raises ValueError as `load_target` and `placement` do."""
    placed = placement(config.device_map)
    return load_target(path, dtype, device, config.trust_remote_code, config.quantization, placed)


def decodes(config: RunConfig, arguments: argparse.Namespace) -> bool:
    """Whether the run decodes, which needs the target's layers however features are stored."""
    return config.overfit_check or arguments.eval_strategy != "no"


def begin(config: RunConfig) -> tuple[argparse.Namespace, str]:
    """Parsed training keys and device of this rank, with its threads set. Raises ValueError."""
    disable_progress_bar()  # transformers' own bars, for loading and saving; the training bar is ours
    _, world_size, local_ranks = world()
    device = rank_device(config.device)
    os.environ.setdefault("DS_ACCELERATOR", "cpu" if device == "cpu" else "cuda")
    set_threads(device, local_ranks)
    if device == "cpu":
        check_compiler()
    arguments = check_training_options(config, device)
    choose_attention(config.attention, device)
    spread_batch(arguments, config.global_batch_size, world_size)
    _check_output(config)
    return arguments, device


def _introduce(plan: TrainingPlan) -> None:
    data = plan.data
    packed = f" in {len(data)} packed rows" if data is not data.documents else ""
    print(
        f"train: {len(data.documents)} conversations{packed} ({data.skipped} skipped), features {data.source.name}, "
        f"draft vocabulary covers {plan.coverage:.2%} of the answers, "
        f"{plan.agreement:.1%} of sampled labels are the target's argmax"
    )
    if plan.target.streams:
        print("train: features are stored: of the target only embeddings, final norm and LM head are in memory")
    elif data.source.complete(data.documents.rows):
        decoding = decodes(plan.config, plan.arguments)
        why = "the run decodes" if decoding else "it is quantised, or its files hold other tensors than the model"
        print(f"train: the target is loaded whole although features are stored, because {why}")
    if plan.agreement < LOW_AGREEMENT:
        log.warning("%.0f %% agreement is low: are these the target's own answers?", 100 * plan.agreement)


def check_ids(rows: Rows, target: Target, where: str) -> None:
    """Raises ValueError for tokens that the target does not have: they come from another tokenizer."""
    if rows.largest_id >= target.vocab_size:
        raise ValueError(
            f"the answers in {where} hold token {rows.largest_id}, the target has {target.vocab_size}: "
            "they are another target's"
        )


def build_spec(config: RunConfig, target: Target, rows: Sequence[AnswerRow]) -> tuple[Tensor | None, DrafterSpec]:
    """Draft vocabulary and drafter spec of a config. Raises ValueError for a bad mask id, bad taps or a bad head."""
    check_mask_token(config.mask_token_id, target)
    rows = as_rows(rows)
    emitted = int(rows.token_counts(config.mask_token_id + 1)[-1])
    if emitted:
        log.warning(
            "mask_token_id %d occurs %d times in the answers: choose another --mask_token_id, one that the target "
            "never emits",
            config.mask_token_id,
            emitted,
        )
    draft_ids = choose_draft_ids(
        rows, config.draft_vocab_size, target.vocab_size, target.eos_ids, never=config.mask_token_id
    )
    spec = DrafterSpec(
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        target_layer_ids=resolve_taps(config, target.num_layers),
        num_target_layers=target.num_layers,
        shift_label=config.shift_label,
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
        **head_fields(config),
    )
    return draft_ids, spec


def head_fields(config: RunConfig) -> dict[str, Any]:
    """Correction head and confidence head of a config, as fields of `DrafterSpec`."""
    return dict(
        head_type=config.head,
        pure_draft_prefix_len=config.pure_draft_prefix_len,
        head_rank=config.head_rank,
        gru_hidden_dim=config.gru_hidden_dim,
        confidence_head=config.enable_confidence_head,
        confidence_with_markov=config.confidence_head_with_markov,
    )


def build_data(config: RunConfig, rows: Sequence[AnswerRow], needed: dict, target: Target, flex: bool) -> TrainingSet:
    """The training set over the features that `features` names, packed if asked for. Raises ValueError.

    Args:
        needed: of `data.feature_cache.cache_settings`.
        flex: the attention is compiled, and wants batches of one shape.
    """
    documents = TrainingRows(rows, config.max_row_length, config.anchors_per_row, config.seed, fixed_shapes=flex)
    # Rows without anchors are never trained: a source that lacks them is complete.
    documents.source = open_source(config, needed, documents.rows, target.config.hidden_size, world()[0])
    return PackedRows(documents) if config.packing else documents


def _check_output(config: RunConfig) -> None:
    path = Path(config.run_dir).absolute()
    for parent in [path, *path.parents]:
        if parent.exists():
            if not parent.is_dir():
                raise ValueError(f"run_dir {config.run_dir} lies under {parent}, which is a file")
            if not os.access(parent, os.W_OK):
                raise ValueError(f"run_dir {config.run_dir}: no permission to write in {parent}")
            return


def sample_tokens(data: TrainingSet, device: torch.device, rows: int = 8) -> Tensor:
    """Tokens [R, S] of the first few rows, cut to the shortest of them, so that nothing is padding."""
    data = data.documents
    tokens = [data[i].tokens_S for i in range(min(rows, len(data)))]
    length = min(len(t) for t in tokens)
    return torch.stack([t[:length] for t in tokens]).to(device)
