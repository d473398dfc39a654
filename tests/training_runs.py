"""Tiny training runs on disk for tests: a saved target with a tokenizer, answers, and a config."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
from pathlib import Path

import yaml
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from data.answers import AnswerRow
from tiny import EOS, MASK, VOCAB, tiny_target

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
    """A tiny target whose tokenizer reads "t5 t6", and whose chat template adds nothing."""
    tiny_target().model.save_pretrained(folder)
    vocabulary = {f"t{i}": i for i in range(VOCAB)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    template = "{% for message in messages %}{{ message.content }} {% endfor %}"
    special = dict(unk_token="t0", eos_token="t1", pad_token="t0", chat_template=template)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)


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


def write_prompts(path: Path, count: int, seed: int = 5) -> str:
    """A benchmark of distinct prompts for the tokenizer above."""
    source = random.Random(seed)
    rows = [
        {"id": f"q{n}", "turns": [" ".join(f"t{source.randrange(3, VOCAB)}" for _ in range(6))]} for n in range(count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def start_ranks(ranks: int, script: str, *words: str) -> list[subprocess.Popen]:
    """Starts a script on so many ranks of one process group, as a launcher does but seconds faster."""
    # Two local ranks even for one: a rank takes cores / local ranks threads, and tiny models want one.
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    processes = []
    for rank in range(ranks):
        place = {k: str(v) for k, v in {**common, "RANK": rank, "LOCAL_RANK": rank}.items()}
        command = [sys.executable, script, *words]
        pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        processes.append(subprocess.Popen(command, cwd=ROOT, env=environment() | place, **pipes))
    return processes


def run_ranks(ranks: int, script: str, *words: str, timeout: int = 240) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of each rank."""
    processes = start_ranks(ranks, script, *words)
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, *output) for process, output in zip(processes, outputs, strict=True)]


def environment() -> dict[str, str]:
    """Surroundings of a training process: CPU, no leftovers of another process group."""
    dropped = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    kept = {k: v for k, v in os.environ.items() if k not in dropped}
    path = str(Path(sys.executable).parent) + os.pathsep + kept.get("PATH", "")
    modules = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    return {**kept, "DS_ACCELERATOR": "cpu", "PYTHONPATH": modules, "PATH": path, "HF_HUB_OFFLINE": "1"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def losses(folder: Path) -> list[float]:
    return [line["loss"] for line in log_lines(folder) if "loss" in line]


def log_lines(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "run" / "train_log.jsonl").read_text().splitlines()]
