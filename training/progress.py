"""What a training run shows: a bar with loss and accuracy, RUN/train_log.jsonl with one line a log or evaluation, and
at the end the same figures as train_log.csv and as curves in train_curves.png."""

from __future__ import annotations

import json
import time
from pathlib import Path

from tqdm import tqdm
from transformers import TrainerCallback

# Share of labels that are the target's argmax below which text is hardly its own (TRAPS 31).
LOW_AGREEMENT = 0.8


class Progress(TrainerCallback):
    """Bar and JSONL on the first rank. Seconds go on counting where an interrupted run stopped.

    Attributes:
        seconds: training time so far, earlier sessions included.
        last: figures of the last log line with a loss.
        evaluated: figures of the last evaluation.
    """

    def __init__(self, path: str, depths: int, first_rank: bool):
        self.path, self.depths, self.first_rank = Path(path), depths, first_rank
        self.seconds_before, self.last, self.evaluated, self.bar = 0.0, {}, {}, None
        self.started, self.warned = time.monotonic(), False

    @property
    def seconds(self) -> float:
        return self.seconds_before + time.monotonic() - self.started

    def on_train_begin(self, args, state, control, **kwargs):
        if not self.first_rank:
            return
        # Lines after the checkpoint that we resume from are written again.
        kept = [line for line in read_log(self.path) if line["step"] <= state.global_step]
        # Renamed when it is whole: a kill here must not lose the curves of days.
        temporary = self.path.with_name(f"{self.path.name}.partial")
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept))
        temporary.replace(self.path)
        if kept:
            self.seconds_before = kept[-1]["seconds"]
            self.last = next((line for line in reversed(kept) if "loss" in line), {})
            self.evaluated = next((line for line in reversed(kept) if "loss" not in line), {})
        self.started = time.monotonic()
        self.bar = tqdm(total=state.max_steps, initial=state.global_step, desc="train", unit="step")

    def on_step_end(self, args, state, control, **kwargs):
        if self.bar is not None:
            self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args, state, control, logs=None, **kwargs):
        evaluated = any(name.startswith("eval_") for name in logs or {})
        if self.bar is None or not (evaluated or "loss" in (logs or {})):
            return
        line = {"step": state.global_step, **logs, "seconds": round(self.seconds, 3)}
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")
        if evaluated:
            self.evaluated = line
            taus = [f"{name.removeprefix('eval_tau_')} {value:.2f}" for name, value in logs.items() if _is_tau(name)]
            self.bar.write(f"step {state.global_step}: tau {', '.join(taus)}")
            return
        self.last = line
        self._check_agreement(line)
        by_depth = " ".join(f"{logs[f'accuracy_{d}']:.2f}" for d in range(1, self.depths + 1))
        self.bar.set_postfix_str(f"loss {logs['loss']:.3f} lr {logs['learning_rate']:.1e} accuracy {by_depth}")

    def _check_agreement(self, line: dict) -> None:
        """Says once when the labels are not what the target itself would write; known where the loss has the
        target's distribution."""
        if line.get("agreement", 1.0) < LOW_AGREEMENT and not self.warned:
            self.warned = True
            self.bar.write(
                f"step {line['step']}: only {line['agreement']:.0%} of the labels are the target's argmax: "
                "are these the target's own answers?"
            )

    def on_train_end(self, args, state, control, **kwargs):
        if self.bar is None:
            return
        self.bar.close()
        lines = read_log(self.path)
        if lines:
            from training.curves import draw_curves, write_table  # imported late: drawing is for the end only

            write_table(lines, self.path.with_suffix(".csv"))
            draw_curves(lines, self.path.with_name("train_curves.png"))


def _is_tau(name: str) -> bool:
    return name.startswith("eval_tau_") and not name.startswith("eval_tau_rounds_")


def read_log(path: Path) -> list[dict]:
    if not path.is_file():
        return []
    # A last line without its end was cut by a kill.
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]
