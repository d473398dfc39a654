"""Stage `regenerate`: the target answers the prompts, so that a drafter learns the target's own text.

    bash launch.sh regenerate [CONFIG] [--key value ...]
    python -m data.regenerate configs/demo.yaml --num_prompts 128

Writes RUN/answers (data/answers.py) and, with keep_features, the taps of every answer (data/features.py). Rows are
accounted by id: done + failed + skipped == input, where the input counts every turn of every prompt. Each turn of a
conversation is answered after the target's own answers to the turns before it. A killed run goes on where it stopped.

Shapes: R rows of a batch, S padded prompt, T generated tokens.
"""

from __future__ import annotations

import random
import sys
import time
import zlib
from dataclasses import dataclass, field

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import AutoConfig, AutoTokenizer, GenerationConfig

from data import answers, features
from data.answers import AnswerRow
from data.chat import PLAIN, ChatFormat, TemplateRejected, encode_prompt, messages_of, template_fingerprint
from data.environment import choose_device
from data.fetch_target import resolve_target
from data.prompts import Prompt, load_mixture
from data.settings import RunConfig, run_stage
from models.placement import placement
from models.quantization import precision_name
from models.target import Target, choose_dtype, load_target

# Batches are cut from this many prompts sorted by length: little padding, and an early stop keeps the mix of prompts.
_SORT_WINDOW = 16


@dataclass(frozen=True)
class Question:
    """One turn to answer: the row's id and domain, and its prompt tokens."""

    id: str
    domain: str
    prompt_ids: list[int]


@dataclass
class Progress:
    """What happened to the input so far. `dropped` maps a row id to the reason why it has no answer."""

    rows: dict[str, AnswerRow]
    skipped: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    out_of_time: bool = False


def main(argv: list[str]) -> int:
    return run_stage("regenerate", argv, regenerate)


def regenerate(config: RunConfig) -> None:
    """Runs the stage. Raises ValueError for a user's mistake."""
    folder = config.path("answers")
    path = resolve_target(config)
    device = choose_device(config.device)
    dtype = choose_dtype(config.dtype, device)
    settings = _settings(config, path, dtype)
    manifest = answers.read_manifest(folder)
    _refuse_other_settings(folder, manifest, settings)
    # Answers cut by a time budget go on under another one, or none.
    cut = manifest.get("out_of_time") and manifest.get("time_budget") != config.time_budget
    if manifest.get("finished") and manifest["num_prompts"] == config.num_prompts and not cut:
        print(f"answers are finished: {manifest['counts']['done']} rows in {folder}")
        return
    prompts = load_mixture(config.prompts, config.num_prompts, config.seed, "train")
    answers.make_folder(folder, "run_dir")
    answers.drop_half_line(folder)
    progress = Progress(answers.read_rows(folder))
    placed = placement(config.device_map)
    target = load_target(path, dtype, device, config.trust_remote_code, config.quantization, placed)
    job = Job(config, target, tuple(settings["tap_ids"] or ()), prompts, progress)
    job.save_manifest(settings, finished=False)
    job.run()
    job.save_manifest(settings, finished=True)


def _settings(config: RunConfig, path: str, dtype: torch.dtype) -> dict:
    """Everything that decides an answer or its features; rows made under other settings are never mixed."""
    try:
        model = AutoConfig.from_pretrained(path, trust_remote_code=config.trust_remote_code).get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:  # a missing file, an unreachable Hub id, a folder without a model
        raise ValueError(f"target: cannot read {path}: {str(error).splitlines()[0]}") from error
    taps = list(features.resolve_taps(config, model.num_hidden_layers)) if config.keep_features else None
    return {
        "target": path,
        "target_identity": answers.target_identity(path),
        "template": template_fingerprint(tokenizer, ChatFormat.of(config)),
        **ChatFormat.of(config).recorded,
        "prompts": config.prompts,
        "seed": config.seed,
        "answer_temperature": config.answer_temperature,
        "max_prompt_length": config.max_prompt_length,
        "max_answer_length": config.max_answer_length,
        "dtype": precision_name(dtype, config.quantization),
        "tap_ids": taps,
    }


def _refuse_other_settings(folder: str, manifest: dict, settings: dict) -> None:
    old = PLAIN.recorded | manifest.get("settings", settings)  # older manifests do not say the format
    for name, value in settings.items():
        # A target is known by its weights, wherever they lie.
        if name != "target" and old.get(name) != value:
            raise ValueError(
                f"{folder} holds answers made with {name} = {old.get(name)!r}, this run has {value!r}: "
                "delete the folder or choose another run_dir"
            )


class Job:
    """One run of the stage over a loaded target."""

    def __init__(
        self, config: RunConfig, target: Target, taps: tuple[int, ...], prompts: list[Prompt], progress: Progress
    ):
        self.config, self.target, self.taps, self.prompts, self.progress = config, target, taps, prompts, progress
        self.folder = config.path("answers")
        self.started, self.new_tokens = time.monotonic(), 0
        known = {_turn_id(p, turn) for p in prompts for turn in range(len(p.turns))}
        strange = [key for key in progress.rows if key not in known]
        if strange:
            raise ValueError(
                f"{self.folder} holds {len(strange)} answers to other prompts (fewer num_prompts or a changed file): "
                "delete the folder or choose another run_dir"
            )
        head = target.model.get_output_embeddings()
        # The last position of a padded prompt is a strided slice, for which linear() would copy the head once a row:
        # measured 16 of the 25 s that a batch of 64 needs for its first 12 tokens.
        head.register_forward_pre_hook(lambda module, inputs: (inputs[0].contiguous(),))
        self.writer = None
        if taps:
            later = sum(len(p.turns) for p in prompts) - len(prompts)
            self._check_space(self._questions(0), later)
            self.writer = features.FeatureWriter(self.folder, set(progress.rows))

    def run(self) -> None:
        """Answers turn by turn: all first turns, then all second turns, ..."""
        for turn in range(max(len(p.turns) for p in self.prompts)):
            batches = self._batches(self._questions(turn))
            with tqdm(total=sum(map(len, batches)), desc=f"answers, turn {turn + 1}", unit="row") as bar:
                for batch in batches:
                    spent = time.monotonic() - self.started
                    if self.config.time_budget and spent > self.config.time_budget and self.new_tokens:
                        self.progress.out_of_time = True
                        break
                    self._answer(batch)
                    bar.update(len(batch))
                    bar.set_postfix_str(f"{self.new_tokens / (time.monotonic() - self.started):.0f} tokens/s")
        self._account_for_the_rest()

    def _questions(self, turn: int) -> list[Question]:
        """The turn's questions that have no answer yet; those that cannot be asked are recorded as skipped."""
        questions = []
        for prompt in (p for p in self.prompts if turn < len(p.turns)):
            key = _turn_id(prompt, turn)
            if key in self.progress.rows:
                continue
            before = [self.progress.rows.get(_turn_id(prompt, i)) for i in range(turn)]
            if any(row is None for row in before):
                self.progress.skipped[key] = "an earlier turn has no answer"
                continue
            texts = [self.target.tokenizer.decode(row.answer_ids, skip_special_tokens=True) for row in before]
            try:
                messages = messages_of(prompt.turns[: turn + 1], texts)
                ids = encode_prompt(self.target.tokenizer, messages, prompt.tools, ChatFormat.of(self.config))
            except TemplateRejected as error:
                self.progress.skipped[key] = str(error)
                continue
            if len(ids) > self.config.max_prompt_length:
                limit = self.config.max_prompt_length
                self.progress.skipped[key] = f"{len(ids)} prompt tokens, max_prompt_length is {limit}"
                continue
            questions.append(Question(key, prompt.domain, ids))
        return questions

    def _batches(self, questions: list[Question]) -> list[list[Question]]:
        size = self.config.answer_batch_size
        batches = []
        for start in range(0, len(questions), size * _SORT_WINDOW):
            window = sorted(questions[start : start + size * _SORT_WINDOW], key=lambda q: len(q.prompt_ids))
            chunk = [window[i : i + size] for i in range(0, len(window), size)]
            random.Random(self.config.seed).shuffle(chunk)
            batches += chunk
        return batches

    def _answer(self, batch: list[Question]) -> None:
        """Answers and records a batch; one that does not fit in the device's memory is halved, a single row fails."""
        try:
            rows, taps = answer_batch(self.target, batch, self.taps, self.config)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            if len(batch) == 1:
                self.progress.failed[batch[0].id] = "out of memory"
                return
            middle = len(batch) // 2
            self._answer(batch[:middle])
            self._answer(batch[middle:])
            return
        if self.writer is not None:
            self.writer.write(taps)
        answers.append_rows(self.folder, rows)
        self.progress.rows |= {row.id: row for row in rows}
        self.new_tokens += sum(len(row.answer_ids) for row in rows)

    def _account_for_the_rest(self) -> None:
        """Rows that were never tried: only a time budget leaves any."""
        known = self.progress.rows.keys() | self.progress.skipped.keys() | self.progress.failed.keys()
        for prompt in self.prompts:
            for turn in range(len(prompt.turns)):
                if _turn_id(prompt, turn) not in known:
                    assert self.progress.out_of_time
                    self.progress.skipped[_turn_id(prompt, turn)] = "time_budget"

    def _check_space(self, questions: list[Question], later_turns: int) -> None:
        config = self.config
        tokens = sum(len(q.prompt_ids) + config.max_answer_length for q in questions)
        tokens += later_turns * (config.max_prompt_length + config.max_answer_length)
        width = len(self.taps) * self.target.config.hidden_size
        features.check_space(self.folder, tokens, width, "keep_features", "pass --keep_features false")

    def save_manifest(self, settings: dict, finished: bool) -> None:
        progress, seconds = self.progress, time.monotonic() - self.started
        counts = {
            "input": sum(len(p.turns) for p in self.prompts),
            "done": len(progress.rows),
            "failed": len(progress.failed),
            "skipped": len(progress.skipped),
        }
        manifest = {"finished": finished, "num_prompts": self.config.num_prompts}
        manifest |= {"settings": settings, "counts": counts}
        if finished:
            assert counts["done"] + counts["failed"] + counts["skipped"] == counts["input"], counts
            manifest |= answers.describe(list(progress.rows.values()))
            manifest |= {"out_of_time": progress.out_of_time, "time_budget": self.config.time_budget}
            manifest |= {"skipped": progress.skipped, "failed": progress.failed}
            manifest |= {"last_run": {"seconds": seconds, "tokens_per_second": self.new_tokens / seconds}}
            _report(manifest, self.folder)
            if not progress.rows:
                raise ValueError(f"no prompt could be answered; the first reason: {_first_reason(progress)}")
        answers.write_manifest(self.folder, manifest)


def _report(manifest: dict, folder: str) -> None:
    counts = manifest["counts"]
    print(f"{folder}: " + ", ".join(f"{value} {name}" for name, value in counts.items()))
    for name in ("skipped", "failed"):
        for key, reason in list(manifest[name].items())[:3]:
            print(f"  {name} {key}: {reason}")
    if counts["done"]:
        print(
            f"  {manifest['share_eos']:.0%} end in eos, distinct 4-grams {manifest['distinct_4grams']:.3f}, "
            f"{manifest['last_run']['tokens_per_second']:.0f} tokens/s"
        )


def _first_reason(progress: Progress) -> str:
    return next(iter({**progress.skipped, **progress.failed}.values()))


def _turn_id(prompt: Prompt, turn: int) -> str:
    return prompt.id if turn == 0 else f"{prompt.id}.turn{turn + 1}"


@torch.inference_mode()
def answer_batch(
    target: Target, batch: list[Question], taps: tuple[int, ...], config: RunConfig
) -> tuple[list[AnswerRow], dict[str, Tensor]]:
    """Answers a batch and, when taps are asked for, returns each row's taps [len, L*D] in bf16."""
    ids_RS, mask_RS = _left_padded([q.prompt_ids for q in batch], _padding_id(target), target.device)
    if config.answer_temperature > 0:
        # The seed belongs to the batch: a resumed run draws for its rows what no other batch drew.
        torch.manual_seed(zlib.crc32(f"{config.seed} {batch[0].id}".encode()))
    output = target.model.generate(
        ids_RS,
        attention_mask=mask_RS,
        generation_config=_generation_config(target, config, taps),
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


def cut_answer(tokens: list[int], eos_ids: tuple[int, ...]) -> tuple[list[int], str]:
    """The tokens up to the first eos of any kind, that one included, and why the answer stopped."""
    for index, token in enumerate(tokens):
        if token in eos_ids:
            return tokens[: index + 1], "eos"
    return tokens, "length"


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
    """Every knob is set: the target's own generation_config (top_p, repetition_penalty, ...) must not shape the text.

    The round loop of evaluation samples from the plain softmax at the temperature, and so does this.
    """
    sampled = config.answer_temperature > 0
    drawing = {"temperature": config.answer_temperature, "top_k": 0, "top_p": 1.0} if sampled else {}
    target.model.generation_config = GenerationConfig()
    return GenerationConfig(
        max_new_tokens=config.max_answer_length,
        do_sample=sampled,
        eos_token_id=list(target.eos_ids) or None,
        pad_token_id=_padding_id(target),
        return_dict_in_generate=True,
        output_hidden_states=[i + 1 for i in taps] if taps else None,
        **drawing,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
