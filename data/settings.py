"""The options of a run: one flat YAML file for all stages, overridable by `--key value` on any command line.

Keys are the fields of `RunConfig` below (ours) or those of `transformers.TrainingArguments` (the conventions that
trainers share: learning_rate, max_steps, deepspeed, report_to, ...). Anything else is an error.
"""

from __future__ import annotations

import difflib
import os
import sys
import types
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import yaml

DEFAULT_CONFIG = "configs/demo.yaml"


class StageError(RuntimeError):
    """A failure that one line explains: no user's mistake, exit code 1."""


def option(default: Any, help: str, stages: str = "all"):
    """A documented option; `stages` names the commands whose --help lists it."""
    metadata = {"help": help, "stages": stages.split()}
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


@dataclass
class RunConfig:
    """Our options. `training` holds the keys of transformers.TrainingArguments as given, unparsed."""

    run_dir: str = option("runs/demo", "folder of everything that the run writes")
    target: str = option(
        "smollm2-135m-instruct", "folder, Hub id or .gguf file of the target; the default is the demo's model"
    )
    cache_dir: str = option("", "where the demo's model is kept (default: $XDG_CACHE_HOME or ~/.cache, under dartree)")
    trust_remote_code: bool = option(False, "allow code that ships with the target")
    device: str = option("auto", "auto, cpu or cuda")
    dtype: str = option("auto", "auto, bf16 or fp32 for the target and for decoding")
    seed: int = option(0, "seed of prompts, anchors, sampling and bootstrap")

    prompts: list[str] = option(
        ["builtin"],
        'sources mixed in equal parts: builtin (the project\'s generator), JSONL files of {"turns": [...]}, datasets ids',
        "regenerate eval demo",
    )
    num_prompts: int = option(1536, "training prompts to answer", "regenerate demo")
    max_prompt_length: int = option(512, "longer prompts are skipped and counted (tokens)", "regenerate eval demo")
    max_answer_length: int = option(128, "answers are cut here (tokens)", "regenerate demo")
    answer_temperature: float = option(0.0, "0 answers greedily", "regenerate demo")
    answer_batch_size: int = option(64, "prompts answered at once", "regenerate demo")
    keep_features: bool = option(
        True, "store the taps of the answers (bf16), so that training needs no target forward", "regenerate train demo"
    )
    time_budget: float = option(
        0.0, "seconds after which regenerate stops adding answers; 0 means no limit", "regenerate demo"
    )

    block_size: int = option(8, "slots of a block: the anchor and the masks", "train")
    mask_token_id: int | None = option(
        None, "id whose embedding fills the mask slots: never emitted, not pad, not eos", "train"
    )
    num_draft_layers: int = option(3, "layers of the drafter", "regenerate train")
    target_layer_ids: list[int] = option(
        [], "target layers to tap, 0-based (default: spread as in the DFlash paper)", "regenerate train"
    )
    num_taps: int = option(
        0, "number of taps when target_layer_ids is empty (default: one a drafter layer)", "regenerate train"
    )
    shift_label: bool = option(False, "slot j predicts a+j+1 (shifted) instead of a+j (fill-in)", "train")
    head: Literal["none", "domino", "markov_vanilla", "markov_gated", "markov_rnn"] = option(
        "domino", "correction head", "train"
    )
    head_rank: int = option(256, "rank of the correction", "train")
    gru_hidden_dim: int = option(1024, "state of Domino's GRU", "train")
    pure_draft_prefix_len: int = option(1, "leading predicted tokens that the head leaves alone", "train")
    draft_vocab_size: int = option(
        0, "train head and loss on this many most frequent answer tokens; 0 means all", "train"
    )
    init_from_target: bool = option(True, "start the drafter's layers from the target's last layers", "train")

    global_batch_size: int = option(
        0,
        "rows of an optimizer step over all ranks: derives per-device batch (its key is then the limit) and accumulation; 0 leaves both as given",
        "train",
    )
    anchors_per_row: int = option(24, "anchors drawn in each row and epoch", "train")
    loss_gamma: float = option(4.0, "slot weight exp(-depth/gamma)", "train")
    lambda_start: float = option(1.0, "share of the base loss at the first step", "train")
    lambda_end: float = option(0.0, "share of the base loss at the last step", "train")
    max_row_length: int = option(640, "rows are cut here (tokens)", "train")
    loss_chunk: int = option(2048, "slots whose vocabulary logits exist at once", "train")

    drafter: str = option(
        "", "drafter checkpoint (default: the newest finished run of this config)", "eval export verify"
    )
    benchmarks: list[str] = option(
        ["builtin"],
        'builtin (held-out prompts of the generator), or paths of JSONL files of {"turns": [...]}',
        "eval demo",
    )
    eval_prompts: int = option(16, "prompts of each benchmark", "eval demo")
    max_new_tokens: int = option(64, "tokens emitted for each prompt", "eval demo verify")
    methods: list[str] = option(
        ["all"], "ar dflash_chain domino_chain ddtree per_node_serial dartree_fixed dartree_pruned", "eval demo verify"
    )
    temperatures: list[float] = option([0.0], "sampling temperatures of the target", "eval demo")
    budget: int = option(64, "tree nodes B, the root not counted", "eval verify demo")
    width: int = option(12, "nodes W kept at each depth by dartree_pruned", "eval verify demo")
    candidates: int = option(64, "base candidates K at each depth", "eval verify demo")
    beta: float = option(-0.2, "depth penalty of the final pruning, <= 0", "eval verify demo")
    choose_budget: bool = option(
        True, "also run dartree_pruned at a budget chosen from measured cost on training prompts", "eval demo"
    )
    near_tie: float = option(
        1e-4, "fp32 top-2 gap under which a difference from AR counts as a near tie", "eval verify demo"
    )
    output: str = option("", "folder to write (default: RUN_DIR/export)", "export")

    training: dict = option({}, "keys of transformers.TrainingArguments", "train")

    def __post_init__(self):
        for name in (
            "budget",
            "width",
            "candidates",
            "max_new_tokens",
            "eval_prompts",
            "num_prompts",
            "answer_batch_size",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.beta > 0:
            raise ValueError(
                f"beta must be <= 0, got {self.beta}: a positive one breaks the closure of the pruned tree"
            )
        if any(t < 0 for t in self.temperatures):
            raise ValueError(f"temperatures must be >= 0, got {self.temperatures}")

    def path(self, *parts: str) -> str:
        return os.path.join(self.run_dir, *parts)


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
    if kind in (int, float):
        try:
            number = kind(value)
        except (TypeError, ValueError):
            raise ValueError(
                f"{name} must be {'a whole number' if kind is int else 'a number'}, got {value!r}"
            ) from None
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
