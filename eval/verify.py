"""Proof of losslessness: in fp32, every method emits exactly the target's own tokens.

    bash launch.sh verify [CONFIG] [--key value ...]

Runs 50 held-out prompts x 32 tokens with the trained drafter and 8 x 16 with a random one, greedy, all methods, and
compares token by token with autoregressive decoding. A method that never proposes or never runs a round fails too, so
that a silent fall-back to AR cannot pass. Exit code 1 when a difference is no near tie. In bf16 (`--dtype bf16`)
differences are counted, and each must be a near tie. Writes RUN/verify.json.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from tqdm import tqdm

from data.answers import make_folder
from data.chat import ChatFormat, encode_prompt, messages_of
from data.prompts import load_prompts
from data.settings import RunConfig, run_stage
from eval.baseline import greedy
from eval.decoding.loop import Answer, Request, generate
from eval.environment import hardware, versions
from eval.exactness import divergence
from eval.plans import chosen_methods
from eval.records import Divergence
from eval.report import write_whole
from eval.session import Session, load_session
from models.checkpoint import Drafter, finished_drafter

TRAINED, RANDOM = (50, 32), (8, 16)  # prompts, tokens


class Failed(Exception):
    """The proof did not hold; the message is the verdict."""


def main(argv: list[str]) -> int:
    try:
        return run_stage("verify", argv, verify_run)
    except Failed as error:
        print(f"verify: {error}", file=sys.stderr)
        return 1


def verify_run(config: RunConfig) -> None:
    """Runs both parts and writes RUN/verify.json. Raises Failed when a method's text is not the target's."""
    config = replace(config, dtype="fp32" if config.dtype == "auto" else config.dtype)
    session = load_session(config, finished_drafter(config.run_dir, config.drafter))
    rows = compare(session, "trained", *TRAINED)
    random_session = replace(session, drafter=random_drafter(session.drafter))
    rows += compare(random_session, "random", *RANDOM)
    result = {"dtype": str(session.target.dtype), "rows": rows, "hardware": hardware(), "versions": versions()}
    make_folder(config.run_dir, "run_dir")
    write_whole(Path(config.path("verify.json")), json.dumps(result, indent=1) + "\n")
    print(table(rows))
    if len(rows) == 2:  # ar alone, for both drafters
        raise ValueError(f"methods {' '.join(config.methods)}: there is nothing to compare with ar")
    problems = [fault for row in rows for fault in faults(row)]
    if problems:
        raise Failed("; ".join(problems))
    print(f"verify: every method emits the target's own tokens in {result['dtype'].removeprefix('torch.')}")


def random_drafter(drafter: Drafter) -> Drafter:
    """The same shapes with random weights: proposals are nonsense, the text must not change."""
    torch.manual_seed(0)
    model = copy.deepcopy(drafter.model)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    return replace(drafter, model=model)


def compare(session: Session, name: str, prompts: int, tokens: int) -> list[dict]:
    """Greedy text of every method against AR's: a row a method."""
    config, target = session.config, session.target
    methods = chosen_methods(config, session.drafter.spec.head_type)
    rows = {method: Row(name, method) for method in methods}
    for prompt in tqdm(load_prompts("builtin", prompts, config.seed, "eval"), desc=f"verify, {name} drafter"):
        messages = messages_of(prompt.turns[:1], [])
        ids = encode_prompt(target.tokenizer, messages, prompt.tools, ChatFormat.of(config))
        ar = generate(target, session.proposer("ar", 0), [Request(ids, tokens)])[0]
        for method in methods:
            if method == "ar":
                # Our AR is the reference of the methods, transformers' own loop that of our AR.
                answer, expected = ar, greedy(target, ids, tokens)
            else:
                answer = generate(target, session.proposer(method, config.budget), [Request(ids, tokens)])[0]
                expected = ar.tokens
            names = {"prompt_id": prompt.id, "method": method}
            rows[method].add(answer, divergence(target, ids, expected, answer.tokens, config.near_tie, **names))
    return [row.to_dict() for row in rows.values()]


@dataclass
class Row:
    """What one method did over all prompts."""

    drafter: str
    method: str
    prompts: int = 0
    tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    differences: list[Divergence] = field(default_factory=list)

    def add(self, answer: Answer, difference: Divergence | None) -> None:
        self.prompts += 1
        self.tokens += len(answer.tokens)
        self.rounds += len(answer.rounds)
        self.proposed += sum(r.proposed for r in answer.rounds)
        self.accepted += sum(r.accepted for r in answer.rounds)
        self.differences += [difference] if difference else []

    def to_dict(self) -> dict:
        return {**vars(self), "differences": [d.to_dict() for d in self.differences]}


def faults(row: dict) -> list[str]:
    """What is wrong with a row, in words."""
    who = f"{row['method']} ({row['drafter']} drafter)"
    real = [d for d in row["differences"] if not d["near_tie"]]
    reference = "target.generate" if row["method"] == "ar" else "AR"
    found = (
        [f"{who} differs from {reference} in {len(real)} of {row['prompts']} prompts beyond near ties"] if real else []
    )
    if row["method"] == "ar":
        return found
    if not row["rounds"] or not row["proposed"]:
        found.append(f"{who} ran {row['rounds']} rounds and proposed {row['proposed']} tokens: nothing was verified")
    if row["drafter"] == "trained" and not row["accepted"]:
        found.append(f"{who} had no token accepted: the drafter or its layout is wrong, and little was verified")
    return found


def table(rows: list[dict]) -> str:
    lines = [
        "| drafter | method | prompts | tokens | rounds | proposed | accepted | different | near ties |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        near = sum(d["near_tie"] for d in row["differences"])
        cells = [row[k] for k in ("drafter", "method", "prompts", "tokens", "rounds", "proposed", "accepted")]
        lines.append("| " + " | ".join(str(c) for c in [*cells, len(row["differences"]), near]) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
