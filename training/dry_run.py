"""`--dry_run`: what a training run will need, from sizes alone. Nothing is loaded, written or started.

Parameters, memory of a rank under each ZeRO stage, disk, tokens and steps. Memory counts what is known before: weights,
gradients, optimizer, target, and the loss's logits; activations come on top (`bash launch.sh bench --training` measures
them).
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from data.answers import check_origin
from data.chat import ChatFormat
from data.feature_cache import cache_settings
from data.features import resolve_taps
from data.fetch_target import resolve_target
from data.rows import Rows, answers_of, as_rows, open_answers
from data.settings import RunConfig
from models.configuration import build_drafter_config
from models.drafter import DFlashDraftModel
from models.quantization import BYTES
from models.target import Target, choose_dtype, outline_target
from training.adapters import choose_trainable, head_names
from training.arguments import world, zero_stage
from training.objective import loss_chunk
from training.plan import begin, build_spec, check_ids, decodes
from training.rows import PackedRows, TrainingRows, TrainingSet
from training.sources import expects_stored
from training.warm_start import agree_with_start, outline_start, start_config

_BYTES_OF_A_TOKEN = 7  # of JSON, in answers.jsonl


def describe_run(config: RunConfig) -> str:
    """The text. Raises ValueError for a user's mistake, as a real start does."""
    arguments, device = begin(config)
    target = _outline(config, choose_dtype(config.dtype, device))
    rows, manifest = _rows(config)
    _check_answers(config, target, rows, manifest)
    start = outline_start(config, target)
    draft_ids, spec = build_spec(config, target, rows)
    if start is None:
        sizes = build_drafter_config(target.config, spec, config.num_draft_layers)
    else:
        sizes = start_config(start, agree_with_start(start, spec, draft_ids, config)[1])
    with torch.device("meta"):
        drafter = DFlashDraftModel(sizes)
        choose_trainable(drafter, config)
    sections = (
        ("parameters", _parameters(drafter, target)),
        ("memory of a rank", _memory(drafter, target, config, world()[1], arguments)),
        ("disk", _disk(drafter, target, config, rows, arguments.save_total_limit)),
        ("work", _work(config, rows, arguments, world()[1])),
    )
    lines = [f"dry run of {config.run_dir}: nothing is loaded or written"]
    for title, entries in sections:
        lines += [f"{title}:", *(f"  {name:34} {value}" for name, value in entries.items())]
    return "\n".join(lines)


def _outline(config: RunConfig, dtype: torch.dtype) -> Target:
    """The base target, which has the sizes of a merged one, and a GGUF file as it is: merging and converting would
    write a whole model."""
    as_it_is = config.target.endswith(".gguf")
    path = config.target if as_it_is else resolve_target(replace(config, target_adapter=""))
    return outline_target(path, dtype, config.trust_remote_code)


def _rows(config: RunConfig) -> tuple[Rows, dict]:
    """The answers and their manifest, none before there are any."""
    if not config.answers and not os.path.isdir(answers_of(config)):
        return as_rows([]), {}
    return open_answers(config, keep=False)


def _check_answers(config: RunConfig, target: Target, rows: Rows, manifest: dict) -> None:
    """Raises ValueError for answers that a real start refuses; a target that is yet to be merged or converted has no
    identity to compare."""
    form = ChatFormat.of(config)
    if config.target_adapter or config.target.endswith(".gguf"):
        now = {"target_identity": None, "template": None, "quantization": config.quantization}
    else:
        now = cache_settings(target, target.path, [], config.quantization, form)
    check_origin(manifest, now, answers_of(config), form)
    check_ids(rows, target, answers_of(config))


def _parameters(drafter: DFlashDraftModel, target: Target) -> dict[str, str]:
    heads, count = head_names(drafter), {"layers": 0, "context and norms": 0, "heads": 0}
    for name, parameter in drafter.named_parameters():
        part = "heads" if name in heads else "layers" if name.startswith("layers.") else "context and norms"
        count[part] += parameter.numel()
    named = {f"drafter, {part}": f"{number:,}" for part, number in count.items()}
    trainable = _count(drafter, trainable=True)
    return named | {
        "drafter": f"{_count(drafter):,}, {trainable:,} of them trained",
        "target, frozen": f"{_count(target.model):,}",
    }


def _memory(drafter: DFlashDraftModel, target: Target, config: RunConfig, ranks: int, arguments) -> dict[str, str]:
    size, chosen = torch.finfo(target.dtype).bits // 8, zero_stage(arguments.deepspeed)
    held, entries = target_bytes(target, config.quantization), {}
    if config.quantization == "none" and expects_stored(config) and not decodes(config, arguments):
        entries["target's layers"] = "stay on disk, because features are stored"
        held -= _count(target.decoder.layers) * size
    for stage in (0, 1, 2, 3):
        mark = ", this run" if stage == chosen else ""
        state = state_bytes(_count(drafter), _count(drafter, trainable=True), size, ranks, stage)
        entries[f"ZeRO-{stage} on {ranks} ranks{mark}"] = (
            f"{_gib(state)} drafter + {_gib(held)} target = {_gib(state + held)}"
        )
    vocabulary = drafter.spec.draft_vocab_size or target.vocab_size
    chunk = loss_chunk(vocabulary, config.loss_chunk)
    entries["the loss's logits, fp32"] = (
        f"{_gib(chunk * vocabulary * 4)} an array ({chunk} slots x {vocabulary} tokens)"
    )
    return entries


def target_bytes(target: Target, quantization: str) -> int:
    """Bytes of the target's weights. Quantised are its linear layers but the LM head."""
    size, head = torch.finfo(target.dtype).bits // 8, target.model.get_output_embeddings()
    layers = [m for m in target.model.modules() if isinstance(m, nn.Linear) and m is not head]
    quantised = 0 if quantization == "none" else sum(layer.weight.numel() for layer in layers)
    return round((_count(target.model) - quantised) * size + quantised * BYTES.get(quantization, size))


def state_bytes(parameters: int, trained: int, size: int, ranks: int, stage: int) -> int:
    """Weights, gradients and AdamW's fp32 state of one rank.

    ZeRO keeps fp32 masters of what is trained (also beside fp32 weights, from stage 1 on) and two moments; it divides
    this state by the ranks from stage 1, gradients from stage 2, weights from stage 3. From stage 2 on gradients are
    accumulated in fp32 (configs/deepspeed).

    Args:
        size: bytes of a weight.
    """
    weights, gradients = parameters * size, trained * (4 if stage >= 2 else size)
    optimizer = trained * (8 if size == 4 and stage == 0 else 12)
    return math.ceil(
        weights / (ranks if stage >= 3 else 1)
        + gradients / (ranks if stage >= 2 else 1)
        + optimizer / (ranks if stage >= 1 else 1)
    )


def _disk(drafter: nn.Module, target: Target, config: RunConfig, rows: Rows, kept: int | None) -> dict[str, str]:
    width, taps = target.config.hidden_size, len(resolve_taps(config, target.num_layers))
    tokens = int(rows.lengths.sum(dtype="int64"))
    most = config.num_prompts * (config.max_prompt_length + config.max_answer_length)

    def written(bytes_each: int) -> str:
        if rows:
            return _gb(tokens * bytes_each)
        # All rows of the sources are asked for, and nobody has counted them yet.
        return f"at most {_gb(most * bytes_each)}" if most else "unknown before there are answers"

    size = torch.finfo(target.dtype).bits // 8
    # The drafter, the engine's weights and its optimizer; a drafter with LoRA added in is fp32.
    stored = 4 if config.trainable == "lora" else size
    checkpoint = _count(drafter) * (stored + size) + _count(drafter, trainable=True) * 12
    number = "all of them" if kept is None else f"{kept + 1} at once"
    return {
        "answers": written(_BYTES_OF_A_TOKEN),
        "taps beside the answers": written(taps * width * 2) + ("" if config.keep_features else " (not kept)"),
        "feature cache (features, hybrid)": written((taps + 1) * width * 2),
        "a checkpoint": f"{_gb(checkpoint)}, kept: {number}",
        "free in the run's folder": _gb(_free(config.run_dir)),
    }


def _work(config: RunConfig, rows: Rows, arguments, ranks: int) -> dict[str, str]:
    per_step = arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * ranks
    work = {"rows of a step": f"{per_step} = {arguments.per_device_train_batch_size} x "
            f"{arguments.gradient_accumulation_steps} accumulated x {ranks} ranks"}  # fmt: skip
    if not rows:
        return work | {"tokens and steps": "unknown before there are answers (bash launch.sh regenerate CONFIG)"}
    documents = TrainingRows(rows, config.max_row_length, config.anchors_per_row, config.seed)
    data: TrainingSet = PackedRows(documents) if config.packing else documents
    steps = math.ceil(len(data) / per_step)
    total = arguments.max_steps if arguments.max_steps > 0 else math.ceil(steps * arguments.num_train_epochs)
    context = int(documents.lengths_R.sum(dtype="int64")) / len(data)
    anchors = int(documents.anchor_counts.sum(dtype="int64")) / len(data)
    return work | {
        "rows": f"{len(data)} of {len(documents)} conversations, {data.skipped} skipped",
        "context tokens of a step": f"{per_step * context:,.0f}",
        "block slots of a step": f"{per_step * anchors * config.block_size:,.0f} ({per_step * anchors:,.0f} anchors)",
        "steps": f"{total}, {steps} an epoch, {total / steps:.2f} epochs",
    }


def _count(model: nn.Module, trainable: bool = False) -> int:
    # parameters() gives tied weights once.
    return sum(p.numel() for p in model.parameters() if p.requires_grad or not trainable)


def _free(folder: str) -> int:
    place = Path(folder).absolute()
    status = os.statvfs(next(path for path in (place, *place.parents) if path.is_dir()))
    return status.f_bavail * status.f_frsize


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"


def _gb(size: float) -> str:
    return f"{size / 1e9:.2f} GB"
