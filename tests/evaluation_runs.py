"""A run folder that an evaluation can be started on: a saved target, a saved drafter, a benchmark and a config file."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import yaml

from models.target import load_target
from tiny import MASK, tiny_drafter
from tiny_tokenizer import save_tiny_target


def write_benchmark(path: Path, rows: list[dict]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def save_run(folder: Path, benchmark: str, **options) -> tuple[str, Path]:
    """(Config file, run folder). `options` are those of the evaluation beside the common ones below."""
    target = save_tiny_target(folder / "target")
    tiny_drafter(load_target(target, torch.float32)).model.save_pretrained(folder / "run" / "drafter")
    common = dict(
        run_dir=str(folder / "run"),
        target=target,
        device="cpu",
        dtype="fp32",
        mask_token_id=MASK,
        prompts=["builtin"],
        benchmarks=[benchmark],
        max_prompt_length=200,
        budget=8,
        width=3,
        candidates=8,
    )
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(common | options))
    return str(config), folder / "run"
