"""TRAPS 54: all plans are timed alike, warm from the start and with as many looks at the clock in every round."""

import torch

from data.options import RunConfig
from eval import ask
from eval.decoding import loop
from eval.decoding.loop import Batch, Request, generate
from eval.decoding.proposals import DraftProposer, TreeOptions, available_methods, make_proposer
from eval.plans import chosen_methods, main_plans, sweep_points
from eval.records import MAIN
from eval.run_eval import Work, decode
from eval.session import Session, load_benchmarks
from eval.store import Store
from models.target import Target
from tiny import tiny_drafter, tiny_target
from tiny_tokenizer import tiny_tokenizer


def test_every_plan_is_warmed_up_before_anything_of_its_phase_is_recorded(tmp_path, monkeypatch):
    config = RunConfig(
        run_dir=str(tmp_path), device="cpu", dtype="fp32", eval_prompts=1, max_prompt_length=300, max_new_tokens=4,
        budget=8, width=3, candidates=8, temperatures=[0.0, 1.0], sweep_budget=[4, 6], sweep_prompts=1,
    )  # fmt: skip
    target = Target(tiny_target().model, tiny_tokenizer())
    session = Session(config, target, tiny_drafter(target), "")
    methods = chosen_methods(config, "domino")
    plans = {t: main_plans(config, session.drafter.spec, methods, None, t) for t in config.temperatures}
    asked, store, log = load_benchmarks(session), Store(config, "mark", 0), []
    work = Work(asked, plans, asked[0], sweep_points(config, session.drafter.spec, methods))
    made, add, generate = session.proposer_of, store.add, ask.generate

    def answer(target, proposer, requests, *args, **kwargs):
        log.append(("decode", requests[0].max_new_tokens))
        return generate(target, proposer, requests, *args, **kwargs)

    monkeypatch.setattr(session, "proposer_of", lambda plan: log.append(("plan", plan.id)) or made(plan))
    monkeypatch.setattr(store, "add", lambda g, ids: log.append((g.phase, g.temperature)) or add(g, ids))
    monkeypatch.setattr(ask, "generate", answer)
    decode(session, store, work)
    phases = [*((MAIN, t, own) for t, own in plans.items()), (work.sweep_phase, 0.0, work.sweep_plans)]
    assert len(log) == sum(5 * len(own) for _, _, own in phases)
    start = 0
    for phase, temperature, own in phases:
        # Each plan once, shortly; then every answer: plan, decoding, record.
        warm, counted = log[start : start + 2 * len(own)], log[start + 2 * len(own) : start + 5 * len(own)]
        assert warm == [e for p in own for e in (("plan", p.id), ("decode", ask.WARM_UP_TOKENS))]
        assert sorted(counted[::3]) == sorted(("plan", p.id) for p in own)
        assert counted[2::3] == [(phase, temperature)] * len(own)
        start += 5 * len(own)


def test_the_first_draft_and_every_pass_of_the_drafter_are_inside_the_clock(monkeypatch):
    """A look at the clock takes 1, a pass of the drafter 100; nothing else takes time.

    The third request joins beside the first: its prompt is read in a pass of its own, before its first round.
    """
    clock, drafter_pass = [0.0], DraftProposer._pass

    def look(self):
        clock[0] += 1
        return clock[0]

    def slow_pass(self, *args):
        clock[0] += 100
        return drafter_pass(self, *args)

    monkeypatch.setattr(loop.Clock, "now", look)
    monkeypatch.setattr(DraftProposer, "_pass", slow_pass)
    target = tiny_target()
    target.eos_ids = ()
    proposer = DraftProposer(
        target, tiny_drafter(target), "dartree_pruned", TreeOptions(budget=8, width=3, candidates=8)
    )
    for answer in generate(target, proposer, [Request([5, 6, 7], 12), Request([8, 9], 5)], slots=1):
        assert answer.rounds[0].draft == 101.0
        parts = [r.draft + r.tree + r.verify + r.commit for r in answer.rounds]
        # Between two rounds, and after the prefill, one look.
        assert parts == [104.0] * len(parts) and answer.seconds == 105.0 * len(parts)
    requests = [Request([5, 6, 7], 40), Request([8, 9], 3), Request([10, 11], 3)]
    first, second, third = generate(target, proposer, requests, slots=2)
    assert len(first.rounds) > len(second.rounds) + len(third.rounds)
    assert second.seconds == 105.0 * len(second.rounds) and third.seconds == 100.0 + 105.0 * len(third.rounds)
    # The third one's prefill, between two looks, and its pass took the first one's time too.
    assert first.seconds == 102.0 + 105.0 * len(first.rounds)


def test_a_round_of_ar_looks_at_the_clock_as_often_as_any_other(monkeypatch):
    """Each look drains the device's queue, which costs a fast method's round more than a slow one's."""
    looks = []
    now = loop.Clock.now
    monkeypatch.setattr(loop.Clock, "now", lambda self: looks.append(1) or now(self))
    target = tiny_target()
    drafter, counts = tiny_drafter(target), {}
    for method in available_methods("domino"):
        proposer = make_proposer(target, drafter, method, TreeOptions(budget=8, width=3, candidates=8))
        batch = Batch(target, proposer, [Request([5, 6, 7], 12)])
        assert batch.admit()
        looks.clear()
        with torch.inference_mode():
            batch.round()
        counts[method] = len(looks)
    assert set(counts.values()) == {5}, counts
