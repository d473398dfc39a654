"""From the run's options to transformers' TrainingArguments, with the machine's ranks, device and threads."""

from __future__ import annotations

import argparse
import json
import math
import os
import re
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser, TrainingArguments

from data.environment import choose_device
from data.settings import RunConfig
from models.target import choose_dtype

ROOT = Path(__file__).resolve().parent.parent
# Stages 2 and 3 accumulate gradients in fp32. Stage 1 does so in the weights' dtype: for fp32, DeepSpeed takes another
# optimizer there, which keeps them whole on every rank. Long accumulation of bf16 gradients wants stage 2.
DEFAULT_DEEPSPEED = "configs/deepspeed/zero1.json"
SELECTS = "tau_dartree_pruned"  # the best checkpoint is the one with the longest acceptance of DARTree
# Keys that follow from our own options, or that this trainer cannot honour.
OURS = {
    "output_dir": "run_dir",
    "seed": "seed",
    "bf16": "dtype",
    "fp16": "dtype",
    "use_cpu": "device",
    "no_cuda": "device",
}
UNSUPPORTED = (
    "do_eval load_best_model_at_end remove_unused_columns label_names "
    "dataloader_persistent_workers auto_find_batch_size fsdp torch_compile average_tokens_across_devices "
    "logging_nan_inf_filter disable_tqdm full_determinism"
).split()


def world() -> tuple[int, int, int]:
    """(rank, world size, ranks on this machine) as the launcher set them; (0, 1, 1) without one."""
    size = int(os.environ.get("WORLD_SIZE", 1))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("LOCAL_SIZE", size)))
    return int(os.environ.get("RANK", 0)), size, local


def rank_device(name: str) -> str:
    """The device of this rank: `cpu`, or its own CUDA device. Raises ValueError for a GPU that torch cannot use."""
    device = choose_device(name)
    return device if device == "cpu" else f"{device}:{os.environ.get('LOCAL_RANK', 0)}"


def set_threads(device: str, local_ranks: int) -> None:
    """Threads = cores / local ranks: two ranks with all threads each are 5-10 times slower."""
    if device == "cpu":
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // local_ranks))


def deepspeed_path(path: str) -> str:
    """A DeepSpeed JSON as given, or relative to the repository. Raises ValueError if neither exists."""
    for candidate in (Path(path), ROOT / path):
        if candidate.is_file():
            return str(candidate)
    raise ValueError(f"deepspeed: no such file: {path}")


def zero_stage(path: str) -> int:
    """ZeRO's stage in a DeepSpeed JSON, 0 when it names none. Raises ValueError for a file that is not JSON."""
    try:
        return int(json.loads(Path(path).read_text()).get("zero_optimization", {}).get("stage", 0))
    except json.JSONDecodeError as error:
        raise ValueError(f"deepspeed: {path} is not valid JSON: {error}") from None


def check_training_options(config: RunConfig, device: str) -> argparse.Namespace:
    """Types and choices of the TrainingArguments keys, checked before a process group exists.

    Returns the parsed keys; `TrainingArguments(**vars(...))` then starts the process group. Raises ValueError.
    """
    given = {key: value for key, value in config.training.items() if value is not None}  # YAML's null: the default
    for key in given:
        if key in OURS:
            raise ValueError(f"{key} is set by this project: use --{OURS[key]}")
        if key in UNSUPPORTED:
            raise ValueError(f"{key} is not supported by this trainer")
    parser = HfArgumentParser(TrainingArguments)
    parser.error = _refuse
    words = ["--output_dir", config.path("checkpoints")]
    for key, value in given.items():
        words += [f"--{key}", *_words(value)]
    values = parser.parse_args(words)
    _check_numbers(values, given)
    values.deepspeed = deepspeed_path(values.deepspeed or DEFAULT_DEEPSPEED)
    values.seed = config.seed
    values.use_cpu = device == "cpu"
    values.bf16 = choose_dtype(config.dtype, device) == torch.bfloat16
    values.remove_unused_columns = False
    values.logging_nan_inf_filter = False
    if values.accelerator_config is None and values.dataloader_pin_memory and device != "cpu":
        # Batches go to the GPU without the host waiting for the copy, and so for all that the GPU has still to do.
        values.accelerator_config = {"non_blocking": True}
    values.disable_tqdm = True  # our own bar shows loss and accuracy
    if values.eval_steps and "eval_strategy" not in given:
        values.eval_strategy = "steps"
    if values.eval_strategy != "no":
        values.metric_for_best_model = values.metric_for_best_model or SELECTS
    values.logging_first_step = True if "logging_first_step" not in given else values.logging_first_step
    return values


def _check_numbers(values: argparse.Namespace, given: dict[str, Any]) -> None:
    """Raises ValueError for numbers with which transformers would train nothing, or on nan."""
    for key in given:
        number = getattr(values, key)
        if isinstance(number, float) and not math.isfinite(number):
            raise ValueError(f"{key} must be a finite number, got {number}")
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if getattr(values, key) < 1:
            raise ValueError(f"{key} must be at least 1, got {getattr(values, key)}")
    if values.max_steps < 1 and values.max_steps != -1:
        raise ValueError(f"max_steps must be at least 1, or -1 to go by num_train_epochs, got {values.max_steps}")
    if values.max_steps == -1 and values.num_train_epochs <= 0:
        raise ValueError(f"num_train_epochs must be above 0, got {values.num_train_epochs}")


def spread_batch(values: argparse.Namespace, batch_of_a_step: int, world_size: int) -> None:
    """Derives per-device batch and accumulation from the rows of an optimizer step, which stay whatever the ranks.

    `per_device_train_batch_size` is then an upper limit. 0 leaves both keys as given.
    """
    if not batch_of_a_step:
        return
    if batch_of_a_step % world_size:
        raise ValueError(f"global_batch_size {batch_of_a_step} does not divide by the {world_size} ranks")
    share = batch_of_a_step // world_size
    device_batch = max(n for n in range(1, min(share, values.per_device_train_batch_size) + 1) if share % n == 0)
    values.per_device_train_batch_size = device_batch
    values.gradient_accumulation_steps = share // device_batch


def _words(value: Any) -> list[str]:
    if isinstance(value, (list, tuple)):
        return [str(v) for v in value]
    return [json.dumps(value) if isinstance(value, dict) else str(value)]


def _refuse(message: str):
    # argparse names both spellings: "argument --learning_rate/--learning-rate: ...".
    raise ValueError(re.sub(r"^argument --(\w+)(/--[\w-]+)?", r"\1", message))
