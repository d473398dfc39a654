"""Traces: every method's tree on the same drafts, and what of it the target's text accepts."""

import json
from dataclasses import fields

import pytest
import torch
import yaml

from data.options import RunConfig
from data.prompts import Prompt
from eval import run_eval
from eval import traces as tracing
from eval.decoding.loop import Request, generate
from eval.decoding.tree import Tree
from eval.html_report import page
from eval.session import Question, load_session
from tiny import MASK, tiny_drafter, tiny_target
from tiny_tokenizer import save_tiny_target

METHODS = ["dflash_chain", "domino_chain", "ddtree", "per_node_serial", "dartree_fixed", "dartree_pruned"]


@pytest.fixture(scope="module")
def session(tmp_path_factory):
    root = tmp_path_factory.mktemp("trace")
    folder = save_tiny_target(root / "target")
    tiny_drafter(tiny_target()).model.save_pretrained(root / "run" / "drafter")
    config = RunConfig(
        run_dir=str(root / "run"), target=folder, device="cpu", dtype="fp32", mask_token_id=MASK,
        max_new_tokens=20, max_prompt_length=200, budget=6, width=3, candidates=8, trace_prompts=2,
    )  # fmt: skip
    return load_session(config, str(root / "run" / "drafter"))


def questions():
    texts = {"one": ["what is a fox?", "a </script> b", "never shown"], "two": ["count to ten."]}
    return [Question(name, Prompt(f"{name}-{i}", [t], "chat")) for name, ts in texts.items() for i, t in enumerate(ts)]


@pytest.fixture(scope="module")
def traces(session):
    return tracing.trace_prompts(session, questions(), 2)


def test_the_first_prompts_of_each_benchmark_are_traced(traces):
    assert [p["prompt_id"] for p in traces["prompts"]] == ["one-0", "one-1", "two-0"]
    assert traces["methods"] == METHODS and traces["method"] == "dartree_pruned"
    assert {"budget": 6, "width": 3, "candidates": 8, "beta": -0.2}.items() <= traces["options"].items()
    assert traces["prompts"][1]["text"] == "a </script> b"
    json.dumps(traces, allow_nan=False)


def test_rounds_are_those_of_decoding_with_the_method_itself(session, traces):
    for question, record in zip([q for q in questions() if q.prompt.id != "one-2"], traces["prompts"], strict=True):
        ids = session.usable_ids(question.prompt.turns, [])
        assert record["prompt_tokens"] == len(ids)
        answer = generate(session.target, session.proposer("dartree_pruned"), [Request(ids, 20)])[0]
        assert (record["answer"], record["stop"]) == (answer.tokens, answer.stop)
        assert len(record["rounds"]) == len(answer.rounds) > 1
        position = 0
        for shown, real in zip(record["rounds"], answer.rounds, strict=True):
            tree = shown["trees"]["dartree_pruned"]
            assert (shown["position"], shown["emitted"]) == (position, real.emitted)
            assert sum(rank < 6 for rank in tree["ranks"]) == real.proposed
            assert len(tree["tokens"]) == 3 * session.drafter.spec.num_proposals  # the supertree, W a depth
            position += real.emitted
            if real.emitted == real.accepted + 1:  # not cut at the end
                assert len(tree["path"]) == real.accepted and not tree["open"]


def test_every_tree_accepts_the_longest_path_that_the_text_spells(traces):
    """Against an independent search over all nodes of the tree."""
    walked = 0
    for record in traces["prompts"]:
        for shown in record["rounds"]:
            following = record["answer"][shown["position"] + 1 :]
            assert list(shown["trees"]) == METHODS
            for method, tree in shown["trees"].items():
                spelled = []
                for node, token in enumerate(tree["tokens"]):
                    parent = tree["parents"][node]
                    spelled.append([*(spelled[parent - 1] if parent else []), token])
                verified = [
                    s for s, rank in zip(spelled, tree["ranks"], strict=True) if method != tracing.METHOD or rank < 6
                ]
                longest = max((len(s) for s in verified if s == following[: len(s)]), default=0)
                assert len(tree["path"]) == longest
                assert [tree["tokens"][node] for node in tree["path"]] == following[:longest]
                walked += longest
    assert walked > 0


def test_a_chain_of_a_draft_is_the_chain_that_decoding_proposes(session, traces):
    """The first draft depends on the prompt alone: the same chain comes from decoding with the chain's own method."""
    record, seen = traces["prompts"][0], []
    proposer = session.proposer("domino_chain")
    build = proposer.build
    proposer.build = lambda draft: seen.append(build(draft)) or seen[-1]
    generate(session.target, proposer, [Request(session.usable_ids(["what is a fox?"], []), 3)])
    chain = record["rounds"][0]["trees"]["domino_chain"]
    assert chain["tokens"] == seen[0].tokens_RN[0].tolist()
    assert chain["scores"] == pytest.approx(seen[0].scores_RN[0].tolist(), abs=1e-4)


def test_paths_of_a_known_tree():
    tree = Tree(
        tokens_RN=torch.tensor([[5, 6, 7, 8, 9]]),
        parents_RN=torch.tensor([[0, 0, 2, 3, 0]]),
        depths_RN=torch.tensor([[1, 1, 2, 3, 1]]),
        scores_RN=torch.tensor([[-1.0, -0.5, -0.75, -1.123456, -9.0]]),
        ranks_RN=torch.tensor([[2, 0, 1, 3, 4]]),
        sizes=[4],  # the last node is padding
    )
    record = tracing.tree_record(tree, [6, 7, 4])
    assert record["path"] == [1, 2] and not record["open"]
    assert record["tokens"] == [5, 6, 7, 8] and record["scores"] == [-1.0, -0.5, -0.75, -1.1235]
    assert tracing.tree_record(tree, [6, 7])["open"]  # the text ended, node 8 was still to come
    assert not tracing.tree_record(tree, [6, 7, 8])["open"]
    assert tracing.tree_record(tree, [9])["path"] == []
    assert tracing.tree_record(tree, [6, 7, 8], budget=2)["path"] == [1, 2]
    assert not tracing.tree_record(tree, [6, 7], budget=2)["open"]
    assert tracing.tree_record(tree, [])["path"] == [] and tracing.tree_record(tree, [])["open"]


def test_an_evaluation_ends_with_the_page(session, tmp_path):
    benchmark, config = tmp_path / "few.jsonl", tmp_path / "config.yaml"
    benchmark.write_text("".join(json.dumps({"turns": q.prompt.turns}) + "\n" for q in questions()))
    own = {f.name: getattr(session.config, f.name) for f in fields(RunConfig) if f.name != "training"}
    changed = dict(
        run_dir=str(tmp_path / "run"), drafter=session.drafter_folder, benchmarks=[str(benchmark)],
        prompts=[str(benchmark)], choose_budget=False, methods=["dartree_pruned"], max_new_tokens=4, trace_prompts=1,
    )  # fmt: skip
    config.write_text(yaml.safe_dump({**own, **changed}))
    assert run_eval.main([str(config)]) == 0
    traces = tracing.read_traces(tmp_path / "run")
    assert [p["benchmark"] for p in traces["prompts"]] == ["few"]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (tmp_path / "run" / "report.html").read_text() == page(results, traces)


class Pieces:
    """A tokenizer of three kinds of pieces: SentencePiece's, bytes of a character, and a token without text."""

    pieces = {0: "\u2581the", 1: "<0xE2>", 2: "<pad>", 3: "ing", 4: "Ġa"}
    texts = {0: "the", 1: "\ufffd", 2: "", 3: "ing", 4: " a"}

    def decode(self, ids, clean_up_tokenization_spaces):
        return "".join(self.texts[i] for i in ids)

    def convert_ids_to_tokens(self, token):
        return self.pieces.get(token)


def test_texts_of_tokens_keep_spaces_and_never_break_a_character():
    texts = tracing.texts_of(Pieces(), range(5))
    assert texts == {"0": " the", "1": "<0xE2>", "2": "<pad>", "3": "ing", "4": " a"}
    assert tracing.texts_of(None, [7]) == {"7": "#7"}


def test_every_token_of_the_traces_has_a_text(traces):
    for record in traces["prompts"]:
        trees = [tree for shown in record["rounds"] for tree in shown["trees"].values()]
        used = set(record["answer"]).union(*(tree["tokens"] for tree in trees))
        assert {str(token) for token in used} <= traces["texts"].keys()


def test_long_answers_are_cut_and_tracing_can_be_off(session, monkeypatch):
    monkeypatch.setattr(tracing, "MAX_ROUNDS", 2)
    monkeypatch.setattr(tracing, "MAX_TOKENS", 9)
    written = tracing.write_traces(session, questions()[:1])
    assert len(written["prompts"][0]["answer"]) <= 9 and len(written["prompts"][0]["rounds"]) == 2
    assert tracing.read_traces(session.config.run_dir) == written
    monkeypatch.setattr(session.config, "trace_prompts", 0)
    assert tracing.write_traces(session, questions()) is None
    assert tracing.read_traces(session.config.run_dir) is None  # those of the earlier run are gone
