"""Evaluation: every method on the same held-out prompts, interleaved, through the one round loop.

    bash launch.sh eval [CONFIG] [--key value ...]
    deepspeed eval/run_eval.py [CONFIG] [--key value ...]   # all GPUs: prompts sharded, one rank writes the report

Resumable: every decoded request is appended to RUN/eval/rank-N.jsonl, and a rerun with the same settings decodes only
what is missing. Results do not depend on the number of ranks: each request has its own random stream.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # run as a script by DeepSpeed's launcher

import torch.distributed as dist
from tqdm import tqdm

from data.settings import RunConfig, run_stage
from eval.baseline import time_generate
from eval.budget import SIZES, BudgetChoice, choose_budget, verify_cost
from eval.decoding.loop import Request, generate
from eval.decoding.proposals import available_methods
from eval.exactness import divergence
from eval.records import Divergence, Generation
from eval.report import build_results, collect_settings, read_results, write_report
from eval.session import Question, Session, chosen_methods, load_questions, load_session
from eval.store import Store
from models.checkpoint import DRAFT_VOCABULARY, finished_drafter

GENERATE = "target.generate"  # transformers' own greedy loop, timed beside AR


def main(argv: list[str]) -> int:
    return run_stage("eval", argv, evaluate)


def evaluate(config: RunConfig) -> None:
    """Runs what is missing, then writes RUN/results.json, report.md and plots. Raises ValueError for user mistakes."""
    rank, ranks = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    folder = finished_drafter(config.run_dir, config.drafter)
    print_0 = print if rank == 0 else lambda *_: None
    mark = fingerprint(config, folder)
    if _already_done(config, mark):
        print_0(f"eval: finished already, see {config.path('report.md')}")
        return
    session = load_session(config, folder, rank, ranks)
    methods = chosen_methods(config, session.drafter.spec.head_type)
    questions = load_questions(session)
    if ranks > 1:
        # A rank may finish its share long before the others.
        dist.init_process_group("gloo", timeout=timedelta(days=7))
    store = Store(config, mark, rank)
    choice = (
        _shared(lambda: choose(session, store), session)
        if "dartree_pruned" in methods and config.choose_budget
        else None
    )
    plans = [(m, session.budget_of(m)) for m in methods]
    if choice is not None and choice.budget != config.budget:
        plans.append(("dartree_pruned", choice.budget))
    warm_up(session, plans)
    run_questions(session, store, questions, plans)
    if ranks > 1:
        dist.barrier()
    if rank == 0:
        finish(session, mark, choice, questions)
    if ranks > 1:
        dist.destroy_process_group()


def choose(session: Session, store: Store) -> BudgetChoice:
    """The budget for this machine, from training prompts only; kept for a resumed evaluation."""
    if store.choice is not None:
        return store.choice
    config = session.config
    answers = []
    prompts = session.training_prompts(8, config.seed)
    for ids in tqdm(prompts, desc="budget: acceptance on training prompts"):
        proposer = session.proposer("dartree_pruned", config.budget)
        answers += generate(session.target, proposer, [Request(ids, min(48, config.max_new_tokens))])
    sizes = [*(s for s in SIZES if s < config.budget), config.budget]
    context = len(ids) + config.max_new_tokens // 2
    # The first answer warms up.
    choice = choose_budget(
        answers[1:] or answers, verify_cost(session.target, session.drafter.spec.target_layer_ids, sizes, context)
    )
    store.save_choice(choice)
    return choice


def _shared(compute, session: Session):
    """Rank 0 measures; everyone uses its answer."""
    box = [compute() if session.rank == 0 else None]
    if session.ranks > 1:
        dist.broadcast_object_list(box, src=0)
    return box[0]


def warm_up(session: Session, plans: list[tuple[str, int]]) -> None:
    """Every method once on a training prompt, unrecorded: allocators, kernels and caches are then warm for all."""
    ids = session.training_prompts(1, session.config.seed + 1)[0]
    for method, budget in plans:
        generate(session.target, session.proposer(method, budget), [Request(ids, 12)])
    time_generate(session.target, ids, 12)


def run_questions(session: Session, store: Store, questions: list[Question], plans: list[tuple[str, int]]) -> None:
    """Prompt by prompt, the methods in random order, so that drift of the machine cancels."""
    mine = questions[session.rank :: session.ranks]
    for temperature in session.config.temperatures:
        bar = tqdm(mine, desc=f"eval T={temperature:g}", disable=session.rank > 0)
        for question in bar:
            run_question(session, store, question, plans, temperature)
            bar.set_postfix_str(store.progress(question.benchmark, temperature))


def run_question(session: Session, store: Store, question: Question, plans, temperature: float) -> None:
    """All turns of one prompt; every method answers a turn after the same history, AR's own answers."""
    history: list[str] = []
    tokenizer, config = session.target.tokenizer, session.config
    for turn in range(len(question.prompt.turns)):
        ids = session.usable_ids(question.prompt.turns[: turn + 1], history)
        if ids is None:
            tqdm.write(f"eval: {question.prompt.id} ends before turn {turn + 1}: rejected or too long")
            return
        prompt_id = question.prompt.id if len(question.prompt.turns) == 1 else f"{question.prompt.id}/{turn + 1}"
        seed = f"{config.seed}/{question.benchmark}/{prompt_id}/{temperature:g}"
        order = [*plans, (GENERATE, 0)] if temperature == 0 else list(plans)
        random.Random(seed).shuffle(order)
        for method, budget in order:
            key = (question.benchmark, prompt_id, temperature, method, budget)
            if key in store.generations or (method == GENERATE and key in store.generate_times):
                continue
            if method == GENERATE:
                store.add_time(key, time_generate(session.target, ids, config.max_new_tokens))
                continue
            answer = generate(
                session.target,
                session.proposer(method, budget),
                [Request(ids, config.max_new_tokens, seed)],
                temperature,
            )[0]
            record = Generation(
                question.benchmark, prompt_id, method, temperature, budget, answer.tokens, answer.stop, answer.rounds,
                answer.seconds, answer.prefill_seconds, answer.target_forwards, question.prompt.domain,
            )  # fmt: skip
            store.add(key, record, ids)
        ar = store.generations[(question.benchmark, prompt_id, temperature, "ar", 0)]
        history.append(tokenizer.decode(ar.tokens, skip_special_tokens=True))


def finish(session: Session, mark: str, choice: BudgetChoice | None, questions: list[Question]) -> None:
    """Compares every greedy text with AR's, and writes the report."""
    store = Store(session.config, mark, session.rank)
    # Tables list the methods in their own order, not in the random one of decoding.
    order = available_methods(session.drafter.spec.head_type)
    generations = sorted(store.generations.values(), key=lambda g: (order.index(g.method), g.budget))
    settings = collect_settings(
        session.config,
        session.target,
        session.drafter_folder,
        fingerprint=mark,
        questions=len(questions),
        layout=session.drafter.spec.layout,
        block_size=session.drafter.spec.block_size,
        draft_vocab_size=session.drafter.spec.draft_vocab_size,
        budget_choice=asdict(choice) if choice else None,
        eval_ranks=session.ranks,
    )
    speeds = generate_speeds(store)
    results = build_results(generations, settings, find_divergences(session, store), session.config.seed, speeds)
    write_report(session.config.run_dir, results, generations)
    print(Path(session.config.path("report.md")).read_text())


def generate_speeds(store: Store) -> dict[str, float]:
    """Tokens per second of target.generate by benchmark, the prefill outside, as for our own methods."""
    sums: dict[str, list[float]] = {}
    for (benchmark, *_), (tokens, seconds) in store.generate_times.items():
        total = sums.setdefault(benchmark, [0.0, 0.0])
        total[0], total[1] = total[0] + tokens, total[1] + seconds
    return {name: tokens / seconds for name, (tokens, seconds) in sums.items() if seconds > 0}


def find_divergences(session: Session, store: Store) -> list[Divergence]:
    """A record for each greedy answer that differs from AR's on the same prompt."""
    found = []
    for (benchmark, prompt_id, temperature, method, _), g in store.generations.items():
        ar = store.generations.get((benchmark, prompt_id, temperature, "ar", 0))
        if temperature != 0 or method == "ar" or ar is None or ar.tokens == g.tokens:
            continue
        ids = store.prompt_ids[(benchmark, prompt_id)]
        found.append(
            divergence(
                session.target, ids, ar.tokens, g.tokens, session.config.near_tie, prompt_id=prompt_id, method=method
            )
        )
    return [d for d in found if d is not None]


def fingerprint(config: RunConfig, drafter_folder: str) -> str:
    """Hash of everything that decides what is decoded: options, target, and the drafter's weights."""
    names = (
        "target", "device", "dtype", "seed", "prompts", "max_prompt_length", "benchmarks", "eval_prompts",
        "max_new_tokens", "methods", "temperatures", "budget", "width", "candidates", "beta", "choose_budget",
        "near_tie",
    )  # fmt: skip
    digest = hashlib.sha256(json.dumps({n: getattr(config, n) for n in names}, sort_keys=True).encode())
    for name in ("config.json", "model.safetensors"):
        if not os.path.isfile(os.path.join(drafter_folder, name)):
            raise ValueError(f"drafter: {drafter_folder} holds no {name}")
        with open(os.path.join(drafter_folder, name), "rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    for source in (*config.benchmarks, *config.prompts, os.path.join(drafter_folder, DRAFT_VOCABULARY)):
        if os.path.isfile(source):
            digest.update(Path(source).read_bytes())
    return digest.hexdigest()


def _already_done(config: RunConfig, mark: str) -> bool:
    path = Path(config.path("results.json"))
    return path.is_file() and read_results(path)["settings"].get("fingerprint") == mark


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
