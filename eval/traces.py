"""Traces: what every method would have proposed on the very same drafts, for the tree viewer of the page.

A few prompts of each benchmark are decoded greedily with DARTree pruned, outside any measured run. Each draft is also
given to the builders of all other methods. How far the target would have followed them is read off the emitted text:
greedy text is the target's own, so that the tokens after the anchor are those it would have accepted.

RUN/traces.json, schema version 1:

- schema_version: 1
- method: the method that decoded, dartree_pruned
- options: budget, width, candidates, beta of the trees
- methods: ids of all methods whose trees are kept, in the order of the tables
- texts: {token id: text} of every token below; a token that is no whole character stands as the tokenizer writes it
- prompts: benchmark, prompt_id, domain, text (of the first turn), prompt_tokens, answer [token ids, the prefill's
  first], stop ("eos" or "length"), rounds (at most 24)
- a round: position (of its anchor in `answer`), emitted (tokens that it appended), trees {method: tree}
- a tree: tokens [ids], parents (0 for children of the anchor, i + 1 for children of node i), scores (log of the
  drafter's probability of the path), ranks (place in the method's best-first order), path (nodes that the target
  accepted, in order of depth), open (the text ended before the tree did: the target may have accepted more).
  That of dartree_pruned is the supertree before pruning: the nodes of rank < budget are what was verified.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch

from data.chat import turn_text

from .decoding.loop import Request, generate
from .decoding.proposals import BUILDERS, DraftProposer, TreeOptions, available_methods
from .decoding.tree import Draft, Tree
from .report import write_whole
from .session import Question, Session

TRACES = "traces.json"
SCHEMA_VERSION = 1
METHOD = "dartree_pruned"
# Enough to look at, and a page of a few megabytes at most.
MAX_ROUNDS, MAX_TOKENS = 24, 96


class TracingProposer(DraftProposer):
    """DARTree pruned for one request, keeping for each draft the trees of all methods.

    Attributes:
        trees: {method: Tree} of each of the first MAX_ROUNDS rounds.
    """

    def __init__(self, target, drafter, options: TreeOptions):
        super().__init__(target, drafter, METHOD, options)
        self.methods = [m for m in available_methods(drafter.spec.head_type) if m in BUILDERS]
        self.trees: list[dict[str, Tree]] = []

    @torch.inference_mode()
    def build(self, draft: Draft) -> Tree:
        if len(self.trees) < MAX_ROUNDS:
            self.trees.append({m: self._tree_of(m, draft) for m in self.methods})
        return super().build(draft)

    def _tree_of(self, method: str, draft: Draft) -> Tree:
        # A budget that the supertree cannot exceed: nothing is pruned, and the ranks say what would be.
        whole = replace(self.options, budget=self.options.width * self.depth) if method == METHOD else self.options
        return BUILDERS[method](draft, self.drafter, self.tables.embed, whole)


def trace_prompts(session: Session, questions: Sequence[Question], per_benchmark: int) -> dict:
    """Decodes the first prompts of each benchmark; returns what traces.json holds, as plain JSON types."""
    chosen: dict[str, list[Question]] = {}
    for question in questions:
        group = chosen.setdefault(question.benchmark, [])
        if len(group) < per_benchmark:
            group.append(question)
    proposer = TracingProposer(session.target, session.drafter, session.proposer(METHOD).options)
    prompts = [trace_prompt(session, proposer, question) for group in chosen.values() for question in group]
    return {
        "schema_version": SCHEMA_VERSION,
        "method": METHOD,
        "options": asdict(proposer.options),
        "methods": proposer.methods,
        "texts": texts_of(session.target.tokenizer, token_ids(prompts)),
        "prompts": prompts,
    }


def trace_prompt(session: Session, proposer: TracingProposer, question: Question) -> dict:
    """The record of one prompt's first turn."""
    ids = session.usable_ids(question.prompt.turns[:1], [], question.prompt.tools)
    proposer.trees = []
    limit = min(session.config.max_new_tokens, MAX_TOKENS)
    answer = generate(session.target, proposer, [Request(ids, limit)])[0]
    rounds, position = [], 0
    for trees, record in zip(proposer.trees, answer.rounds, strict=False):
        following = answer.tokens[position + 1 :]
        rounds.append(
            {
                "position": position,
                "emitted": record.emitted,
                "trees": {
                    method: tree_record(tree, following, proposer.options.budget if method == METHOD else None)
                    for method, tree in trees.items()
                },
            }
        )
        position += record.emitted
    return {
        "benchmark": question.benchmark,
        "prompt_id": question.prompt.id,
        "domain": question.prompt.domain,
        "text": turn_text(question.prompt.turns[0]),
        "prompt_tokens": len(ids),
        "answer": answer.tokens,
        "stop": answer.stop,
        "rounds": rounds,
    }


def tree_record(tree: Tree, following: list[int], budget: int | None = None) -> dict:
    """A tree of one request as JSON, with the path that spells `following`, the text after its anchor.

    Only nodes of rank < `budget` are walked when one is given: the others are not verified.
    """
    size = tree.sizes[0]
    tokens, parents, ranks = (values[0, :size].tolist() for values in (tree.tokens_RN, tree.parents_RN, tree.ranks_RN))
    children = {
        (parent, token): node
        for node, (parent, token, rank) in enumerate(zip(parents, tokens, ranks, strict=True))
        if budget is None or rank < budget
    }
    path: list[int] = []
    for token in following:
        node = children.get((path[-1] + 1 if path else 0, token))
        if node is None:
            break
        path.append(node)
    last = path[-1] + 1 if path else 0
    return {
        "tokens": tokens,
        "parents": parents,
        "scores": [round(score, 4) for score in tree.scores_RN[0, :size].tolist()],
        "ranks": ranks,
        "path": path,
        "open": len(path) == len(following) and any(parent == last for parent, _ in children),
    }


def token_ids(prompts: Sequence[dict]) -> list[int]:
    """Every token of the traces, ascending."""
    found: set[int] = set()
    for prompt in prompts:
        found.update(prompt["answer"])
        for round_ in prompt["rounds"]:
            found.update(*(tree["tokens"] for tree in round_["trees"].values()))
    return sorted(found)


def texts_of(tokenizer, ids: Sequence[int]) -> dict[str, str]:
    """Text of each token by its id; the bare id where there is no tokenizer."""
    if tokenizer is None:
        return {str(token): f"#{token}" for token in ids}
    return {str(token): _text(tokenizer, token) for token in ids}


def _text(tokenizer, token: int) -> str:
    text = tokenizer.decode([token], clean_up_tokenization_spaces=False)
    piece = tokenizer.convert_ids_to_tokens(token)
    if "\ufffd" in text or not text:  # part of a character, or a token without text
        return str(piece if piece is not None else f"#{token}")
    # SentencePiece drops the space of a text's first token.
    return f" {text}" if str(piece).startswith("\u2581") and not text.startswith(" ") else text


def write_traces(session: Session, questions: Sequence[Question]) -> dict | None:
    """Traces `trace_prompts` prompts of each benchmark and writes RUN/traces.json, whole or not at all.

    Returns what it wrote. With the option at 0 there are no traces: those of an earlier run are removed.
    """
    path = Path(session.config.path(TRACES))
    if not session.config.trace_prompts:
        path.unlink(missing_ok=True)
        return None
    traces = trace_prompts(session, questions, session.config.trace_prompts)
    # NaN would be a bug: JSON has none.
    write_whole(path, json.dumps(traces, separators=(",", ":"), allow_nan=False) + "\n")
    return traces


def read_traces(run_dir: str) -> dict | None:
    """The traces of a run; None when it has none. Raises ValueError for another schema version."""
    path = Path(run_dir) / TRACES
    if not path.is_file():
        return None
    traces = json.loads(path.read_text())
    if traces.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(f"{path} has schema_version {traces.get('schema_version')}, this code reads {SCHEMA_VERSION}")
    return traces
