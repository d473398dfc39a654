"""Asks questions: prompt by prompt, all plans on the same history, in random order, each answer stored as it comes.

Fair timing (TRAPS 54): the order of the plans is drawn anew for each turn, so that drift of the machine cancels; every
plan is warmed up; all run through the one round loop, with the first draft inside the clock. Later turns follow AR's
own answers whatever the plan. Each request has its own random stream, so that results do not depend on ranks.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

from tqdm import tqdm

from .baseline import time_generate
from .decoding.loop import Request, generate
from .memory import PeakMemory
from .records import AR, MAIN, Generation, Plan
from .session import Asked, Question, Session
from .store import Asking, Store

WARM_UP_TOKENS = 12


def warm_up(session: Session, plans: Sequence[Plan], temperature: float) -> None:
    """Every plan once on a training prompt, unrecorded: allocators, kernels and caches are then warm for all."""
    ids = session.training_prompts(1, session.config.seed + 1)[0]
    for plan in plans:
        generate(session.target, session.proposer_of(plan), [Request(ids, WARM_UP_TOKENS)], temperature)
    time_generate(session.target, ids, WARM_UP_TOKENS)


def conversation(
    session: Session, store: Store, phase: str, question: Question, temperature: float
) -> Iterator[tuple[Asking, list[int]]]:
    """The turns of a question with their prompts, each as it is asked.

    A later turn follows AR's stored answer: who decodes must answer a turn before taking the next. Ends early at a turn
    that cannot be asked.
    """
    prompt, history = question.prompt, []
    for turn in range(len(prompt.turns)):
        ids = session.usable_ids(prompt.turns[: turn + 1], history, prompt.tools)
        if ids is None:
            return
        where = (phase, question.benchmark, prompt.id, turn, temperature)
        yield where, ids
        ar = store.find(where, Plan(AR), ids)
        if ar is None:
            return
        history.append(session.target.tokenizer.decode(ar.tokens, skip_special_tokens=True))


class Asker:
    """One phase of an evaluation: some plans at one temperature.

    Attributes:
        plans: AR first.
        phase: "main", or the name of a sweep, whose answers are its own.
    """

    def __init__(self, session: Session, store: Store, plans: Sequence[Plan], temperature: float, phase: str = MAIN):
        self.session, self.store, self.temperature, self.phase = session, store, temperature, phase
        self.plans = list(plans)
        self.memory = PeakMemory(session.target.device)
        pruned = [plan for plan in plans if plan.method == "dartree_pruned"]
        self.shown = (pruned or self.plans)[-1]  # the plan whose figures the progress bar shows

    def ask(self, asked: Asked) -> None:
        """This rank's share of a benchmark, with a progress bar."""
        session = self.session
        mine = asked.questions[session.rank :: session.ranks]
        bar = tqdm(mine, desc=f"{self.phase} {asked.name} T={self.temperature:g}", disable=session.rank > 0)
        for question in bar:
            self.question(question)
            bar.set_postfix_str(self.store.progress(self.phase, asked.name, self.temperature, self.shown))

    def question(self, question: Question) -> None:
        """All turns of one prompt."""
        prompt, asked = question.prompt, 0
        for where, ids in conversation(self.session, self.store, self.phase, question, self.temperature):
            self._turn(where, ids, prompt.domain)
            asked += 1
        if asked < len(prompt.turns):
            tqdm.write(f"eval: {prompt.id} ends before turn {asked + 1}: rejected or too long")

    def _turn(self, where: Asking, ids: list[int], domain: str) -> None:
        """Decodes what is missing of one turn."""
        seed = "/".join([str(self.session.config.seed), *map(str, where[1:])])
        # None stands for transformers' own loop, timed beside AR.
        order: list[Plan | None] = list(self.plans)
        if self.phase == MAIN and self.temperature == 0:
            order.append(None)
        random.Random(seed).shuffle(order)
        for plan in order:
            if plan is None:
                self._yardstick(where, ids)
            elif self.store.find(where, plan, ids) is None:
                self._answer(where, plan, ids, seed, domain)

    def _yardstick(self, where: Asking, ids: list[int]) -> None:
        if self.store.find_time(where, ids) is None:
            limit = self.session.config.max_new_tokens
            self.store.add_time(where, ids, time_generate(self.session.target, ids, limit))

    def _answer(self, where: Asking, plan: Plan, ids: list[int], seed: str, domain: str) -> None:
        session, (phase, benchmark, prompt_id, turn, temperature) = self.session, where
        proposer = session.proposer_of(plan)
        self.memory.reset()
        request = Request(ids, session.config.max_new_tokens, seed)
        limit = session.config.max_cache_gb
        answer = generate(session.target, proposer, [request], temperature, max_cache_gb=limit)[0]
        more = {"turn": turn, "domain": domain, "phase": phase, "peak_memory_gb": self.memory.read()}
        self.store.add(Generation.of(benchmark, prompt_id, plan, temperature, answer, **more), ids)
