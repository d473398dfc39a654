"""The drafter's trainer: transformers.Trainer over DeepSpeed, with the target outside the trained module.

Shape suffixes: V vocabulary.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, SaveStrategy, rotate_checkpoints

from data.batches import Batch, Sample, collate
from data.settings import RunConfig
from models.checkpoint import save_draft_ids
from models.target import Target
from training.adapters import full_weights, lora_layers, save_adapter
from training.agreement import label_agreement
from training.checkpoints import PROVENANCE, UNFINISHED, point_to_best, publish, saving, write_json
from training.evaluation import TrainingEvaluation
from training.forward import block_loss
from training.metrics import Window
from training.objective import Objective, Terms, batch_gamma, curriculum
from training.order import shuffled_in_place

# Rows that are looked at in turn lie apart: neighbours often come from one source.
_SPREAD = 1_000_003


class NonFiniteLoss(ArithmeticError):
    """The loss was infinite or NaN; nothing was updated."""


class DrafterTrainer(Trainer):
    """Trains a `DFlashDraftModel`; see transformers.Trainer for everything that is not overridden here.

    Args:
        target: frozen target; embeds the blocks, scores the slots and, without stored features, gives the taps.
        draft_ids: draft vocabulary, or None.
        config: our options (loss, lambda, chunk).
        evaluation: decodes held-out prompts when eval_strategy asks for it; None never.
    """

    def __init__(
        self,
        *,
        target: Target,
        draft_ids: Tensor | None,
        config: RunConfig,
        evaluation: TrainingEvaluation | None = None,
        **kwargs,
    ):
        model = kwargs["model"]
        self.target, self.draft_ids, self.config, self.evaluation = target, draft_ids, config, evaluation
        draft_V = None
        if draft_ids is not None:
            draft_V = torch.zeros(target.vocab_size, dtype=torch.bool)
            draft_V[draft_ids] = True
        options = dict(spec=model.spec, gamma=batch_gamma(config), draft_V=draft_V, teacher=config.needs_teacher)
        kwargs["data_collator"] = functools.partial(_collate, **options, **kwargs["train_dataset"].collate_options())
        super().__init__(eval_dataset=None if evaluation is None else evaluation.prompts, **kwargs)
        # The loss is already divided by the weight of the whole step; the trainer must not divide it again.
        self.loss_is_scaled_for_ga = True
        device_ids = None if draft_ids is None else draft_ids.to(target.device)
        self.objective = Objective(target, device_ids, config.loss_chunk, Terms.of(config))
        self.window = Window()
        self._finite: list[tuple[list[str], Tensor]] = []
        self.provenance: dict = {}  # what each checkpoint says about its origin
        self._staging = False

    # ---- loss ----
    def lambda_now(self) -> float:
        """Share of the base loss (`training.objective.curriculum`).

        Zero on a frozen backbone, which the base loss cannot change.
        """
        if self.config.trainable == "head":
            return 0.0
        return curriculum(self.config, self.state.global_step / max(1, self.state.max_steps - 1))

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor:
        """Weight sum of the whole optimizer step: all accumulation steps of all ranks."""
        weight = sum(batch["weights_RNT"].sum(dtype=torch.float64) for batch in batch_samples)
        return self.accelerator.reduce(weight.to(device), "sum")

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Loss of a micro-batch, scaled so that the average over ranks and the sum over micro-batches is the ratio
        sum(numerators) / sum(weights) of the step."""
        batch = Batch(**inputs)
        sums = block_loss(model, self.model, self.objective, batch, self.lambda_now(), self.train_dataset.source)
        self._finite.append((batch.ids, torch.isfinite(sums.numerator.detach())))
        self.window.add(sums.statistics_KT, batch)
        weight = num_items_in_batch.clamp(min=1e-6).to(sums.numerator.dtype)
        # DeepSpeed and DDP average gradients over ranks, hence the factor.
        return sums.numerator * (self.accelerator.num_processes / weight)

    def _stop_if_not_finite(self) -> None:
        """Stops before the update if any micro-batch of the step, on any rank, has a non-finite loss.

        Reading the flags waits for the device, so that it is left to the end of the step, where the gradient norm is
        read anyway.
        """
        if not self._finite:
            return
        bad_flags = torch.stack([~flag for _, flag in self._finite])
        if self.accelerator.reduce(bad_flags.sum(), "sum") > 0:
            bad = [row for ids, flag in self._finite if not flag for row in ids]
            raise NonFiniteLoss(
                f"the loss is not finite at step {self.state.global_step + 1}; nothing was updated; "
                f"rows of the micro-batch: {', '.join(sorted(set(gather_objects(bad))))}"
            )
        self._finite = []

    def _get_grad_norm(self, model, grad_norm=None):
        # DeepSpeed leaves an update out by itself when gradients are not finite: no optimizer is called then.
        self._stop_if_not_finite()
        return super()._get_grad_norm(model, grad_norm)

    # ---- data ----
    def get_train_dataloader(self):
        return shuffled_in_place(super().get_train_dataloader())

    def _prepare_inputs(self, inputs: dict) -> dict:
        """To this rank's device as they are: under bf16 transformers would round the slot weights too (TRAPS 26)."""
        to = dict(device=self.args.device, non_blocking=True)
        return {name: value.to(**to) if isinstance(value, Tensor) else value for name, value in inputs.items()}

    def _run_epoch(self, *args, epoch: int, **kwargs):
        # Set here and not through the data loader: accelerate forwards set_epoch to the data set on one rank only.
        self.train_dataset.set_epoch(epoch)
        # Resumed at the very end (a kill between the last checkpoint and the export): nothing is left to train.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        # The last moment before weights change, whoever calls the optimizer: DeepSpeed does inside the backward pass.
        guard = register_optimizer_step_pre_hook(lambda *_: self._stop_if_not_finite())
        try:
            super()._run_epoch(*args, epoch=epoch, **kwargs)
        finally:
            guard.remove()

    def get_batch_samples(self, *args, **kwargs):
        with self.window.timed("loading"):
            return super().get_batch_samples(*args, **kwargs)

    def _finalize_training(self, *args):
        # With save_total_limit 1 transformers would now delete the last checkpoint in favour of the best: both stay.
        best, self.state.best_model_checkpoint = self.state.best_model_checkpoint, None
        output = super()._finalize_training(*args)
        self.state.best_model_checkpoint = best
        return output

    def floating_point_ops(self, inputs) -> int:
        return 0  # transformers' estimate counts input ids, which this model does not have

    # ---- logs and evaluation ----
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds the figures of the logging window, over all ranks."""
        if "loss" in logs and self.window.sums_KT is not None:
            logs.update(self.window.figures(self._sum_over_ranks), distill_lambda=self.lambda_now())
            self.window = Window()
            self._add_agreement(logs)
        super().log(logs, start_time)

    def _add_agreement(self, logs: dict[str, float]) -> None:
        """Where the loss has no distribution of the target: how far one row's labels are the target's own, another row
        at each log line. Only the rank that writes the log asks, and only a target whose layers are in memory."""
        if "agreement" not in logs and self.is_world_process_zero() and not self.target.streams:
            with self.window.timed("away"):
                row = self.state.global_step * _SPREAD
                logs["agreement"] = label_agreement(self.target, self.train_dataset, 1, row)

    def _sum_over_ranks(self, tensor: Tensor) -> Tensor:
        return self.accelerator.reduce(tensor, "sum")

    def evaluate(self, eval_dataset=None, ignore_keys=None, metric_key_prefix: str = "eval") -> dict[str, float]:
        """Decodes the held-out prompts; called by transformers on all ranks when an evaluation is due."""
        with self.window.timed("away"):
            figures = self.evaluation(self.model, self.draft_ids, self.state.global_step, gather_objects)
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in figures.items()}
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return metrics

    def _determine_best_metric(self, metrics, trial) -> bool:
        """A new best is saved at once, whatever `save_steps` says: weights that are gone cannot be kept."""
        is_new = super()._determine_best_metric(metrics, trial)
        if is_new and self.args.save_strategy != SaveStrategy.NO:
            self.control.should_save = True
        return is_new

    # ---- checkpoints ----
    def _get_output_dir(self, trial) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, UNFINISHED) if self._staging else folder

    def _save_checkpoint(self, model, trial) -> None:
        """Writes into an unfinished folder and renames it, so that a kill at any time leaves whole checkpoints only."""
        with self.window.timed("away"), saving(self.args.output_dir, self.state.global_step):
            self.train_dataset.source.flush()
            self._staging = True
            super()._save_checkpoint(model, trial)
            self._staging = False
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                self._publish(self._get_output_dir(trial))
            self.accelerator.wait_for_everyone()

    def _publish(self, folder: str) -> None:
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        staged = os.path.join(folder, UNFINISHED, name)
        best = self.state.best_global_step and os.path.join(
            folder, f"{PREFIX_CHECKPOINT_DIR}-{self.state.best_global_step}"
        )
        if best:
            # transformers wrote the path as it was before the rename.
            self.state.best_model_checkpoint = best
            self.state.save_to_json(os.path.join(staged, TRAINER_STATE_NAME))
        write_json(os.path.join(staged, PROVENANCE), self.provenance | {"step": self.state.global_step})
        publish(staged, os.path.join(folder, name))
        if best:
            point_to_best(folder, best)
        rotate_checkpoints(folder, self.args.save_total_limit, best)

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        """Weights, config and draft vocabulary, as `models.checkpoint.load_drafter` reads them, and the adapter alone
        when LoRA is trained; no pickle."""
        if self.args.should_save:
            state = self.model.state_dict() if state_dict is None else state_dict
            self.model.save_pretrained(output_dir, state_dict=full_weights(self.model, state))
            if lora_layers(self.model):
                save_adapter(self.model, state, output_dir)
            if self.draft_ids is not None:
                save_draft_ids(output_dir, self.draft_ids)


def _collate(samples: list[Sample], spec, gamma: float, draft_V: Tensor | None, **options) -> dict:
    # The trainer moves mappings between devices, so the dataclass is unpacked here and packed again in the loss.
    batch = collate(samples, spec.block_size, spec.num_proposals, spec.mask_token_id, gamma, draft_V, **options)
    return {name: value for name, value in vars(batch).items() if value is not None}


def gather_objects(items: list[str]) -> list[str]:
    if not torch.distributed.is_initialized():
        return items
    parts: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, items)
    return [item for part in parts for item in part]
