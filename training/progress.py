"""What a training run shows: a bar with loss and accuracy, and RUN/train_log.jsonl with one line a log."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tqdm import tqdm
from transformers import TrainerCallback


class Progress(TrainerCallback):
    """Bar and JSONL on the first rank. Seconds go on counting where an interrupted run stopped.

    Attributes:
        seconds: training time so far, earlier sessions included.
        last: figures of the last log line with a loss.
    """

    def __init__(self, path: str, depths: int, first_rank: bool):
        self.path, self.depths, self.first_rank = Path(path), depths, first_rank
        self.seconds_before, self.last, self.bar = 0.0, {}, None
        self.started = time.monotonic()

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def on_train_begin(self, args, state, control, **kwargs):
        if not self.first_rank:
            return
        # Lines after the checkpoint that we resume from are written again.
        kept = [line for line in _read_lines(self.path) if line["step"] <= state.global_step]
        self.path.write_text("".join(json.dumps(line) + "\n" for line in kept))
        if kept:
            self.seconds_before, self.last = kept[-1]["seconds"], kept[-1]
        self.started = time.monotonic()
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="train", unit="step")

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        if self.bar is None or not logs or "loss" not in logs:
            return
        self.last = {"step": state.global_step, **logs, "seconds": round(self.seconds, 3)}
        with open(self.path, "a") as file:
            file.write(json.dumps(self.last) + "\n")
        by_depth = " ".join(f"{logs[f'accuracy_{d}']:.2f}" for d in range(1, self.depths + 1))
        self.bar.set_postfix_str(f"loss {logs['loss']:.3f} lr {logs['learning_rate']:.1e} accuracy {by_depth}")

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.close()


def _read_lines(path: Path) -> list[dict]:
    if not path.is_file():
        return []
    # A last line without its end was cut by a kill.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
