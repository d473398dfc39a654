"""The drafter's trainer: transformers.Trainer over DeepSpeed, with the target outside the trained module.

Shape suffixes: K statistics, T depths, V vocabulary.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor
from transformers import Trainer
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints

from data.batches import Batch, Sample, collate
from data.settings import RunConfig
from models.checkpoint import save_draft_ids
from models.target import Target
from training.checkpoints import UNFINISHED, publish
from training.forward import block_loss
from training.objective import STATISTICS, LossSums, Objective


class NonFiniteLoss(ArithmeticError):
    """The loss was infinite or NaN; nothing was updated."""


class DrafterTrainer(Trainer):
    """Trains a `DFlashDraftModel`; see transformers.Trainer for everything that is not overridden here.

    Args:
        target: frozen target; embeds the blocks, scores the slots and, without stored features, gives the taps.
        draft_ids: draft vocabulary, or None.
        config: our options (loss, lambda, chunk).
    """

    def __init__(self, *, target: Target, draft_ids: Tensor | None, config: RunConfig, **kwargs):
        model = kwargs["model"]
        self.target, self.draft_ids, self.config = target, draft_ids, config
        draft_V = None
        if draft_ids is not None:
            draft_V = torch.zeros(target.vocab_size, dtype=torch.bool)
            draft_V[draft_ids] = True
        kwargs["data_collator"] = functools.partial(_collate, spec=model.spec, gamma=config.loss_gamma, draft_V=draft_V)
        super().__init__(**kwargs)
        # The loss is already divided by the weight of the whole step; the trainer must not divide it again.
        self.loss_is_scaled_for_ga = True
        device_ids = None if draft_ids is None else draft_ids.to(target.device)
        self.objective = Objective(target, device_ids, config.loss_chunk)
        self._statistics_KT: Tensor | None = None
        self._finite: list[tuple[list[str], Tensor]] = []
        self._staging = False

    # ---- loss ----
    def lambda_now(self) -> float:
        """Share of the base loss: linear from `lambda_start` at the first step to `lambda_end` at the last."""
        progress = self.state.global_step / max(1, self.state.max_steps - 1)
        return self.config.lambda_start + (self.config.lambda_end - self.config.lambda_start) * min(1.0, progress)

    def _get_num_items_in_batch(self, batch_samples: list, device: torch.device) -> Tensor:
        """Weight sum of the whole optimizer step: all accumulation steps of all ranks."""
        weight = sum(batch["weights_RNT"].sum(dtype=torch.float64) for batch in batch_samples)
        return self.accelerator.reduce(weight.to(device), "sum")

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """Loss of a micro-batch, scaled so that the average over ranks and the sum over micro-batches is the ratio
        sum(numerators) / sum(weights) of the step."""
        batch = Batch(**inputs)
        sums = block_loss(model, self.model, self.objective, batch, self.lambda_now())
        self._check_finite(sums, batch.ids)
        statistics_KT = sums.statistics_KT
        self._statistics_KT = statistics_KT if self._statistics_KT is None else self._statistics_KT + statistics_KT
        weight = num_items_in_batch.clamp(min=1e-6).to(sums.numerator.dtype)
        # DeepSpeed and DDP average gradients over ranks, hence the factor.
        return sums.numerator * (self.accelerator.num_processes / weight)

    def _check_finite(self, sums: LossSums, ids: list[str]) -> None:
        """Stops before the update if any micro-batch of the step, on any rank, has a non-finite loss.

        Looked at once a step, before the last backward, because reading the flag waits for the device.
        """
        self._finite.append((ids, torch.isfinite(sums.numerator.detach())))
        if not self.accelerator.gradient_state.sync_gradients:
            return
        bad_flags = torch.stack([~flag for _, flag in self._finite])
        if self.accelerator.reduce(bad_flags.sum(), "sum") > 0:
            bad = [row for ids, flag in self._finite if not flag for row in ids]
            raise NonFiniteLoss(
                f"the loss is not finite at step {self.state.global_step + 1}; nothing was updated; "
                f"rows of the micro-batch: {', '.join(sorted(set(_gather_objects(bad))))}"
            )
        self._finite = []

    # ---- data ----
    def _run_epoch(self, *args, epoch: int, **kwargs):
        # Set here and not through the data loader: accelerate forwards set_epoch to the data set on one rank only.
        self.train_dataset.set_epoch(epoch)
        # Resumed at the very end (a kill between the last checkpoint and the export): nothing is left to train.
        if self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        super()._run_epoch(*args, epoch=epoch, **kwargs)

    def floating_point_ops(self, inputs) -> int:
        return 0  # transformers' estimate counts input ids, which this model does not have

    # ---- logs ----
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Adds losses and accuracies of the logging window, over all ranks."""
        if "loss" in logs and self._statistics_KT is not None:
            sums_KT = self.accelerator.reduce(self._statistics_KT.double(), "sum").cpu()
            self._statistics_KT = None
            logs.update(summarise(sums_KT), distill_lambda=self.lambda_now())
        super().log(logs, start_time)

    # ---- checkpoints ----
    def _get_output_dir(self, trial) -> str:
        folder = super()._get_output_dir(trial)
        return os.path.join(folder, UNFINISHED) if self._staging else folder

    def _save_checkpoint(self, model, trial) -> None:
        """Writes into an unfinished folder and renames it, so that a kill at any time leaves whole checkpoints only."""
        self._staging = True
        super()._save_checkpoint(model, trial)
        self._staging = False
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            folder = self._get_output_dir(trial)
            publish(os.path.join(folder, UNFINISHED, name), os.path.join(folder, name))
            rotate_checkpoints(output_dir=folder, save_total_limit=self.args.save_total_limit)
        self.accelerator.wait_for_everyone()

    def _save(self, output_dir: str | None = None, state_dict=None) -> None:
        """Weights, config and draft vocabulary, as `models.checkpoint.load_drafter` reads them; no pickle."""
        if self.args.should_save:
            self.model.save_pretrained(output_dir, state_dict=state_dict)
            if self.draft_ids is not None:
                save_draft_ids(output_dir, self.draft_ids)


def _collate(samples: list[Sample], spec, gamma: float, draft_V: Tensor | None) -> dict:
    # The trainer moves mappings between devices, so the dataclass is unpacked here and packed again in the loss.
    batch = collate(samples, spec.block_size, spec.num_proposals, spec.mask_token_id, gamma, draft_V)
    return {name: value for name, value in vars(batch).items() if value is not None}


def _gather_objects(items: list[str]) -> list[str]:
    if not torch.distributed.is_initialized():
        return items
    parts: list = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(parts, items)
    return [item for part in parts for item in part]


def summarise(sums_KT: Tensor) -> dict[str, float]:
    """Named figures from summed statistics: weighted losses, and accuracy of base and final logits by depth."""
    sums = dict(zip(STATISTICS, sums_KT, strict=True))
    weight, count = sums["weight"].sum().clamp(min=1e-9), sums["count"].sum().clamp(min=1)
    figures = {
        "base_loss": (sums["base_loss"].sum() / weight).item(),
        "final_loss": (sums["final_loss"].sum() / weight).item(),
        "base_accuracy": (sums["base_hits"].sum() / count).item(),
        "accuracy": (sums["final_hits"].sum() / count).item(),
    }
    by_depth_T = sums["final_hits"] / sums["count"].clamp(min=1)
    return figures | {f"accuracy_{depth}": value for depth, value in enumerate(by_depth_T.tolist(), start=1)}
