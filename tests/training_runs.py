"""Tiny training runs on disk for tests: a saved target with a tokenizer, answers, and a config."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from data.answers import AnswerRow
from tests.tiny import EOS, MASK, VOCAB, tiny_target

ROOT = Path(__file__).resolve().parent.parent

OPTIONS = dict(
    block_size=4,
    mask_token_id=MASK,
    num_draft_layers=2,
    target_layer_ids=[0, 2],
    head_rank=8,
    gru_hidden_dim=16,
    anchors_per_row=4,
    lambda_end=0.3,
    loss_chunk=32,
    device="cpu",
    dtype="fp32",
    max_steps=4,
    learning_rate=1e-2,
    per_device_train_batch_size=2,
    lr_scheduler_type="cosine",
    logging_steps=1,
    save_steps=100,
    report_to="none",
)


def answer_rows(count: int, seed: int = 0) -> list[AnswerRow]:
    """Rows of counting tokens (3, 4, 5, ... around the vocabulary), so that there is something to learn."""
    source, rows = random.Random(seed), []
    for number in range(count):
        start, prompt, answer = source.randrange(3, VOCAB), source.randrange(3, 8), source.randrange(10, 20)
        tokens = [3 + (start + i) % (VOCAB - 3) for i in range(prompt + answer)]
        rows.append(AnswerRow(f"row-{number}", "count", tokens[:prompt], [*tokens[prompt:], EOS], "eos"))
    return rows


def write_target(folder: Path) -> None:
    tiny_target().model.save_pretrained(folder)
    vocabulary = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="t0", eos_token="t1", pad_token="t0").save_pretrained(folder)


def write_run(folder: Path, rows: list[AnswerRow], **options) -> Path:
    """A run folder with answers and a saved target beside it. Returns the path of its config."""
    if not (folder / "target").exists():
        write_target(folder / "target")
    answers = folder / "run" / "answers"
    answers.mkdir(parents=True, exist_ok=True)
    (answers / "answers.jsonl").write_text("".join(json.dumps(vars(row)) + "\n" for row in rows))
    (answers / "manifest.json").write_text(json.dumps({"finished": True}))
    config = folder / "config.yaml"
    paths = dict(run_dir=str(folder / "run"), target=str(folder / "target"))
    config.write_text(yaml.safe_dump({**paths, **OPTIONS, **options}))
    return config


def launch(config: Path | None, *words: str, ranks: int = 1, script: str = "training/train_drafter.py", timeout: int = 240):
    """Runs the training script as users do: plainly for one rank, through DeepSpeed's launcher for more."""
    command = [sys.executable]
    if ranks > 1:
        command += ["-m", "deepspeed.launcher.runner", "--num_accelerators", str(ranks), "--master_port", str(free_port())]
    command += [script, *([str(config)] if config else []), *words]
    return subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=timeout)


def environment() -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    path = str(Path(sys.executable).parent) + os.pathsep + kept.get("PATH", "")
    return {**kept, "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), "PATH": path, "HF_HUB_OFFLINE": "1"}


def free_port() -> int:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def losses(folder: Path) -> list[float]:
    lines = (folder / "run" / "train_log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]
