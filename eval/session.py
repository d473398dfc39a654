"""What an evaluation loads once: target, drafter, methods, and the prompts that can be answered."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from data.chat import TemplateRejected, encode_prompt, messages_of
from data.environment import choose_device
from data.fetch_target import resolve_target
from data.prompts import Prompt, load_mixture, load_prompts
from data.settings import RunConfig
from models.checkpoint import Drafter, fit_to_target, load_drafter
from models.target import Target, choose_dtype, load_target

from .decoding.proposals import TREES, TreeOptions, available_methods, make_proposer


@dataclass
class Question:
    """A prompt (one or more turns) of a benchmark."""

    benchmark: str
    prompt: Prompt


@dataclass
class Session:
    """Everything that decoding needs, loaded once."""

    config: RunConfig
    target: Target
    drafter: Drafter
    drafter_folder: str
    rank: int = 0
    ranks: int = 1

    def proposer(self, method: str, budget: int):
        c = self.config
        options = TreeOptions(budget or c.budget, c.width, c.candidates, c.beta)
        return make_proposer(self.target, self.drafter, method, options)

    def budget_of(self, method: str) -> int:
        """The budget under which a method is reported: none for AR, a chain's length, the configured B for trees."""
        if method == "ar":
            return 0
        return self.config.budget if method in TREES else self.drafter.spec.num_proposals

    def usable_ids(self, turns: list[str], answers: list[str]) -> list[int] | None:
        """Token ids of a conversation; None when the template rejects it or it is too long to be answered."""
        c = self.config
        limit = min(c.max_prompt_length, self.target.max_length - c.max_new_tokens - self.drafter.spec.num_proposals)
        try:
            ids = encode_prompt(self.target.tokenizer, messages_of(turns, answers))
        except TemplateRejected:
            return None
        return ids if len(ids) <= limit else None

    def training_prompts(self, count: int, seed: int) -> list[list[int]]:
        """Ids of up to `count` usable training prompts. Raises ValueError when there is none."""
        prompts = load_mixture(self.config.prompts, 2 * count, seed, "train")
        usable = [ids for p in prompts if (ids := self.usable_ids(p.turns[:1], [])) is not None][:count]
        if not usable:
            sources = " ".join(self.config.prompts)
            raise ValueError(f"prompts {sources}: no training prompt is short enough to be answered")
        return usable


def load_session(config: RunConfig, drafter_folder: str, rank: int = 0, ranks: int = 1) -> Session:
    """Loads target and drafter in one dtype and checks that they belong together."""
    device = choose_device(config.device)
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    elif ranks > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))
    dtype = choose_dtype(config.dtype, device)
    target = load_target(resolve_target(config), dtype, device, config.trust_remote_code)
    drafter = fit_to_target(load_drafter(drafter_folder, dtype, device), target)
    return Session(config, target, drafter, drafter_folder, rank, ranks)


def chosen_methods(config: RunConfig, head_type: str) -> list[str]:
    """`all`, or the named methods with `ar` always among them (everything is compared with it)."""
    possible = available_methods(head_type)
    if config.methods == ["all"]:
        return possible
    for method in config.methods:
        if method not in possible:
            raise ValueError(
                f"methods: {method!r} is not among {', '.join(possible)} for a drafter with head {head_type!r}"
            )
    return [m for m in possible if m == "ar" or m in config.methods]


def load_questions(session: Session) -> list[Question]:
    """The held-out prompts of every benchmark; those that cannot be answered are counted and left out."""
    config = session.config
    names = [Path(source).stem if source.endswith(".jsonl") else source for source in config.benchmarks]
    if len(set(names)) < len(names):
        raise ValueError(f"benchmarks: two of {' '.join(config.benchmarks)} have the same name; rename a file")
    questions, skipped = [], 0
    for name, source in zip(names, config.benchmarks, strict=True):
        for prompt in load_prompts(source, config.eval_prompts, config.seed, "eval"):
            if session.usable_ids(prompt.turns[:1], []) is None:
                skipped += 1
            else:
                questions.append(Question(name, prompt))
    if skipped and session.rank == 0:
        print(
            f"eval: skipped {skipped} prompts that the template rejects, that exceed max_prompt_length "
            f"{config.max_prompt_length}, or that leave no room for max_new_tokens {config.max_new_tokens}"
        )
    if not questions:
        raise ValueError(f"benchmarks {' '.join(config.benchmarks)}: no prompt is left to evaluate")
    if set(config.prompts) & set(config.benchmarks) - {"builtin"} and session.rank == 0:
        print("eval: prompts and benchmarks name the same file: the budget is then chosen on evaluated prompts")
    return questions
