"""What an evaluation is told apart by: the options and weights behind a stored answer, and those behind the results."""

from __future__ import annotations

import hashlib
import json
import os
import shlex
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from data.answers import target_identity
from data.fetch_target import resolve_target
from data.settings import RunConfig
from data.target_adapter import adapter_digest
from models.checkpoint import DRAFT_VOCABULARY
from models.target import choose_dtype

from .calibration import CALIBRATION
from .environment import hardware, versions

ROOT = Path(__file__).resolve().parents[1]
# Options that add answers without changing what an answer is, nor which plans its prompt is decoded by in turn: what
# was decoded under other values of them stays valid and fairly timed.
_GROWING = (
    "benchmarks", "benchmark_dir", "eval_prompts", "temperatures", "near_tie", "sweep_budget", "sweep_width",
    "sweep_candidates", "sweep_beta", "sweep_benchmark", "sweep_prompts", "trace_prompts", "concurrency",
    "concurrency_prompts", "concurrency_runs", "max_cache_gb",
)  # fmt: skip
FOLDER_DIGITS = 12  # of a mark, in the name of its folder
# Options that decide nothing.
_PLACES = ("run_dir", "cache_dir", "trust_remote_code", "drafter")


def command_of(argv: Sequence[str]) -> str:
    """What was typed, as a person would repeat it: paths inside the project are relative to it."""
    words = [word.removeprefix(f"{ROOT}/") for word in argv if not word.startswith("--local_rank")]
    return shlex.join(["bash", "launch.sh", "eval", *words])


def options_of(config: RunConfig) -> dict:
    """Every option of this stage that decides something, by name."""
    own = [f.name for f in fields(RunConfig) if {"all", "eval"} & set(f.metadata["stages"]) and f.name not in _PLACES]
    return {name: getattr(config, name) for name in own}


def measured_on(config: RunConfig, device: str, ranks: int) -> dict:
    """What decides a time beside the options, and what their `auto` stands for: a stored answer counts where all of it
    is the same, so that what the settings of a result say holds for every answer in it.

    Args:
        device: cpu or cuda, without the number that tells ranks apart.
    """
    machine = {name: value for name, value in hardware().items() if name != "memory_gb"}  # differs between two boots
    dtype = str(choose_dtype(config.dtype, device))
    return {"device": device, "dtype": dtype, "ranks": ranks, "hardware": machine, "versions": versions()}


def fingerprints(config: RunConfig, drafter_folder: str, measured: dict) -> tuple[str, str]:
    """(Hash of what decides a stored answer and its timing, hash of everything that decides the results).

    Every option of this stage counts unless it is named above, so that a new one is never forgotten.

    Args:
        measured: of `measured_on`.
    """
    weights = _digest_of(Path(drafter_folder))
    calibration = [config.path(CALIBRATION)] if config.confidence_threshold else []
    for source in (*config.prompts, *calibration):
        if os.path.isfile(source):
            weights.update(Path(source).read_bytes())
    options = options_of(config) | measured | {"target": target_identity(resolve_target(config))}
    if config.target_adapter:
        options["target_adapter"] = adapter_digest(config.target_adapter)
    decided = {name: value for name, value in options.items() if name not in _GROWING}
    if "cost-aware" in config.budget_policy:
        decided["calibrated_at"] = config.temperatures[0]  # trees depend on what was measured at it
    mark = hashlib.sha256(json.dumps(decided, sort_keys=True).encode() + weights.digest())
    whole = hashlib.sha256(json.dumps(options, sort_keys=True).encode() + weights.digest())
    for name in config.benchmarks:
        for path in (name, os.path.join(config.benchmark_dir, f"{name}.jsonl")):
            if os.path.isfile(path):
                whole.update(Path(path).read_bytes())
    return mark.hexdigest(), whole.hexdigest()


def _digest_of(drafter: Path):
    """sha256 of a checkpoint: its config and all its tensor files, the draft vocabulary among them."""
    tensors = sorted(drafter.glob("*.safetensors"))
    for name, there in (
        ("config.json", (drafter / "config.json").is_file()),
        ("model.safetensors", any(path.name != DRAFT_VOCABULARY for path in tensors)),
    ):
        if not there:
            raise ValueError(f"drafter: {drafter} holds no {name}")
    digest = hashlib.sha256()
    for path in (drafter / "config.json", *tensors):
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest


def others(config: RunConfig, mark: str) -> int:
    """How many other measurements RUN/eval holds, where it holds none of this mark."""
    folders = {path.name for path in Path(config.path("eval")).glob("*") if path.is_dir()}
    return 0 if mark[:FOLDER_DIGITS] in folders else len(folders)


def already_done(config: RunConfig, fingerprint: str) -> bool:
    """True when RUN/results.json is of exactly these options, weights and benchmark files.

    Results from before the budget was chosen for each temperature hold one choice, made in greedy decoding: where
    anything was sampled they are not done.
    """
    path = Path(config.path("results.json"))
    if not path.is_file():
        return False
    # Read without a check of its version: results of an older schema, and broken ones, are simply written anew.
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))["settings"]
        greedy_choice = isinstance(settings.get("budget_choice"), dict)
        return settings["fingerprint"] == fingerprint and not (greedy_choice and any(config.temperatures))
    except (ValueError, KeyError, TypeError, AttributeError):
        return False
