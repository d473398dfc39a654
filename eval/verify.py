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
from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from data.answers import make_folder
from data.chat import encode_prompt, messages_of
from data.prompts import load_prompts
from data.settings import RunConfig, run_stage
from eval.decoding.loop import Request, generate
from eval.environment import hardware, versions
from eval.exactness import divergence
from eval.report import write_whole
from eval.run_eval import Session, chosen_methods, load_session
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
    return Drafter(model, drafter.draft_ids)


def compare(session: Session, name: str, prompts: int, tokens: int) -> list[dict]:
    """Greedy text of every method against AR's: a row a method."""
    config, target = session.config, session.target
    methods = chosen_methods(config, session.drafter.spec.head_type)[1:]
    rows = {
        m: {
            "drafter": name,
            "method": m,
            "prompts": 0,
            "tokens": 0,
            "rounds": 0,
            "proposed": 0,
            "accepted": 0,
            "differences": [],
        }
        for m in methods
    }
    for prompt in tqdm(load_prompts("builtin", prompts, config.seed, "eval"), desc=f"verify, {name} drafter"):
        ids = encode_prompt(target.tokenizer, messages_of(prompt.turns[:1], []))
        ar = generate(target, session.proposer("ar", 0), [Request(ids, tokens)])[0]
        for method in methods:
            answer = generate(target, session.proposer(method, config.budget), [Request(ids, tokens)])[0]
            row = rows[method]
            row["prompts"] += 1
            row["tokens"] += len(answer.tokens)
            row["rounds"] += len(answer.rounds)
            row["proposed"] += sum(r.proposed for r in answer.rounds)
            row["accepted"] += sum(r.accepted for r in answer.rounds)
            found = divergence(
                target, ids, ar.tokens, answer.tokens, config.near_tie, prompt_id=prompt.id, method=method
            )
            if found is not None:
                row["differences"].append(found.to_dict())
    return list(rows.values())


def faults(row: dict) -> list[str]:
    """What is wrong with a row, in words."""
    who = f"{row['method']} ({row['drafter']} drafter)"
    real = [d for d in row["differences"] if not d["near_tie"]]
    found = [f"{who} differs from AR in {len(real)} of {row['prompts']} prompts beyond near ties"] if real else []
    if not row["rounds"] or not row["proposed"]:
        found.append(f"{who} ran {row['rounds']} rounds and proposed {row['proposed']} tokens: nothing was verified")
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
