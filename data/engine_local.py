"""The engine `local`: the target in this process answers in batches of prompts of similar length.

Windows of conversations go through memory one after another; inside a window the open turns are answered together, all
first turns, then all second ones. A drawn token depends on the row's own seed and its own logits alone.

Shapes: R rows of a batch, S padded prompt, T generated tokens, V vocabulary.
"""

from __future__ import annotations

import random
from itertools import islice

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import (
    LogitsProcessor,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from data import features
from data.answer_store import FAILED, Outcome
from data.answers import AnswerRow
from data.dialogues import Work
from data.engines import Question, Sampling, cut_answer
from data.settings import RunConfig
from models.target import Target

# Batches are cut from this many prompts sorted by length: little padding, and an early stop keeps the mix of prompts.
_SORT_WINDOW = 16
# Conversations in memory at once, in such sets of prompts: the last turns of long ones still fill batches.
_SETS = 4


class LocalEngine:
    """
    Args:
        taps: target layers whose output is kept for every answer; () for none.
        writer: where it goes.
    """

    def __init__(
        self,
        config: RunConfig,
        target: Target,
        taps: tuple[int, ...] = (),
        writer: features.FeatureWriter | None = None,
    ):
        self.config, self.target, self.taps, self.writer = config, target, taps, writer
        head = target.model.get_output_embeddings()
        # The last position of a padded prompt is a strided slice, for which linear() would copy the head once a row:
        # measured 16 of the 25 s that a batch of 64 needs for its first 12 tokens.
        head.register_forward_pre_hook(lambda module, inputs: (inputs[0].contiguous(),))

    def run(self, work: Work) -> None:
        dialogues = work.dialogues()
        while window := list(islice(dialogues, self.config.answer_batch_size * _SORT_WINDOW * _SETS)):
            while questions := [q for q in map(work.question, window) if q is not None]:
                for batch in self._batches(questions):
                    if work.spent():
                        work.flush()
                        return
                    self._answer(batch, work)
            work.flush()

    def _batches(self, questions: list[Question]) -> list[list[Question]]:
        size = self.config.answer_batch_size
        batches = []
        for start in range(0, len(questions), size * _SORT_WINDOW):
            window = sorted(questions[start : start + size * _SORT_WINDOW], key=lambda q: len(q.prompt_ids))
            chunk = [window[i : i + size] for i in range(0, len(window), size)]
            random.Random(self.config.seed).shuffle(chunk)
            batches += chunk
        return batches

    def _answer(self, batch: list[Question], work: Work) -> None:
        """Answers and records a batch; one that does not fit in the device's memory is halved, a single row fails."""
        try:
            rows, taps = answer_batch(self.target, batch, self.taps, self.config)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if len(batch) == 1:
                work.take(Outcome(batch[0].id, FAILED, "out of memory"))
                work.flush()
                return
            middle = len(batch) // 2
            self._answer(batch[:middle], work)
            self._answer(batch[middle:], work)
            return
        if self.writer is not None:
            self.writer.write(taps)
        for row in rows:
            work.take(row)
        work.flush()


@torch.inference_mode()
def answer_batch(
    target: Target, batch: list[Question], taps: tuple[int, ...], config: RunConfig
) -> tuple[list[AnswerRow], dict[str, Tensor]]:
    """Answers a batch and, when taps are asked for, returns each row's taps [len, L*D] in bf16."""
    ids_RS, mask_RS = _left_padded([q.prompt_ids for q in batch], _padding_id(target), target.device)
    # The target's own generation_config (top_p, repetition_penalty, ...) must not shape the text.
    target.model.generation_config = GenerationConfig()
    output = target.model.generate(
        ids_RS,
        attention_mask=mask_RS,
        generation_config=_generation_config(target, config, taps),
        logits_processor=drawing(Sampling.of(config), [q.id for q in batch], ids_RS.shape[1]),
    )
    rows, features_of = [], {}
    for index, question in enumerate(batch):
        answer, stop = cut_answer(output.sequences[index, ids_RS.shape[1] :].tolist(), target.eos_ids)
        rows.append(AnswerRow(question.id, question.domain, question.prompt_ids, answer, stop))
        if taps:
            start = ids_RS.shape[1] - len(question.prompt_ids)
            length = len(question.prompt_ids) + len(answer) - 1
            features_of[question.id] = features.gather_taps(output.hidden_states, taps, index, start, length)
    return rows, features_of


def drawing(sampling: Sampling, rows: list[str], width: int) -> LogitsProcessorList:
    """What turns logits into the drawn token of each row; nothing when answers are greedy.

    Args:
        rows: ids of the batch.
        width: tokens before the first generated one.
    """
    if sampling.temperature == 0:
        return LogitsProcessorList()
    steps = [TemperatureLogitsWarper(sampling.temperature)]
    steps += [TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    steps += [TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    steps += [MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    return LogitsProcessorList([*steps, DrawByRow(sampling, rows, width)])


class DrawByRow(LogitsProcessor):
    """Draws each row's token with the row's own random numbers and leaves only that token possible.

    generate() itself has one stream for the batch, so that a text would depend on its neighbours. One uniform number a
    token, put into the inverse of the cumulative distribution, costs the device no draw over the vocabulary.
    """

    def __init__(self, sampling: Sampling, rows: list[str], width: int):
        self._width = width
        draws = []
        for row in rows:
            generator = torch.Generator().manual_seed(sampling.seed_of(row))
            draws.append(torch.rand(sampling.max_length, generator=generator, dtype=torch.float64))
        self._draws_RT = torch.stack(draws)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        total_RV = scores.double().softmax(-1).cumsum(-1)
        draw_R1 = self._draws_RT[:, input_ids.shape[1] - self._width, None].to(total_RV.device)
        # right: the first token whose sum lies above the draw, so never one of probability 0.
        token_R1 = torch.searchsorted(total_RV, draw_R1 * total_RV[:, -1:], right=True)
        return torch.full_like(scores, -torch.inf).scatter_(1, token_R1.clamp_(max=scores.shape[1] - 1), 0.0)


def _left_padded(prompts: list[list[int]], padding: int, device: torch.device) -> tuple[Tensor, Tensor]:
    width = max(map(len, prompts))
    ids_RS = torch.full((len(prompts), width), padding)
    mask_RS = torch.zeros((len(prompts), width), dtype=torch.long)
    for index, prompt in enumerate(prompts):
        ids_RS[index, width - len(prompt) :] = torch.tensor(prompt)
        mask_RS[index, width - len(prompt) :] = 1
    return ids_RS.to(device), mask_RS.to(device)


def _padding_id(target: Target) -> int:
    pad = target.tokenizer.pad_token_id
    return pad if pad is not None else (target.eos_ids or (0,))[0]


def _generation_config(target: Target, config: RunConfig, taps: tuple[int, ...]) -> GenerationConfig:
    """Greedy: where answers are drawn, `DrawByRow` has left one token."""
    return GenerationConfig(
        max_new_tokens=config.max_answer_length,
        do_sample=False,
        eos_token_id=list(target.eos_ids) or None,
        pad_token_id=_padding_id(target),
        return_dict_in_generate=True,
        output_hidden_states=[i + 1 for i in taps] if taps else None,
    )
