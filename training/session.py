"""A checked plan becomes a trained drafter: process group, model, trainer, finished folder with its provenance."""

from __future__ import annotations

import resource
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PrinterCallback, TrainingArguments

from eval.environment import git_commit, hardware, versions
from models.drafter import DFlashDraftModel
from training.checkpoints import PROVENANCE, RUN_FILE, UNFINISHED, publish, write_json
from training.initialise import initialise_from_target, zero_correction
from training.plan import TrainingPlan, sample_tokens
from training.progress import Progress
from training.trainer import DrafterTrainer


def build(plan: TrainingPlan) -> tuple[DrafterTrainer, Progress]:
    """Starts the process group (transformers does so when TrainingArguments are built) and makes model and trainer.

    Raises ValueError for options that do not fit together.
    """
    arguments = TrainingArguments(**vars(plan.arguments))
    first = arguments.process_index == 0
    torch.manual_seed(plan.config.seed)
    model = DFlashDraftModel(plan.drafter_config)
    if plan.resume is None:
        if plan.config.init_from_target:
            initialise_from_target(model, plan.target, sample_tokens(plan.data, plan.target.device))
        zero_correction(model)
    progress = Progress(plan.config.path("train_log.jsonl"), plan.spec.num_proposals, first)
    trainer = DrafterTrainer(
        model=model,
        args=arguments,
        train_dataset=plan.data,
        target=plan.target,
        draft_ids=plan.draft_ids,
        config=plan.config,
        callbacks=[progress],
    )
    trainer.remove_callback(PrinterCallback)  # the bar and the log file show the same
    if first:
        folder = Path(arguments.output_dir)
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)  # what a killed save left
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RUN_FILE, plan.semantic)
    trainer.accelerator.wait_for_everyone()
    return trainer, progress


def train(plan: TrainingPlan, trainer: DrafterTrainer, progress: Progress) -> None:
    """Trains to the end and writes RUN/drafter. Raises NonFiniteLoss."""
    trainer.train(resume_from_checkpoint=plan.resume)
    finish(plan, trainer, progress)


def finish(plan: TrainingPlan, trainer: DrafterTrainer, progress: Progress) -> None:
    """Writes RUN/drafter beside its name and renames it."""
    final = plan.config.path("drafter")
    trainer.save_model(f"{final}.partial")
    trainer.accelerator.wait_for_everyone()
    if trainer.args.should_save:
        write_json(f"{final}.partial/{PROVENANCE}", provenance(plan, trainer, progress))
        publish(f"{final}.partial", final)
        print(f"train: {trainer.state.global_step} steps in {progress.seconds:.0f} s, drafter in {final}")
    trainer.accelerator.wait_for_everyone()


def provenance(plan: TrainingPlan, trainer: DrafterTrainer, progress: Progress) -> dict:
    """Where these weights come from: options, code, libraries, machine, engine, and how training ended."""
    engine = trainer.model_wrapped
    peak = {"memory_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2)}
    if torch.cuda.is_available():
        peak["gpu_memory_gb"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return {
        "config": asdict(plan.config),
        "semantic": plan.semantic,
        "spec": asdict(plan.spec),
        "git_commit": git_commit(),
        "versions": versions(),
        "hardware": hardware(),
        "world_size": trainer.args.world_size,
        "engine": type(engine).__name__,
        "zero_stage": engine.zero_optimization_stage(),
        "dtype": str(next(engine.parameters()).dtype).removeprefix("torch."),
        "steps": trainer.state.global_step,
        "train_seconds": round(progress.seconds, 1),
        "peak": peak,
        "rows": len(plan.data),
        "skipped_rows": plan.data.skipped,
        "draft_vocabulary_coverage": plan.coverage,
        "label_agreement": plan.agreement,
        "metrics": progress.last,
    }
