"""Checkpoint folders of a run: written whole or not at all, found again, and refused when the run has changed."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import shutil
from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from transformers import TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from data.answers import target_identity
from data.disk import written
from data.rows import as_rows
from data.settings import RunConfig, StageError
from data.target_adapter import adapter_digest
from models.formats.folder import local_folder
from training.arguments import zero_stage

# Folder inside RUN/checkpoints for what is being written. Its name does not match `checkpoint-N`: nothing resumes it.
UNFINISHED = "unfinished"
BEST = "best"
RUN_FILE = "run.json"
PROVENANCE = "provenance.json"

# Options of ours that change what is learned. Where features come from, chunks and devices do not.
OURS = (
    "target quantization seed block_size mask_token_id num_draft_layers shift_label head head_rank gru_hidden_dim "
    "pure_draft_prefix_len draft_vocab_size init_from_target anchors_per_row loss_gamma lambda_start lambda_end "
    "lambda_horizon ce_weight kl_weight tv_weight enable_confidence_head confidence_head_with_markov confidence_weight "
    "confidence_detach position_weights dpace_alpha max_row_length packing"
).split()
# Said only when part of a drafter is trained, so that runs from before these options existed can be resumed.
PARTIAL = "trainable lora_rank lora_alpha lora_dropout lora_targets".split()
THEIRS = (
    "learning_rate lr_scheduler_type lr_scheduler_kwargs warmup_steps max_steps num_train_epochs weight_decay "
    "adam_beta1 adam_beta2 adam_epsilon max_grad_norm optim optim_args train_sampling_strategy data_seed "
    "dataloader_drop_last"
).split()

# What an optimizer's stored state depends on: a resume must share it, a finished drafter does not ask for it.
STATE = ("world_size", "bf16", "zero_stage")


def publish(source: str, destination: str) -> None:
    """Moves a finished folder to its name in one rename, replacing an older folder of that name."""
    if os.path.exists(destination):
        old = f"{source}.old"
        os.rename(destination, old)
        os.rename(source, destination)
        shutil.rmtree(old)
    else:
        os.rename(source, destination)


@contextlib.contextmanager
def saving(folder: str, step: int):
    """Around a save: a refused write (full disk, quota) becomes one line, and what was half written is removed.

    Raises StageError. Only the unfinished save is lost.
    """
    try:
        with written(f"checkpoint {step}", os.path.join(folder, UNFINISHED)):
            yield
    except StageError as error:
        newest = newest_checkpoint(folder)
        left = f"the run continues from {newest}" if newest else "the run starts anew, there is no earlier checkpoint"
        raise StageError(f"{error}; {left}") from error


def point_to_best(folder: str, checkpoint: str) -> None:
    """Makes RUN/checkpoints/best a link to the best checkpoint, relative, so that a run folder can be moved."""
    link = os.path.join(folder, BEST)
    temporary = f"{link}.partial"
    if os.path.lexists(temporary):
        os.remove(temporary)
    os.symlink(os.path.basename(checkpoint), temporary)
    os.replace(temporary, link)


def newest_checkpoint(folder: str) -> str | None:
    """The newest whole checkpoint of RUN/checkpoints, or None. Leftovers of an interrupted save are not considered."""
    return get_last_checkpoint(folder) if os.path.isdir(folder) else None


def semantic_options(config, arguments, taps: Sequence[int], world_size: int, rows: Sequence) -> dict[str, Any]:
    """What must stay equal for a resume to be the same run, as plain JSON values.

    Args:
        arguments: parsed keys of TrainingArguments, before its construction.
    """
    options = {name: getattr(config, name) for name in OURS}
    options |= {name: getattr(arguments, name) for name in THEIRS}
    # As given: it may split batches and drop rows in other ways. What follows from other options is not in it.
    options["accelerator_config"] = config.training.get("accelerator_config")
    options["target_layer_ids"] = list(taps)
    options["batch_size_of_a_step"] = (
        arguments.per_device_train_batch_size * arguments.gradient_accumulation_steps * world_size
    )
    # ZeRO's optimizer state is cut into one piece a rank, by stage; it holds fp32 copies of bf16 weights.
    options |= {"world_size": world_size, "bf16": arguments.bf16, "zero_stage": zero_stage(arguments.deepspeed)}
    engine = read_json(arguments.deepspeed) or {}
    options |= {f"deepspeed_{name}": engine[name] for name in ("optimizer", "scheduler") if name in engine}
    options["answers"] = as_rows(rows).digest
    if config.target_adapter:
        options["target_adapter"] = adapter_digest(config.target_adapter)
    if config.init_drafter:
        options["init_drafter"] = target_identity(local_folder(config.init_drafter, "init_drafter"))
    if config.trainable != "all":
        options |= {name: getattr(config, name) for name in PARTIAL}
    return json.loads(json.dumps(options, default=str))


@functools.cache
def option_defaults() -> dict[str, Any]:
    """Defaults of our options and of transformers' as plain JSON values: what a start that does not say one had."""
    kinds = (TrainingArguments, RunConfig)
    found = {f.name: f.default if f.default is not MISSING else f.default_factory() for k in kinds for f in fields(k)}
    return json.loads(json.dumps(found, default=str))


def check_same_run(stored: dict[str, Any], now: dict[str, Any], where: str, ignored: Sequence[str] = ()) -> None:
    """Raises ValueError in one line if any semantic option differs, but for the ignored ones.

    An option that one side does not say has its default there: it was not given, or did not exist yet.
    """
    defaults = option_defaults()
    names = [name for name in {**now, **stored} if name not in ignored]
    pairs = {name: tuple(side.get(name, defaults.get(name)) for side in (stored, now)) for name in names}
    pairs = {name: tuple("not given" if v == "" else v for v in pair) for name, pair in pairs.items()}
    changed = [f"{name} was {was}, is {value}" for name, (was, value) in pairs.items() if was != value]
    if changed:
        raise ValueError(
            f"{where} belongs to a run with other options ({'; '.join(changed)}): choose another --run_dir or remove it"
        )


def read_json(path: str | os.PathLike) -> dict[str, Any] | None:
    return json.loads(Path(path).read_text()) if os.path.isfile(path) else None


def write_json(path: str | os.PathLike, content: dict[str, Any]) -> None:
    """Writes beside the file and renames, so that a reader never sees half of it."""
    temporary = Path(f"{path}.partial")
    temporary.write_text(json.dumps(content, indent=2) + "\n")
    temporary.rename(path)
