"""Which checkpoint a run continues from, and what may have changed since it was written.

Options that decide what is learned must be equal: a difference is refused by name. Options that only decide how it is
computed may change, and are said in one line. Another number of ranks or another ZeRO stage needs DeepSpeed's universal
form of the checkpoint (training/universal.py): weights, moments and data position are kept, but not bit for bit.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from dataclasses import fields
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from data.settings import RunConfig
from models.checkpoint import check_same_spec, read_config
from models.configuration import DrafterSpec
from training.arguments import world
from training.checkpoints import (
    PROVENANCE,
    RUN_FILE,
    check_same_run,
    newest_checkpoint,
    option_defaults,
    read_json,
)
from training.universal import wants_universal

# Layout of ZeRO's state in a checkpoint; bf16 is not here: fp32 masters cannot be made out of nothing.
LAYOUT = ("world_size", "zero_stage")
# What a single start asks for and no later one inherits, and places.
_NOT_SAID = ("dry_run", "overfit_check", "run_dir", "cache_dir")


def find_resume(
    config: RunConfig,
    arguments: argparse.Namespace,
    semantic: dict[str, Any],
    operational: dict[str, Any],
    spec: DrafterSpec,
) -> str | None:
    """The checkpoint to continue from: `resume_from_checkpoint`, else the run's newest. Raises ValueError.

    Says on the first rank which operational options have changed. `arguments.deepspeed` becomes a dictionary that reads
    universal checkpoints where one is needed.
    """
    checkpoint = _named(config, arguments)
    if checkpoint is None:
        return None
    if not os.path.isfile(os.path.join(checkpoint, TRAINER_STATE_NAME)):
        raise ValueError(f"resume_from_checkpoint: {checkpoint} is not a checkpoint of this trainer")
    _refuse_later(config.path("checkpoints"), checkpoint)
    stored = _written_by(checkpoint)
    then, said = stored.get("semantic", {}), []
    if then:
        check_same_run(then, semantic, checkpoint, ignored=LAYOUT)
        layout = [f"{name} {then[name]} -> {semantic[name]}" for name in LAYOUT if then[name] != semantic[name]]
        if layout:
            arguments.deepspeed = wants_universal(checkpoint, arguments.deepspeed, ", ".join(layout))
            said.append(
                f"{', '.join(layout)} through DeepSpeed's universal form, which is not bit for bit the same run"
            )
    check_same_spec(DrafterSpec.from_config(read_config(checkpoint)), spec, f"cannot resume {checkpoint}")
    said += changes(stored.get("operational", {}), operational)
    if said and world()[0] == 0:
        print(f"train: {checkpoint} continues with other settings: {'; '.join(said)}")
    return checkpoint


def _written_by(checkpoint: str) -> dict[str, Any]:
    """The options `semantic` and `operational` of the start that wrote a checkpoint, as far as it wrote them down.

    Every start overwrites RUN_FILE, also one of another layout: it stands in only for what the checkpoint does not say.
    """
    run = read_json(Path(checkpoint).parent / RUN_FILE) or {}
    own = read_json(Path(checkpoint, PROVENANCE)) or {}
    latest = run if "semantic" in run or not run else {"semantic": run}  # once it held nothing else
    return latest | {name: own[name] for name in ("semantic", "operational") if name in own}


def _named(config: RunConfig, arguments: argparse.Namespace) -> str | None:
    wanted, folder = arguments.resume_from_checkpoint, config.path("checkpoints")
    arguments.resume_from_checkpoint = None
    newest = newest_checkpoint(folder)
    automatic = wanted is None or str(wanted).lower() == "true"
    if str(wanted).lower() == "false" and newest:
        raise ValueError(f"resume_from_checkpoint is false, but {folder} holds {newest}: choose another --run_dir")
    if wanted is not None and automatic and not newest:
        raise ValueError(f"resume_from_checkpoint is true, but {folder} holds no checkpoint")
    return newest if automatic else wanted if str(wanted).lower() != "false" else None


def _refuse_later(folder: str, checkpoint: str) -> None:
    """Raises ValueError for checkpoints of the run behind the one that the user goes back to.

    The next start would continue from them, and the new run's own checkpoints be deleted in favour of them.
    """
    step = (read_json(Path(checkpoint, TRAINER_STATE_NAME)) or {}).get("global_step", 0)
    others = [p for p in Path(folder).glob(f"{PREFIX_CHECKPOINT_DIR}-*") if not p.samefile(checkpoint)]
    steps = {p.name: int(number) for p in others if (number := p.name.rpartition("-")[2]).isdigit()}
    if later := sorted((name for name in steps if steps[name] > step), key=steps.get):
        raise ValueError(
            f"resume_from_checkpoint: {folder} holds {', '.join(later)} behind {checkpoint}, from which the next start "
            f"would continue; move them away first: cd {shlex.quote(folder)} && mkdir -p aside && "
            f"mv {' '.join(later)} aside/"
        )


def operational_options(config: RunConfig, arguments: argparse.Namespace, semantic: dict[str, Any]) -> dict[str, Any]:
    """Everything of the stage that is not semantic, as plain JSON values: our options, the keys of TrainingArguments
    as given, and what the DeepSpeed JSON holds."""
    stages = {f.name: set(f.metadata["stages"]) for f in fields(config)}
    ours = {name: getattr(config, name) for name, own in stages.items() if own & {"train", "all"}}
    options = ours | {key: getattr(arguments, key) for key in config.training}
    for key in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        options[key] = getattr(arguments, key)
    options["deepspeed_json"] = read_json(arguments.deepspeed)
    left_out = {
        *semantic,
        *_NOT_SAID,
        "num_taps",
        "global_batch_size",
        "training",
        "deepspeed",
        "resume_from_checkpoint",
    }
    kept = {key: value for key, value in options.items() if key not in left_out}
    return json.loads(json.dumps(kept, default=str))


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """`name was -> is` of each option that differs; nothing for a run that did not write them down.

    One that only one side says had its default there; without a default it did not exist yet, and is left out.
    """
    if not before:
        return []
    default = option_defaults()
    names = [name for name in {*before, *now} if name in before or name in default]
    then, since = (_flat({name: side.get(name, default.get(name)) for name in names}) for side in (before, now))
    pairs = {name: (then.get(name), since.get(name)) for name in sorted({*then, *since})}
    return [f"{name} {_plain(was)} -> {_plain(value)}" for name, (was, value) in pairs.items() if was != value]


def _flat(options: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by dotted names."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def _plain(value: Any) -> Any:
    # TrainingArguments keeps counts of steps as floats.
    return int(value) if isinstance(value, float) and value.is_integer() else value
