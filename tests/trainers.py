"""Trainers of tiny drafters in one process, without DeepSpeed, for tests."""

from __future__ import annotations

import torch
from transformers import PrinterCallback, TrainingArguments

from data.settings import RunConfig
from models.configuration import DrafterSpec, build_drafter_config
from models.drafter import DFlashDraftModel
from tiny import MASK, tiny_target
from training.attention import dense_mask
from training.evaluation import EvaluateAtEnd
from training.progress import Progress
from training.rows import TrainingRows
from training.trainer import DrafterTrainer
from training_runs import answer_rows


def make_trainer(
    folder, rows=16, shifted=False, draft_ids=None, target=None, options=None, evaluation=None, head=None, **arguments
):
    """A trainer over counting rows. `options` are ours, `arguments` those of TrainingArguments, `evaluation` makes what
    decodes while training from (config, target, model), `head` overrides fields of the DrafterSpec."""
    options = {"loss_chunk": 64, "lambda_end": 0.3, **(options or {})}
    target = target or tiny_target()
    fields = dict(
        block_size=4,
        mask_token_id=MASK,
        target_layer_ids=(0, 2),
        num_target_layers=target.num_layers,
        shift_label=shifted,
        head_rank=8,
        gru_hidden_dim=16,
        draft_vocab_size=None if draft_ids is None else len(draft_ids),
    )
    spec = DrafterSpec(**{**fields, **(head or {})})
    torch.manual_seed(0)
    model = DFlashDraftModel(build_drafter_config(target.config, spec, 2))
    config = RunConfig(run_dir=str(folder), **options)
    values = dict(
        output_dir=str(folder / "checkpoints"),
        use_cpu=True,
        remove_unused_columns=False,
        report_to="none",
        disable_tqdm=True,
        logging_steps=1,
        save_strategy="no",
        per_device_train_batch_size=4,
        learning_rate=3e-3,
        max_steps=10,
        logging_nan_inf_filter=False,
    )
    progress = Progress(str(folder / "log.jsonl"), spec.num_proposals, first_rank=True)
    trainer = DrafterTrainer(
        model=model,
        args=TrainingArguments(**{**values, **arguments}),
        train_dataset=TrainingRows(answer_rows(rows), 64, 6, seed=0),
        target=target,
        draft_ids=draft_ids,
        config=config,
        evaluation=evaluation and evaluation(config, target, model),
        callbacks=[progress, EvaluateAtEnd()],
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


class SpoiledObjective:
    """Calls another objective and makes its numerator NaN, or infinite with gradients as they are, for one row."""

    def __init__(self, objective, row, gradients_too):
        self.objective, self.row, self.target, self.gradients_too = objective, row, objective.target, gradients_too

    def __call__(self, model, batch, lam, hidden):
        sums = self.objective(model, batch, lam, hidden)
        if self.row in batch.ids:
            sums.numerator = sums.numerator * float("nan") if self.gradients_too else sums.numerator + float("inf")
        return sums


def block_hidden(target, model, batch):
    """The backbone's output [R, N*B, D] at all slots of a batch, as the training forward computes it."""
    context = batch.tokens_RS.shape[1]
    return model(
        noise_embeds=target.embed(batch.block_ids_RNB.flatten(1)),
        context_hidden_states=batch.taps_RSC,
        attention_mask=dense_mask(batch.anchors_RN, batch.starts_RN, context, model.spec.block_size),
        position_ids=batch.position_ids_RP,
    ).last_hidden_state


def logged(trainer, key="loss"):
    return [line[key] for line in trainer.state.log_history if key in line]
