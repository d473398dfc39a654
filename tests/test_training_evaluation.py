"""Decoding while training: the right figures, nothing disturbed, the best checkpoint kept."""

import json
import random

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from data.benchmarks import BUILTIN_COUNT, load_benchmark
from data.settings import RunConfig
from eval.decoding.loop import Request, generate
from eval.held_out import held_out
from eval.metrics import acceptance_by_position, tau_mean
from eval.plans import configured_plan
from eval.records import Generation
from eval.session import Session
from models.checkpoint import load_drafter
from models.target import Target
from tiny import tiny_drafter, tiny_target
from trainers import logged, make_trainer
from training.evaluation import TrainingEvaluation, decoding_copy
from training_runs import write_prompts, write_target

ASKED = dict(train_eval_prompts=5, eval_prompts=3, max_new_tokens=10, budget=8, width=3, candidates=8)
METHODS = ("dflash_chain", "domino_chain", "dartree_pruned")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_target(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def target(tokenizer) -> Target:
    target = tiny_target()
    target.tokenizer = tokenizer
    return target


@pytest.fixture
def asked(tmp_path) -> dict:
    return dict(benchmarks=[write_prompts(tmp_path / "asked.jsonl", 12)], **ASKED)


def evaluating(config, target, model) -> TrainingEvaluation:
    return TrainingEvaluation(config, target, model, 0, 1)


class Scripted:
    """An evaluation that says what the test wants."""

    prompts: list = []

    def __init__(self, *taus):
        self.taus = list(taus)

    def __call__(self, *_):
        return {"tau_dartree_pruned": self.taus.pop(0)}


def test_figures_are_those_of_decoding_with_the_saved_weights(tmp_path, target, asked):
    trainer = make_trainer(
        tmp_path, target=target, options=asked, evaluation=evaluating, max_steps=4, eval_strategy="steps", eval_steps=4,
        save_strategy="steps", save_steps=4,
    )  # fmt: skip
    trainer.train()
    line = json.loads((tmp_path / "log.jsonl").read_text().splitlines()[-1])
    assert line["step"] == 4 and line["eval_seconds"] > 0
    drafter = load_drafter(str(tmp_path / "checkpoints" / "checkpoint-4"))
    session = Session(trainer.config, target, drafter, "")
    requests = [request for _, request in trainer.evaluation.requests]
    assert len(requests) == 5
    ar = generate(target, session.proposer("ar"), requests)
    for method in METHODS:
        answers = generate(target, session.proposer(method), requests)
        plan = configured_plan(trainer.config, drafter.spec, method)
        own = [Generation.of("", str(n), plan, 0.0, answer) for n, answer in enumerate(answers)]
        assert line[f"eval_tau_{method}"] == pytest.approx(tau_mean(own))
        for row in acceptance_by_position(own):
            assert line[f"eval_accepted_{row['depth']}_{method}"] == pytest.approx(row["conditional"])
        assert line[f"eval_equal_ar_{method}"] == 1.0 and [a.tokens for a in answers] == [a.tokens for a in ar]


def test_training_is_not_disturbed(tmp_path, target, asked):
    """Losses, weights, random states, modes and gradients are those of a run without evaluation, bit for bit."""
    plain = make_trainer(tmp_path / "a", target=target, max_steps=6)
    watched = make_trainer(
        tmp_path / "b", target=target, options=asked, evaluation=evaluating, max_steps=6, eval_strategy="steps",
        eval_steps=2,
    )  # fmt: skip
    states = []
    evaluate = watched.evaluate

    def around(*args, **kwargs):
        torch.manual_seed(5)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), watched.model.training
        result = evaluate(*args, **kwargs)
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), watched.model.training
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]
        assert all(p.requires_grad and not p.is_inference() for p in watched.model.parameters())
        states.append(after)
        return result

    plain.train()
    watched.evaluate = around
    watched.train()
    assert len(states) == 3 and logged(plain) == logged(watched)
    for (name, a), b in zip(plain.model.named_parameters(), watched.model.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_ar_is_decoded_once_and_examples_tell_drafted_from_accepted(target, asked):
    config, drafter = RunConfig(**asked), tiny_drafter(target, block_size=4)
    evaluation = TrainingEvaluation(config, target, drafter.model, 0, 1)
    first = evaluation(drafter.model, None, 1, list)
    kept = evaluation._ar
    second = evaluation(drafter.model, None, 2, list)
    assert evaluation._ar is kept and {**first, "seconds": 0} == {**second, "seconds": 0}
    words, prompt = target.tokenizer.decode, evaluation.prompts[0]
    ids = target.tokenizer(prompt.turns[0])["input_ids"]
    (answer,) = generate(target, Session(config, target, drafter, "").proposer("domino_chain"), [Request(ids, 10)])
    assert len(evaluation.examples) == len(answer.rounds)
    text = words(answer.tokens[:1])
    for example, record in zip(evaluation.examples, answer.rounds, strict=True):
        assert example.step == 2 and example.prompt == prompt.turns[0]
        assert len(example.drafted.split()) == 3 and len(example.accepted.split()) == record.accepted
        assert example.drafted.startswith(example.accepted)
        text = " ".join(filter(None, [text, example.accepted, example.bonus]))
    assert text.split()[: len(answer.tokens)] == words(answer.tokens).split()


def test_ranks_share_the_prompts_and_agree(target, asked):
    config, drafter = RunConfig(**asked), tiny_drafter(target, block_size=4)
    whole = TrainingEvaluation(config, target, drafter.model, 0, 1)
    ranks = [TrainingEvaluation(config, target, drafter.model, rank, 2) for rank in range(2)]
    assert [len(r.requests) for r in ranks] == [3, 2]
    parts: list = []
    for rank in ranks:
        rank(drafter.model, None, 1, lambda own: parts.extend(own) or parts)
    expected = whole(drafter.model, None, 1, list)
    pooled = ranks[0](drafter.model, None, 1, lambda own: parts)
    assert {**pooled, "seconds": 0} == {**expected, "seconds": 0}
    # More ranks than prompts: the last one has nothing to decode, and still answers.
    idle = TrainingEvaluation(config, target, drafter.model, 5, 6)
    assert idle.requests == [] and idle(drafter.model, None, 1, lambda own: parts)["tau_dartree_pruned"] >= 1


def test_its_own_length_and_whole_chains(target, asked):
    """`train_eval_tokens` tokens of the same prompts; a threshold of `eval` neither cuts chains nor needs a head."""
    drafter = tiny_drafter(target, block_size=4)
    whole = TrainingEvaluation(RunConfig(**asked), target, drafter.model, 0, 1)
    config = RunConfig(**asked, train_eval_tokens=4, confidence_threshold=0.9)
    short = TrainingEvaluation(config, target, drafter.model, 0, 1)
    assert [r.prompt_ids for _, r in short.requests] == [r.prompt_ids for _, r in whole.requests]
    assert {r.max_new_tokens for _, r in short.requests} == {4} != {r.max_new_tokens for _, r in whole.requests}
    assert short(drafter.model, None, 1, list)["equal_ar_domino_chain"] == 1.0
    sure = tiny_drafter(target, block_size=4, confidence_head=True)
    evaluations = [evaluating(RunConfig(**asked, confidence_threshold=t), target, sure.model) for t in (0.0, 1.0)]
    plain, cut = (evaluation(sure.model, None, 1, list) for evaluation in evaluations)
    assert {**plain, "seconds": 0} == {**cut, "seconds": 0}


def test_keys_and_values_that_do_not_fit_are_refused_before_training(target, asked):
    drafter = tiny_drafter(target, block_size=4)
    with pytest.raises(ValueError, match=r"max_cache_gb 1e-05 holds .* for each of 5 requests at once"):
        evaluating(RunConfig(**asked, max_cache_gb=1e-5), target, drafter.model)
    # A rank without prompts has none to hold.
    assert TrainingEvaluation(RunConfig(**asked, max_cache_gb=1e-5), target, drafter.model, 5, 6).requests == []


def anything(*_):
    return [1]


def test_prompts_that_the_report_uses_are_not_looked_at(tmp_path, asked):
    everything = held_out(RunConfig(**{**asked, "eval_prompts": 1}), anything, 11)
    assert len(everything) == 11
    assert [p.id for p in held_out(RunConfig(**asked), anything, 5)] == [p.id for p in everything[2:7]]
    all_of_them = {**asked, "eval_prompts": 12}
    with pytest.raises(
        ValueError, match="beyond the first 12 .*lower eval_prompts or give --train_eval_sources or so$"
    ):
        held_out(RunConfig(**all_of_them), anything, 5, " or so")
    other = write_prompts(tmp_path / "other.jsonl", 4, seed=9)
    assert len(held_out(RunConfig(**all_of_them, train_eval_sources=[other]), anything, 5)) == 4


def test_prompts_that_are_decoded_several_at_once_are_not_looked_at_either(tmp_path, asked):
    """Of the first benchmark only, and only where that is measured."""
    everything = held_out(RunConfig(**{**asked, "eval_prompts": 1}), anything, 11)
    several = dict(concurrency=[1, 4], concurrency_prompts=5)
    assert held_out(RunConfig(**asked, **several), anything, 3) == everything[4:7]
    assert held_out(RunConfig(**asked, concurrency_prompts=5), anything, 3) == everything[2:5]
    more = RunConfig(**{**asked, "eval_prompts": 7}, **several)
    assert held_out(more, anything, 3) == everything[6:9]
    first = write_prompts(tmp_path / "first.jsonl", 4, seed=9)
    second = RunConfig(**{**asked, "benchmarks": [first, *asked["benchmarks"]]}, **several)
    assert held_out(second, anything, 4) == everything[2:4]


def test_as_many_as_published_are_kept_for_the_report():
    """eval_prompts 0: of the generator, which makes as many as asked, and of a file, which then has none left."""
    builtin = load_benchmark("builtin", BUILTIN_COUNT + 5, 0).prompts
    assert held_out(RunConfig(benchmarks=["builtin"], eval_prompts=0), anything, 4) == builtin[BUILTIN_COUNT:-1]


def test_the_best_and_the_last_checkpoint_survive_rotation(tmp_path):
    """tau 1.2, 3.0, 2.0, 2.5, 1.0: step 4 is the best, and is saved although save_steps is 5."""
    script = Scripted(1.2, 3.0, 2.0, 2.5, 1.0)
    trainer = make_trainer(
        tmp_path, evaluation=lambda *_: script, max_steps=10, eval_strategy="steps", eval_steps=2,
        metric_for_best_model="tau_dartree_pruned", save_strategy="steps", save_steps=5, save_total_limit=1,
    )  # fmt: skip
    trainer.train()
    folder = tmp_path / "checkpoints"
    assert {p.name for p in folder.glob("checkpoint-*")} == {"checkpoint-4", "checkpoint-10"}
    assert (folder / "best").readlink().name == "checkpoint-4" and load_drafter(str(folder / "best"))
    state = json.loads((folder / "checkpoint-10" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(folder / "checkpoint-4") and state["best_metric"] == 3.0
    own = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())
    assert own["best_model_checkpoint"] == str(folder / "checkpoint-4") and own["best_global_step"] == 4


def test_the_last_step_is_evaluated_too(tmp_path):
    script = Scripted(1.0, 2.0)
    trainer = make_trainer(
        tmp_path, evaluation=lambda *_: script, max_steps=5, eval_strategy="steps", eval_steps=4,
        metric_for_best_model="tau_dartree_pruned",
    )  # fmt: skip
    trainer.train()
    assert script.taus == []
    assert [(s["step"], s["eval_tau_dartree_pruned"]) for s in trainer.state.log_history if "eval_runtime" not in s
            and "eval_tau_dartree_pruned" in s] == [(4, 1.0), (5, 2.0)]  # fmt: skip


def test_the_decoding_copy_uses_masks_and_devices_of_decoding(target):
    """Training may run flex attention, which takes no masks of trees, and its ids lie on the CPU."""
    model = tiny_drafter(target, draft_vocab_size=12).model
    model.config._attn_implementation = "flex_attention"
    copy = decoding_copy(model, torch.arange(4, 64, 5), target)
    assert copy.model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "flex_attention"
    assert copy.draft_ids.device == target.device
