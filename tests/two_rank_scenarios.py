"""Training scenarios for tests, run as one process a rank: `two_rank_scenarios.py STEP FOLDER`.

Several scenarios share a process, because starting one costs seconds. Resuming has a process of its own, so that
nothing can survive in memory.
"""

import contextlib
import io
import json
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
from transformers import TrainerCallback

from data import batches
from data.settings import load_config
from eval.environment import git_commit, git_diff
from trainers import SpoiledObjective
from training import overfit, session, train_drafter
from training.plan import prepare
from training.train_drafter import _single_process_defaults
from training.trainer import NonFiniteLoss

# Runs that train a part of a drafter. Each, like "mixed", is made at once, and as NAME-split by two starts.
PARTLY = ("partly-lora", "partly-head")


class StopAt(TrainerCallback):
    """Ends training after so many steps, as an interruption right after a save would."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step >= self.step


class Steps(TrainerCallback):
    """Which steps this process has made."""

    def __init__(self):
        self.made = []

    def on_step_end(self, args, state, control, **kwargs):
        self.made.append(state.global_step)


def run(config, stop=None, watch=None, **options):
    """Trains a config. Returns the trainer."""
    plan = prepare(load_config(config, options))
    trainer, _ = session.build(plan)
    if stop:
        trainer.add_callback(StopAt(stop))
    if watch:
        trainer.add_callback(watch)
    trainer.train(resume_from_checkpoint=plan.resume)
    return trainer


def states(trainer):
    """Everything that a resume must restore on this rank: weights, fp32 masters, optimizer moments, learning rate."""
    optimizer = trainer.model_wrapped.optimizer
    moments = [v for state in optimizer.optimizer.state.values() for _, v in sorted(state.items())]
    return {
        "weights": trainer.model.state_dict(),
        "masters": list(optimizer.single_partition_of_fp32_groups),
        "moments": [m.clone() for m in moments],
        "rate": torch.tensor([group["lr"] for group in optimizer.param_groups]),
        "rng": torch.get_rng_state(),
    }


def straight(folder):
    """20 steps at once, 10 steps of the same run elsewhere, and the 2-rank side of other comparisons."""
    trainer = run(folder / "straight" / "config.yaml")
    rank = trainer.args.process_index
    torch.save(states(trainer), folder / f"straight-{rank}.pt")
    run(folder / "split" / "config.yaml", stop=10)
    # What the clone is at this moment: it may change while the tests run.
    (folder / f"code-{rank}.json").write_text(json.dumps({"git_commit": git_commit(), "git_diff": git_diff()}))
    run(folder / "global" / "config.yaml")
    run(folder / "odd" / "config.yaml")
    small_updates(folder)
    for name in ("mixed", *PARTLY):
        torch.save(states(run(folder / name / "config.yaml")), folder / f"{name}-{rank}.pt")
        run(folder / f"{name}-split" / "config.yaml", stop=3)
    finish_lora(folder)
    spoiled(folder)
    run(folder / "zero3" / "config.yaml")  # last: transformers then believes in ZeRO-3 for good


def finish_lora(folder):
    """A LoRA run to its end, reported to wandb without an account."""
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    plan = prepare(load_config(str(folder / "lora" / "config.yaml")))
    session.train(plan, *session.build(plan))


def spoiled(folder):
    """What a step with a loss that is not finite leaves of the weights: the first step, in which every row takes part.

    DeepSpeed leaves out an update whose gradients are not finite; gradients as ever would reach the optimizer.
    """
    found = []
    for gradients_too in (True, False):
        trainer, _ = session.build(prepare(load_config(str(folder / "spoiled" / "config.yaml"))))
        trainer.objective = SpoiledObjective(trainer.objective, "row-5", gradients_too)
        before, said = {name: value.clone() for name, value in trainer.model.state_dict().items()}, "nothing"
        try:
            trainer.train()
        except NonFiniteLoss as error:
            said = str(error)
        after = trainer.model.state_dict()
        found.append({"said": said, "equal": all(torch.equal(after[name], value) for name, value in before.items())})
    (folder / f"spoiled-{trainer.args.process_index}.json").write_text(json.dumps(found))


def check_overfitting(folder):
    """The gate with the right layout, and with labels one token further than decoding reads them."""
    said, results, labels = io.StringIO(), [], batches.block_labels
    overfit.STEPS = 50
    for shift in (0, 1):
        batches.block_labels = lambda sample, *options, by=shift: labels(
            replace(sample, anchors_N=sample.anchors_N + by), *options
        )
        with contextlib.redirect_stdout(said):
            code = train_drafter.main([str(folder / "overfit" / "config.yaml"), "--overfit_check"])
        log = json.loads((folder / "overfit" / "run" / overfit.LOG).read_text())
        results.append({"code": code, "said": said.getvalue(), **log})
    (folder / "overfit.json").write_text(json.dumps(results))


def small_updates(folder):
    """bf16 weights before and after 100 steps of a learning rate that none of them could take alone."""
    plan = prepare(load_config(str(folder / "bf16" / "config.yaml")))
    trainer, _ = session.build(plan)
    before = trainer.model.fc.weight.detach().clone()
    trainer.train()
    after = trainer.model.fc.weight.detach()
    if trainer.args.process_index == 0:
        torch.save({"before": before.bfloat16(), "after": after}, folder / "bf16.pt")


def accumulated(folder):
    """What a step of the same rows gives in one piece and in four, in bf16, by ZeRO stage."""
    found = {}
    for name in ("whole", "parts", "parts-zero3"):  # ZeRO-3 last: transformers then believes in it for good
        trainer = run(folder / name / "config.yaml")
        found[name] = {key: [line[key] for line in trainer.state.log_history if key in line] for key in
                       ("loss", "grad_norm")}  # fmt: skip
        found[name]["kept"] = str(trainer.model_wrapped.optimizer.gradient_accumulation_dtype)
    (folder / "accumulated.json").write_text(json.dumps(found))


def resumed(folder):
    trainer = run(folder / "split" / "config.yaml")
    torch.save(states(trainer), folder / f"resumed-{trainer.args.process_index}.pt")
    for name in ("mixed", *PARTLY):
        trainer = run(folder / f"{name}-split" / "config.yaml")
        torch.save(states(trainer), folder / f"{name}-resumed-{trainer.args.process_index}.pt")


def long_run(folder):
    """Steps beyond 256, at which a counter kept in bf16 would stop."""
    steps = Steps()
    trainer = run(folder / "long" / "config.yaml", watch=steps)
    counts = [int(s["step"]) for s in trainer.model_wrapped.optimizer.optimizer.state.values()]
    (folder / "long.json").write_text(json.dumps({"made": steps.made, "counts": counts}))


def pause_in_save(folder):
    """Stops for good in the middle of the second save, after the weights and before the state; to be killed."""
    from training.trainer import DrafterTrainer

    save = DrafterTrainer._save_rng_state

    def slow(self, output_dir):
        if self.state.global_step >= 4:
            (folder / f"paused-{self.args.process_index}").write_text(output_dir)
            time.sleep(600)
        save(self, output_dir)

    DrafterTrainer._save_rng_state = slow
    run(folder / "killed" / "config.yaml")


if __name__ == "__main__":
    _single_process_defaults()
    {f.__name__: f for f in (straight, resumed, long_run, pause_in_save, check_overfitting, accumulated)}[sys.argv[1]](
        Path(sys.argv[2])
    )
