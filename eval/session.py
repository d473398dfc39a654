"""What an evaluation loads once: target, drafter, plans, and the prompts that can be answered."""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace

import torch

from data.benchmarks import LoadedBenchmark, load_benchmark
from data.chat import ChatFormat, TemplateRejected, Turn, date_warning, encode_prompt, messages_of, turn_text
from data.conversations import Columns
from data.environment import choose_device
from data.fetch_target import resolve_target
from data.prompts import Prompt, load_mixture
from data.settings import RunConfig
from models.checkpoint import Drafter, load_drafter
from models.fitting import fit_to_target
from models.placement import placement
from models.target import Target, choose_dtype, load_target

from .budget_policy import BudgetCalibration, make_policy
from .calibration import read_temperature
from .chat_format import read_provenance, warning
from .decoding.proposals import make_proposer
from .plans import configured_plan, tree_options
from .records import AVERAGE, Plan


@dataclass
class Question:
    """A prompt (one or more turns) of a benchmark."""

    benchmark: str
    prompt: Prompt


@dataclass
class Asked:
    """A benchmark as this evaluation asks it. Attributes: skipped: prompts that cannot be answered, before the last
    one that is asked."""

    name: str
    source: str
    prompts: list[Prompt]
    skipped: int

    @property
    def questions(self) -> list[Question]:
        return [Question(self.name, prompt) for prompt in self.prompts]


@dataclass
class Session:
    """Everything that decoding needs, loaded once. Attributes: confidence_temperature: of RUN/calibration.json;
    calibration: what the cost-aware budget was measured from."""

    config: RunConfig
    target: Target
    drafter: Drafter
    drafter_folder: str
    rank: int = 0
    ranks: int = 1
    confidence_temperature: float = 1.0
    calibration: BudgetCalibration | None = None

    def proposer(self, method: str, budget: int = 0):
        """The proposer of a method as configured; `budget` replaces the B of a tree."""
        return self.proposer_of(configured_plan(self.config, self.drafter.spec, method, budget))

    def proposer_of(self, plan: Plan):
        options = replace(
            tree_options(self.config, plan),
            confidence_threshold=self.config.confidence_threshold,
            confidence_temperature=self.confidence_temperature,
        )
        policy = make_policy(plan.policy, options, self.config.adaptive_budget, self.calibration)
        return make_proposer(self.target, self.drafter, plan.method, options, policy, plan.acceptance)

    @property
    def longest_prompt(self) -> int:
        """Tokens of a conversation that can still be answered."""
        c = self.config
        return min(c.max_prompt_length, self.target.max_length - c.max_new_tokens - self.drafter.spec.num_proposals)

    def usable_ids(self, turns: list[Turn], answers: list[str], tools: list[dict] | None = None) -> list[int] | None:
        """Token ids of a conversation; None when the template rejects it or it is too long to be answered."""
        try:
            form = ChatFormat.of(self.config)
            ids = encode_prompt(self.target.tokenizer, messages_of(turns, answers), tools, form)
        except TemplateRejected:
            return None
        return ids if len(ids) <= self.longest_prompt else None

    def training_prompts(self, count: int, seed: int, evaluated: Collection[str] = ()) -> list[list[int]]:
        """Ids of up to `count` usable training prompts, none of which is one of the `evaluated` first turns.

        Raises ValueError when there is none.
        """
        columns = Columns.of(self.config)
        prompts = load_mixture(self.config.prompts, 2 * count + len(evaluated), seed, "train", columns)
        fresh = [p for p in prompts if turn_text(p.turns[0]) not in evaluated]
        usable = [ids for p in fresh if (ids := self.usable_ids(p.turns[:1], [], p.tools)) is not None][:count]
        if not usable:
            sources = " ".join(self.config.prompts)
            raise ValueError(
                f"prompts {sources}: no training prompt is short enough to be answered and not evaluated itself"
            )
        return usable


def take_device(config: RunConfig, ranks: int = 1) -> str:
    """The device of this rank, and its share of the CPU's threads."""
    device = choose_device(config.device)
    if device == "cuda":
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
        torch.cuda.set_device(device)
    elif ranks > 1:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", ranks))))
    return device


def load_session(config: RunConfig, drafter_folder: str, rank: int = 0, ranks: int = 1) -> Session:
    """Loads target and drafter in one dtype and checks that they belong together."""
    device = take_device(config, ranks)
    dtype = choose_dtype(config.dtype, device)
    path = resolve_target(config)
    placed = placement(config.device_map)
    target = load_target(path, dtype, device, config.trust_remote_code, config.quantization, placed)
    drafter = fit_to_target(load_drafter(drafter_folder, dtype, device, config.allow_extra), target)
    if config.device_map:
        counts = Counter(map(str, target.layer_devices))
        print(f"target: {', '.join(f'{count} layers on {name}' for name, count in counts.items())}")
    if rank == 0:
        print(f"drafter: {drafter.describe()}")
        tokenizer = target.tokenizer
        for said in (
            warning(config, tokenizer, read_provenance(drafter_folder)),
            date_warning(tokenizer, ChatFormat.of(config)),
        ):
            if said:
                print(said, file=sys.stderr)
    temperature = read_temperature(config.run_dir, drafter_folder) if config.confidence_threshold else 1.0
    return Session(config, target, drafter, drafter_folder, rank, ranks, temperature)


def load_benchmarks(session: Session) -> list[Asked]:
    """The held-out prompts of every benchmark, those left out that cannot be answered. Raises ValueError when nothing
    is left to ask, two benchmarks have one name, or one has that of the average."""
    config = session.config
    loaded = [load_benchmark(s, config.eval_prompts, config.seed, config.benchmark_dir) for s in config.benchmarks]
    if any(b.name == AVERAGE for b in loaded):
        raise ValueError(f"benchmarks: {AVERAGE!r} is the name of the mean over all of them; rename the file")
    if len({b.name for b in loaded}) < len(loaded):
        raise ValueError(f"benchmarks: two of {' '.join(config.benchmarks)} have the same name; rename a file")
    asked = [_ask(session, benchmark) for benchmark in loaded]
    skipped = {a.name: a.skipped for a in asked if a.skipped}
    if skipped and session.rank == 0:
        print(
            f"eval: skipped {', '.join(f'{count} prompts of {name}' for name, count in skipped.items())}: the template "
            f"rejects them, they exceed max_prompt_length {config.max_prompt_length}, or they leave no room for "
            f"max_new_tokens {config.max_new_tokens}"
        )
    for benchmark in asked:
        if not benchmark.prompts:
            raise ValueError(f"benchmarks {benchmark.source}: no prompt is left to evaluate")
    return asked


def _ask(session: Session, benchmark: LoadedBenchmark) -> Asked:
    """The first prompts in the seed's order that can be answered, as many as configured or as the published tables
    use. A larger number keeps them all."""
    wanted = session.config.eval_prompts or benchmark.count
    prompts, skipped = [], 0
    for prompt in benchmark.prompts:
        if session.usable_ids(prompt.turns[:1], [], prompt.tools) is None:
            skipped += 1
            continue
        prompts.append(prompt)
        if len(prompts) == wanted:
            break
    return Asked(benchmark.name, benchmark.source, prompts, skipped)
