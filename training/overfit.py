"""`--overfit_check`: can this setting learn one answer by heart, so that *decoding* accepts whole blocks?

Labels off by one, a mask or a position that differs between training and decoding: the loss falls all the same, and
acceptance stays near zero (TRAPS 1-8, 32). One sample shows it within minutes, before days are spent. Everything is
the run's own: trainer, engine, batches, loss, and the evaluation's loop with the real target.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from dataclasses import asdict, dataclass, replace

from transformers import TrainerCallback

from data.answers import AnswerRow
from eval.decoding.loop import Answer, Request, generate
from eval.decoding.proposals import NoProposer
from eval.session import Session
from training.checkpoints import write_json
from training.evaluation import decoded_methods, decoding_copy
from training.plan import TrainingPlan
from training.rows import TrainingRows
from training.session import build
from training.trainer import DrafterTrainer, gather_objects

SECONDS, STEPS, STEPS_BETWEEN = 240.0, 1000, 25  # limits of the training, and how often decoding is looked at
TOKENS, CANDIDATES = 48, 8  # of the answer; and rows among which the sample is looked for
SHARE = 0.9  # of the proposals in rounds that the answer's end does not cut
LAMBDA = 0.5  # base and corrected logits are learned alike, so that every chain can be looked at
LOG = "overfit_check.json"


@dataclass
class Look:
    """What decoding says at one step: mean accepted tokens of a whole round, by method (`accepted_in_whole_rounds`)."""

    step: int
    accepted: dict[str, float | None]

    @property
    def least(self) -> float:
        """Of the methods that could be judged; 0 without one."""
        return min((value for value in self.accepted.values() if value is not None), default=0.0)


class LookAtDecoding(TrainerCallback):
    """Decodes the sample every few steps, and stops when whole blocks are accepted or time is up."""

    def __init__(self, plan: TrainingPlan, row: AnswerRow):
        self.plan, self.row, self.looks, self.started = plan, row, [], time.monotonic()
        self.methods = decoded_methods(plan.spec.head_type)
        self.trainer: DrafterTrainer | None = None

    @property
    def passed(self) -> bool:
        return bool(self.looks) and self.looks[-1].least >= SHARE * self.plan.spec.num_proposals

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step % STEPS_BETWEEN:
            return
        drafter = decoding_copy(self.trainer.model, self.plan.draft_ids, self.plan.target)
        # No confidence cuts a chain that was learned to its end.
        session = Session(replace(self.plan.config, confidence_threshold=0.0), self.plan.target, drafter, "")
        request = Request(self.row.prompt_ids, len(self.row.answer_ids))
        accepted = {}
        for method in self.methods:
            (answer,) = generate(self.plan.target, session.proposer(method), [request])
            accepted[method] = accepted_in_whole_rounds(answer, self.row.answer_ids, self.plan.spec.num_proposals)
        self.looks.append(Look(state.global_step, accepted))
        # Ranks must stop together, and their clocks differ.
        control.should_training_stop = any(gather_objects([self.passed or time.monotonic() - self.started > SECONDS]))


def overfit_check(plan: TrainingPlan) -> bool:
    """Trains all of a fresh drafter on one sample and says on the first rank whether decoding accepts whole blocks.

    Writes RUN/overfit_check.json and nothing else. `trainable` is not looked at: a frozen part could not learn.
    """
    row = choose_sample(plan)
    look = LookAtDecoding(plan, row)
    with tempfile.TemporaryDirectory() as folder:
        trainer, progress = build(_small_run(plan, row, folder))
        look.trainer = trainer
        trainer.add_callback(look)
        trainer.train()
        accuracy = progress.last.get("accuracy", 0.0)
    if trainer.args.should_save:
        result = {"passed": look.passed, "proposals": plan.spec.num_proposals, "accuracy": accuracy}
        write_json(plan.config.path(LOG), result | {"looks": [asdict(item) for item in look.looks]})
        print(describe(look, accuracy, progress.seconds))
    return look.passed


def describe(look: LookAtDecoding, accuracy: float, seconds: float) -> str:
    """The verdict in one line, with the reason of a failure."""
    last, depth = look.looks[-1], look.plan.spec.num_proposals
    figures = ", ".join(
        f"{method} {'not judged' if value is None else f'{value:.1f}'}" for method, value in last.accepted.items()
    )
    words = (
        f"after {last.step} steps ({seconds:.0f} s) on one sample decoding accepts, of {depth} proposals a round, "
        f"{figures}; accuracy in training {accuracy:.2f}"
    )
    if look.passed:
        return f"overfit_check: pass: {words}"
    if accuracy > SHARE:
        return f"overfit_check: fail: {words}: labels, positions or masks differ between training and decoding"
    return f"overfit_check: fail: {words}: the sample was not learned; look at learning_rate, mask token and taps"


def choose_sample(plan: TrainingPlan) -> AnswerRow:
    """A training prompt with what the target really continues, here and now, in this dtype; the longest of a few.

    Stored answers may be sampled, cut, or rounded in another batch: decoding would leave them. What lies behind a token
    that the drafter cannot propose is cut off, and what repeats itself too (`varied`).
    """
    known = set() if plan.draft_ids is None else set(plan.draft_ids.tolist())
    samples = []
    for stored in plan.data.documents.rows[:CANDIDATES]:
        prompt = list(stored.prompt_ids)[: plan.config.max_row_length - TOKENS]
        (answer,) = generate(plan.target, NoProposer(), [Request(prompt, TOKENS)])
        inside = next((i for i, t in enumerate(answer.tokens) if known and t not in known), len(answer.tokens))
        samples.append(AnswerRow(stored.id, stored.domain, prompt, varied(answer.tokens[:inside]), answer.stop))
    row = max(samples, key=lambda sample: len(sample.answer_ids))
    need = plan.spec.num_proposals + 2
    if len(row.answer_ids) < need:
        raise ValueError(
            f"overfit_check: no answer of the first {CANDIDATES} rows has {need} tokens to draft, half of them new ones"
        )
    return row


def varied(tokens: list[int]) -> list[int]:
    """The longest beginning of which at least half the tokens are new ones.

    Where a text repeats itself, labels of a wrong place are right all the same. Here at most half of the tokens can
    equal the one some places further, so that such labels get one token a round accepted at most.
    """
    return tokens[: max(n for n in range(len(tokens) + 1) if 2 * len(set(tokens[:n])) >= n)]


def _small_run(plan: TrainingPlan, row: AnswerRow, folder: str) -> TrainingPlan:
    """The run with one sample, for each rank the same, in a folder that is thrown away."""
    config = replace(
        plan.config, run_dir=folder, trainable="all", lambda_start=LAMBDA, lambda_end=LAMBDA, anchors_per_row=TOKENS
    )
    arguments = argparse.Namespace(**vars(plan.arguments))
    for name, value in dict(
        output_dir=config.path("checkpoints"),
        max_steps=STEPS,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        lr_scheduler_type="constant_with_warmup",
        warmup_steps=10,
        weight_decay=0.0,
        logging_steps=5,
        save_strategy="no",
        eval_strategy="no",
        report_to=[],
    ).items():
        setattr(arguments, name, value)
    ranks = int(plan.semantic["world_size"])
    rows = [replace(row, id=f"{row.id}/{rank}") for rank in range(ranks)]
    data = TrainingRows(rows, len(row.prompt_ids) + len(row.answer_ids), TOKENS, config.seed)
    return replace(plan, config=config, arguments=arguments, data=data, resume=None)


def accepted_in_whole_rounds(answer: Answer, learned: list[int], depth: int) -> float | None:
    """Mean accepted tokens of the rounds in which the target goes on with the learned text for `depth` tokens.

    In bf16 a batch of tree nodes rounds differently from one token at a time, and the target itself may leave its text
    at a near tie: what follows was never learned. None when it does so within the first round.
    """
    place, accepted = 1, []
    for record in answer.rounds:
        end = place + depth
        if end <= len(learned) and answer.tokens[:end] == learned[:end]:
            accepted.append(record.accepted)
        place += record.emitted
    return sum(accepted) / len(accepted) if accepted else None
