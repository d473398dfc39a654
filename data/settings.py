"""The options of a run: one flat YAML file for all stages, overridable by `--key value` on any command line.

Keys are the fields of `RunConfig` (ours, data/options.py) or those of `transformers.TrainingArguments` (the conventions that
trainers share: learning_rate, max_steps, deepspeed, report_to, ...). Anything else is an error.
"""

from __future__ import annotations

import difflib
import math
import os
import sys
import types
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

from data.options import RunConfig

DEFAULT_CONFIG = "configs/demo.yaml"


class StageError(RuntimeError):
    """A failure that one line explains: no user's mistake, exit code 1."""


def _training_keys() -> set[str]:
    from transformers import TrainingArguments  # imported late: it costs seconds that --help should not

    return {f.name for f in fields(TrainingArguments) if f.init}


def _convert(name: str, kind: Any, value: Any) -> Any:
    """Checks a YAML or command-line value against a field's type, converting text."""
    origin = get_origin(kind)
    if origin in (Union, types.UnionType):
        if value is None or value == "none" and type(None) in get_args(kind):
            return None
        kind = next(a for a in get_args(kind) if a is not type(None))
        origin = get_origin(kind)
    if origin is Literal:
        if value not in get_args(kind):
            raise ValueError(f"{name} must be one of {', '.join(get_args(kind))}, got {value!r}")
        return value
    if origin is list:
        values = value if isinstance(value, list) else [value]
        return [_convert(name, get_args(kind)[0], v) for v in values]
    if kind is bool:
        text = str(value).lower()
        if text not in ("true", "false", "1", "0"):
            raise ValueError(f"{name} must be true or false, got {value!r}")
        return text in ("true", "1")
    if value is True:  # a flag without a value
        wanted = next(f.metadata["help"] for f in fields(RunConfig) if f.name == name)
        raise ValueError(f"{name} needs a value: {wanted}")
    if kind in (int, float):
        try:
            number = kind(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(
                f"{name} must be {'a whole number' if kind is int else 'a number'}, got {value!r}"
            ) from None
        if kind is float and not math.isfinite(number):  # a whole number of any size is
            raise ValueError(f"{name} must be a finite number, got {value!r}")
        if kind is int and isinstance(value, float) and value != number:
            raise ValueError(f"{name} must be a whole number, got {value!r}")
        return number
    return value if kind is dict else str(value)


def load_config(path: str, overrides: dict[str, Any] | None = None) -> RunConfig:
    """Reads a YAML config and applies overrides. Raises ValueError for a missing file, an unknown key, a bad value."""
    if not os.path.isfile(path):
        raise ValueError(f"no such config file: {path}")
    with open(path) as file:
        try:
            given = yaml.safe_load(file) or {}
        except yaml.YAMLError as error:
            raise ValueError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(given, dict):
        raise ValueError(f"{path} must be a mapping of options")
    given = {**given, **(overrides or {})}
    hints = get_type_hints(RunConfig)
    ours = {f.name for f in fields(RunConfig)} - {"training"}
    values, training, unknown = {}, {}, []
    for key, value in given.items():
        if key in ours:
            if value is None:  # YAML's null: the default
                continue
            values[key] = _convert(key, hints[key], value)
        else:
            unknown.append(key)
    if unknown:
        theirs = _training_keys()
        for key in unknown:
            if key not in theirs:
                close = difflib.get_close_matches(key, ours | theirs, n=1)
                raise ValueError(f"unknown option {key!r}" + (f", did you mean {close[0]!r}?" if close else ""))
            training[key] = given[key]
    return RunConfig(**values, training=training)


def parse_arguments(stage: str, argv: list[str], default: str | None = DEFAULT_CONFIG) -> RunConfig:
    """`[CONFIG] [--key value ...]` of a stage. Exits 2 with one line for a user's mistake, 0 for --help.

    Any option of any stage may be given, since all stages share one config; --help lists the stage's own. A flag
    without a value means true; several values make a list.
    """
    # DeepSpeed's launcher puts --local_rank=N before a script's own words; the rank is read from the environment.
    words = [word for word in argv if not word.startswith("--local_rank")]
    if "--help" in words or "-h" in words:
        print(_help(stage, default))
        raise SystemExit(0)
    try:
        path = words.pop(0) if words and not words[0].startswith("-") else default
        if path is None:
            raise ValueError(f"usage: {stage} CONFIG [--key value ...]; --help lists the options")
        return load_config(path, _parse_options(words))
    except ValueError as error:
        print(f"{stage}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def run_stage(stage: str, argv: list[str], work: Callable[[RunConfig], None]) -> int:
    """Parses a stage's arguments and runs it. One line on stderr and exit code 2 for a ValueError, a user's mistake;
    one line and exit code 1 for a StageError or the system's refusal (disk full, no permission)."""
    config = parse_arguments(stage, argv)
    rank = int(os.environ.get("RANK", 0))
    try:
        work(config)
    except ValueError as error:
        if rank == 0:  # the others have made the same mistake
            print(f"{stage}: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except (OSError, StageError) as error:
        where = f"{stage} (rank {rank})" if rank else stage
        print(f"{where}: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


def _parse_options(words: list[str]) -> dict[str, Any]:
    options: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, *value = word[2:].split("=", 1)
            if name in options:
                raise ValueError(f"--{name} is given twice")
            options[name] = current = value
        elif options:
            current.append(word)
        else:
            raise ValueError(f"unexpected argument {word!r}; options are written --key value")
    return {k: True if not v else v[0] if len(v) == 1 else v for k, v in options.items()}


def _help(stage: str, default: str | None) -> str:
    config = "CONFIG" if default is None else f"[CONFIG={default}]"
    lines = [f"usage: {stage} {config} [--key value ...]", "", "Each option can stand in CONFIG (YAML) or here:"]
    for f in fields(RunConfig):
        if f.name != "training" and {"all", stage} & set(f.metadata["stages"]):
            value = f.default if f.default is not MISSING else f.default_factory()
            lines.append(f"  --{f.name:24} {f.metadata['help']} [{value if value != '' else 'empty'}]")
    if stage in ("train", "demo"):
        lines.append(
            "  --...                      any key of transformers.TrainingArguments (learning_rate, deepspeed, ...)"
        )
    return "\n".join(lines)
