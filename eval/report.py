"""The files of an evaluation: RUN/results.json (schema: docs/results.md), generations.jsonl, report.md, summary.md
(what a terminal shows) and plots/."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from data.answers import target_identity
from data.settings import RunConfig
from models.checkpoint import Drafter
from models.quantization import precision_name
from models.target import Target

from .chat_format import compare_formats, read_provenance
from .document import headline, markdown
from .environment import hardware, versions
from .marks import options_of
from .plots import draw_plots
from .records import Generation
from .results import SCHEMA_VERSION

# What the training's provenance says about how it ran.
_ENGINE = ("engine", "zero_stage", "world_size")


def collect_settings(config: RunConfig, target: Target, drafter: Drafter, drafter_folder: str, **more) -> dict:
    """The settings that every result carries; `more` adds to them or overrides them."""
    provenance, spec = read_provenance(drafter_folder), drafter.spec
    settings = {
        "target": target.path,
        "target_name": config.target,
        "target_identity": target_identity(target.path),
        "drafter": str(drafter_folder),
        "head": spec.head_type,
        "layout": spec.layout,
        "block_size": spec.block_size,
        "num_proposals": spec.num_proposals,
        "draft_vocab_size": spec.draft_vocab_size,
        "device": " ".join(dict.fromkeys(map(str, [target.device, *target.layer_devices]))),
        "dtype": precision_name(target.dtype, config.quantization),
        "attention": target.config._attn_implementation,
        "engine": {name: provenance.get(name) for name in _ENGINE} if provenance else None,
        "hardware": hardware(),
        "versions": versions(),
        **{name: value for name, value in options_of(config).items() if name not in ("target", "device", "dtype")},
        "chat_format": compare_formats(config, target.tokenizer, provenance),
        "provenance": provenance,
    }
    return settings | more


def write_report(run_dir: str, results: dict, generations: Iterable[Generation]) -> None:
    """Writes results.json, generations.jsonl, report.md and plots/ under `run_dir`, each file whole or not at all."""
    run = Path(run_dir)
    run.mkdir(parents=True, exist_ok=True)
    write_whole(run / "generations.jsonl", "".join(json.dumps(g.to_dict()) + "\n" for g in generations))
    write_whole(run / "report.md", markdown(results))
    write_whole(run / "summary.md", headline(results))
    draw_plots(results, run / "plots")
    # Last, since its presence says that the evaluation is finished. NaN would be a bug: JSON has none.
    write_whole(run / "results.json", json.dumps(results, indent=1, allow_nan=False) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Writes beside the file and renames, so that a reader never sees half of it."""
    temporary = path.with_name(path.name + ".partial")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def read_results(path: str | os.PathLike) -> dict:
    """Reads a results.json, an older one in today's form.

    Raises ValueError, naming it, for a broken one and for another schema version.
    """
    try:
        results = json.loads(Path(path).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is broken: {error}") from error
    if not isinstance(results, dict):
        raise ValueError(f"{path} holds no results of an evaluation but a {type(results).__name__}")
    if results.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{path} has schema_version {results.get('schema_version')}, this code reads {SCHEMA_VERSION}")
    if not isinstance(results.get("settings"), dict):
        raise ValueError(f"{path} holds no settings")
    if isinstance(choice := results["settings"].get("budget_choice"), dict):
        # Before there was one for each temperature, the only choice was made in greedy decoding.
        results["settings"]["budget_choice"] = [{**choice, "temperature": 0.0}]
    return results
