"""A checked plan becomes a trained drafter: process group, model, trainer, finished folder with its provenance."""

from __future__ import annotations

import os
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import PrinterCallback, TrainingArguments
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from data.chat import ChatFormat, template_fingerprint
from data.disk import written
from eval.environment import git_commit, git_diff, hardware, versions
from models.checkpoint import DRAFT_VOCABULARY
from models.drafter import DFlashDraftModel
from models.formats.folder import WEIGHTS
from training import adapters
from training.checkpoints import PROVENANCE, RUN_FILE, UNFINISHED, publish, write_json
from training.evaluation import EvaluateAtEnd, TrainingEvaluation
from training.initialise import initialise_from_target, zero_correction
from training.metrics import peak_memory
from training.operators import drop_stale_lock
from training.plan import TrainingPlan, sample_tokens
from training.progress import Progress
from training.tracking import Tracking, prepare_wandb
from training.trainer import DrafterTrainer
from training.warm_start import start_from


def build(plan: TrainingPlan) -> tuple[DrafterTrainer, Progress]:
    """Starts the process group (transformers does so when TrainingArguments are built) and makes model and trainer.

    Raises ValueError for options that do not fit together.
    """
    drop_stale_lock()
    arguments = TrainingArguments(**vars(plan.arguments))
    first = arguments.process_index == 0
    model = build_model(plan, fresh=plan.resume is None)
    evaluation = build_evaluation(plan, arguments, model)
    progress = Progress(plan.config.path("train_log.jsonl"), plan.spec.num_proposals, first)
    callbacks = [progress, EvaluateAtEnd()]
    if "wandb" in arguments.report_to:
        prepare_wandb(plan.config)
        # transformers' own callback would end the run where wandb cannot be reached.
        arguments.report_to = [name for name in arguments.report_to if name != "wandb"]
        callbacks.append(Tracking(described(plan), evaluation))
    adapters.choose_trainable(model, plan.config)
    declare_head(model)
    trainer = DrafterTrainer(
        model=model,
        args=arguments,
        train_dataset=plan.data,
        target=plan.target,
        draft_ids=plan.draft_ids,
        config=plan.config,
        evaluation=evaluation,
        callbacks=callbacks,
    )
    trainer.provenance = described(plan)
    trainer.remove_callback(PrinterCallback)  # the bar and the log file show the same
    if first:
        folder = Path(arguments.output_dir)
        shutil.rmtree(folder / UNFINISHED, ignore_errors=True)  # what a killed save left
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / RUN_FILE, {"semantic": plan.semantic, "operational": plan.operational})
    trainer.accelerator.wait_for_everyone()
    return trainer, progress


def build_model(plan: TrainingPlan, fresh: bool) -> DFlashDraftModel:
    """The drafter at its start: from a checkpoint, from the target, or random.

    Args:
        fresh: False when a resume replaces the weights that are trained.
    """
    torch.manual_seed(plan.config.seed)
    model = DFlashDraftModel(plan.drafter_config)
    if fresh:
        warm_head = False
        if plan.start is not None:
            warm_head = start_from(model, plan.start, plan.draft_ids)
        elif plan.config.init_from_target:
            initialise_from_target(model, plan.target, sample_tokens(plan.data, plan.target.device))
        if not warm_head:
            zero_correction(model)
    elif plan.config.trainable != "all":
        # A checkpoint in DeepSpeed's universal form brings what is trained and nothing else.
        adapters.copy_backbone(model, plan.start.model)
    return model


def declare_head(model: DFlashDraftModel) -> None:
    """Tells ZeRO-3 that the drafter's own forward uses the heads' weights: the loss reads them outside their modules,
    where nothing would gather them."""
    if is_deepspeed_zero3_enabled():
        import deepspeed

        heads = adapters.head_names(model)
        for name, parameter in model.named_parameters():
            if name in heads:
                deepspeed.zero.register_external_parameter(model, parameter)


def build_evaluation(
    plan: TrainingPlan, arguments: TrainingArguments, model: DFlashDraftModel
) -> TrainingEvaluation | None:
    """Raises ValueError for prompts that cannot be decoded and for a metric that no evaluation gives."""
    if arguments.eval_strategy == "no":
        return None
    evaluation = TrainingEvaluation(plan.config, plan.target, model, arguments.process_index, arguments.world_size)
    if arguments.metric_for_best_model.removeprefix("eval_") not in evaluation.metric_names:
        raise ValueError(
            f"metric_for_best_model must be one of {', '.join(evaluation.metric_names)}, "
            f"got {arguments.metric_for_best_model!r}"
        )
    return evaluation


def train(plan: TrainingPlan, trainer: DrafterTrainer, progress: Progress) -> None:
    """Trains to the end and writes RUN/drafter. Raises NonFiniteLoss, StageError."""
    trainer.train(resume_from_checkpoint=plan.resume)
    finish(plan, trainer, progress)


def finish(plan: TrainingPlan, trainer: DrafterTrainer, progress: Progress) -> None:
    """Writes RUN/drafter beside its name and renames it: the last weights, or those of the best evaluation.

    Raises StageError when the disk refuses it.
    """
    final = plan.config.path("drafter")
    best = kept_checkpoint(plan, trainer)
    partial = f"{final}.partial"
    with written(f"the finished drafter {final}", partial):
        if best is None:
            trainer.save_model(partial)
        elif trainer.args.should_save:
            copy_drafter(best, partial)
        trainer.accelerator.wait_for_everyone()
        if trainer.args.should_save:
            write_json(f"{partial}/{PROVENANCE}", provenance(plan, trainer, progress))
            publish(partial, final)
    if trainer.args.should_save:
        which = f" (the weights of step {trainer.state.best_global_step}, the best)" if best else ""
        print(f"train: {trainer.state.global_step} steps in {progress.seconds:.0f} s, drafter in {final}{which}")
    trainer.accelerator.wait_for_everyone()


def kept_checkpoint(plan: TrainingPlan, trainer: DrafterTrainer) -> str | None:
    """The best checkpoint where `keep` asks for it and it is not the last step anyway."""
    best, folder = trainer.state.best_global_step, Path(trainer.args.output_dir)
    if plan.config.keep == "last" or best in (None, trainer.state.global_step):
        return None
    path = folder / f"{PREFIX_CHECKPOINT_DIR}-{best}"
    return str(path) if path.is_dir() else None


def copy_drafter(checkpoint: str, folder: str) -> None:
    """The part of a checkpoint that is a drafter: weights, config, draft vocabulary and adapter."""
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    for name in ("config.json", WEIGHTS, DRAFT_VOCABULARY):
        if os.path.isfile(os.path.join(checkpoint, name)):
            shutil.copy2(os.path.join(checkpoint, name), folder)
    if os.path.isdir(os.path.join(checkpoint, adapters.FOLDER)):
        shutil.copytree(os.path.join(checkpoint, adapters.FOLDER), os.path.join(folder, adapters.FOLDER))


def provenance(plan: TrainingPlan, trainer: DrafterTrainer, progress: Progress) -> dict:
    """Where these weights come from: options, code, libraries, machine, engine, and how training ended."""
    engine = trainer.model_wrapped
    best = trainer.state.best_global_step
    return {
        **described(plan),
        "hardware": hardware(),
        "world_size": trainer.args.world_size,
        "engine": type(engine).__name__,
        "zero_stage": engine.zero_optimization_stage(),
        "dtype": str(next(engine.parameters()).dtype).removeprefix("torch."),
        "steps": trainer.state.global_step,
        "train_seconds": round(progress.seconds, 1),
        "peak": peak_memory(),
        "rows": len(plan.data),
        "skipped_rows": plan.data.skipped,
        "draft_vocabulary_coverage": plan.coverage,
        "label_agreement": plan.agreement,
        "metrics": progress.last,
        "evaluation": progress.evaluated,
        "best": best and {"step": best, trainer.args.metric_for_best_model: trainer.state.best_metric},
        "kept_step": best if kept_checkpoint(plan, trainer) else trainer.state.global_step,
    }


def chat_format(plan: TrainingPlan) -> dict:
    """How the answers were asked for, which the rows' manifest was checked to say too: decoding must ask likewise."""
    form, tokenizer = ChatFormat.of(plan.config), plan.target.tokenizer
    template = template_fingerprint(tokenizer, form) if getattr(tokenizer, "chat_template", None) else None
    return {**form.recorded, "template": template}


def described(plan: TrainingPlan) -> dict:
    """The resolved run and the code that runs it."""
    return {
        "config": asdict(plan.config),
        "chat_format": chat_format(plan),
        "semantic": plan.semantic,
        "operational": plan.operational,
        "spec": asdict(plan.spec),
        "git_commit": git_commit(),
        "git_diff": git_diff(),
        "versions": versions(),
    }
