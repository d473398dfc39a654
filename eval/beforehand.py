"""What an evaluation settles before it decodes a single answer: that memory suffices, which budget this machine wants,
and what a round costs here. Budget and costs come from training prompts, never from those that are evaluated.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace

from tqdm import tqdm

from data.chat import turn_text
from data.prompts import Prompt

from .budget import SIZES, BudgetChoice, choose_budget, verify_cost
from .budget_policy import BudgetCalibration, calibrate_budget, unmeasured
from .decoding.loop import generate
from .decoding.request import Answer, Request, check_requests
from .plans import configured_plan, tree_options
from .records import FIXED, Plan
from .report import write_whole
from .session import Asked, Session
from .store import Store, prompt_digest
from .throughput import concurrency_prompts, concurrency_requests

COSTS = "round-cost.json"  # beside the stored answers
PROMPTS = 8


def check_memory(session: Session, parts: Iterable[tuple[Asked, Sequence[Plan]]], loaded: Sequence[Plan]) -> None:
    """Raises ValueError, naming the prompt and max_cache_gb, when a request may not fit under some plan.

    Args:
        parts: a benchmark with the plans that answer it, one at a time.
        loaded: plans that are decoded at every concurrency.
    """
    for asked, plans in parts:
        for plan in plans:
            _check(session, plan, _longest(session, asked), 1)
    if session.config.concurrency:
        name, requests = concurrency_requests(session)
        named = zip(concurrency_prompts(session)[1], requests, strict=True)
        longest = max((replace(r, seed=f"{p.id} of {name}") for p, r in named), key=lambda r: len(r.prompt_ids))
        for plan in loaded:
            for level in session.config.concurrency:
                _check(session, plan, longest, min(level, len(requests)))


def _check(session: Session, plan: Plan, request: Request, slots: int) -> None:
    # A policy sets B while decoding, up to the plan's, and may need costs that are not measured yet.
    proposer = session.proposer_of(replace(plan, policy=FIXED))
    check_requests([request], session.target, proposer, slots, session.config.max_cache_gb)


def _longest(session: Session, asked: Asked) -> Request:
    """The longest prompt of a benchmark. How long a later turn becomes depends on the answers before it: at most as
    long as any prompt may be."""
    found = []
    for prompt in asked.prompts:
        if len(prompt.turns) > 1:
            found.append((session.longest_prompt, f"{prompt.id} of {asked.name}, a later turn"))
        found.append((len(session.usable_ids(prompt.turns[:1], [], prompt.tools)), f"{prompt.id} of {asked.name}"))
    length, name = max(found)
    return Request([0] * length, session.config.max_new_tokens, name)


def choose(session: Session, store: Store, asked: Sequence[Asked]) -> dict[float, BudgetChoice]:
    """The budget for this machine at each temperature, from training prompts only; kept for a resumed evaluation.

    Sampled text is accepted less deep than greedy text, so that no temperature's choice holds for another one.

    Raises ValueError when what is kept was chosen on a prompt that is evaluated now.
    """
    config = session.config
    if store.choices:
        _refuse_used(session, store, asked)
    missing = [t for t in dict.fromkeys(config.temperatures) if t not in store.choices]
    if missing:
        prompts = _training_prompts(session, store, asked)
        sizes = [*(s for s in SIZES if s < config.budget), config.budget]
        context = len(prompts[-1]) + config.max_new_tokens // 2
        cost = verify_cost(session.target, session.drafter.spec.target_layer_ids, sizes, context)
        for temperature in missing:
            answers = _drafted(session, prompts, temperature)
            store.save_choice(choose_budget(answers[1:] or answers, cost, temperature))  # the first one warms up
    return {t: store.choices[t] for t in config.temperatures}


def _drafted(session: Session, prompts: Sequence[list[int]], temperature: float) -> list[Answer]:
    """The answers to training prompts, one at a time, by dartree_pruned at the configured budget."""
    answers, limit = [], min(48, session.config.max_new_tokens)
    for number, ids in enumerate(tqdm(prompts, desc=f"budget: acceptance on training prompts, T={temperature:g}")):
        request = Request(ids, limit, f"training prompt {number}")
        answers += generate(session.target, session.proposer("dartree_pruned"), [request], temperature)
    return answers


def calibrate(session: Session, store: Store, asked: Sequence[Asked]) -> BudgetCalibration:
    """Costs of this machine for the cost-aware budget, from training prompts only.

    There is one calibration of all stored answers, kept beside them: another temperature has another folder
    (eval/marks.py), and a later evaluation with more requests at once adds their costs to those that are there.

    Raises ValueError when what is kept was measured on a prompt that is evaluated now.
    """
    config = session.config
    path = store.folder / COSTS
    known = BudgetCalibration.from_dict(json.loads(path.read_text())) if path.is_file() else None
    if known is not None:
        _refuse_used(session, store, asked)
        if not unmeasured(known, config.concurrency):
            return known
    print("eval: measures what a round costs on this machine")
    plan = configured_plan(config, session.drafter.spec, "dartree_pruned")
    measured = calibrate_budget(
        session.target,
        session.drafter,
        tree_options(config, plan),
        _training_prompts(session, store, asked),
        config.concurrency,
        (64, max(128, config.max_prompt_length + config.max_new_tokens)),
        config.temperatures[0],
        known,
    )
    write_whole(path, json.dumps(measured.to_dict()) + "\n")
    return BudgetCalibration.from_dict(measured.to_dict())  # to the last bit what a resumed evaluation reads


def _evaluated(session: Session, asked: Sequence[Asked]) -> list[Prompt]:
    """Everything that is evaluated: nothing is chosen or measured on it beforehand."""
    prompts = [prompt for a in asked for prompt in a.prompts]
    return prompts + (concurrency_prompts(session)[1] if session.config.concurrency else [])


def _training_prompts(session: Session, store: Store, asked: Sequence[Asked]) -> list[list[int]]:
    """Token ids of training prompts that are not evaluated; the store remembers them."""
    evaluated = {turn_text(prompt.turns[0]) for prompt in _evaluated(session, asked)}
    prompts = session.training_prompts(PROMPTS, session.config.seed, evaluated)
    store.add_used(map(prompt_digest, prompts))
    return prompts


def _refuse_used(session: Session, store: Store, asked: Sequence[Asked]) -> None:
    """More prompts or benchmarks than before may hold one on which the stored budget or costs were found."""
    for prompt in _evaluated(session, asked):
        if prompt_digest(session.usable_ids(prompt.turns[:1], [], prompt.tools)) in store.used:
            raise ValueError(
                f"benchmarks: prompt {prompt.id!r} is one of the training prompts on which the budget was found that "
                f"{store.folder} was measured with; remove that folder to measure anew without it"
            )
