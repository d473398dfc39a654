"""Stage `inspect`: what a drafter checkpoint is, what other programs make of it, and whether it drafts for a target.

    bash launch.sh inspect DRAFTER [--target T] [--allow_extra]
    bash launch.sh inspect [CONFIG] [--target T]

DRAFTER is a folder or a Hub id in any known format. With --target a few built-in prompts are answered, for a minute at
most: a checkpoint that loads cleanly but is read in the wrong layout accepts next to nothing, which shows here (exit
code 1). Writes nothing.
"""

from __future__ import annotations

import copy
import sys
import time
from dataclasses import dataclass, replace

from transformers.utils.logging import disable_progress_bar

from data.prompts import load_prompts
from data.settings import RunConfig, StageError, run_stage
from eval.decoding.loop import generate
from eval.decoding.proposals import DraftProposer, TreeOptions, available_methods
from eval.decoding.request import Request
from eval.engines import engines
from eval.export import drafter_argument
from eval.session import Session, load_session
from models.checkpoint import Drafter, finished_drafter, load_drafter

PROMPTS, TOKENS, SECONDS = 4, 24, 60.0
# A drafter read in the wrong layout accepts under 1 % of its chains; trees hit some tokens by chance.
WRONG = 1.1
CHAINS = ("dflash_chain", "domino_chain", "markov_chain")
METHODS = (*CHAINS, "dartree_pruned")


def main(argv: list[str]) -> int:
    checked = any(word.split("=")[0] == "--target" for word in argv)
    return run_stage("inspect", drafter_argument("inspect", argv), lambda config: inspect(config, checked))


def inspect(config: RunConfig, check: bool) -> None:
    """Prints everything known about a drafter. Raises StageError when it drafts for no token of the given target."""
    disable_progress_bar()  # transformers' own, for loading weights
    source = finished_drafter(config.run_dir, config.drafter)
    drafter = load_drafter(source, dtype=None, allow_extra=config.allow_extra)
    print("\n".join([f"drafter: {drafter.describe()}", *sizes(drafter), *parameters(drafter)]))
    for name, does in engines(drafter).items():
        print(f"{name}: {does}")
    if check:
        session = load_session(config, source)
        taus = measure(session)
        print(table(taus))
        print(verdict(session, taus))


def sizes(drafter: Drafter) -> list[str]:
    """Sizes of the layers and of the vocabulary, in lines."""
    config, rope = drafter.model.config, drafter.model.config.rope_parameters
    words = "" if drafter.draft_ids is None else f", of which it proposes {len(drafter.draft_ids)}"
    return [
        f"layers: {config.num_hidden_layers} of hidden size {config.hidden_size}, {config.num_attention_heads} heads "
        f"of {config.head_dim} ({config.num_key_value_heads} key/value), MLP {config.intermediate_size}, rope "
        f"{rope['rope_type']} theta {rope['rope_theta']:g}, {str(drafter.model.dtype).removeprefix('torch.')}",
        f"vocabulary: {config.vocab_size} tokens{words}",
    ]


def parameters(drafter: Drafter) -> list[str]:
    """Parameter counts by part."""
    parts: dict[str, int] = {}
    head = {id(p) for p in drafter.model.head.parameters()} if drafter.model.head is not None else set()
    for name, parameter in drafter.model.named_parameters():
        part = name.split(".")[0]
        part = "head" if id(parameter) in head else {"fc": "context", "hidden_norm": "context"}.get(part, part)
        parts[part] = parts.get(part, 0) + parameter.numel()
    for name, table_VD in (("own embedding", drafter.embedding_VD), ("own LM head", drafter.head_VD)):
        if table_VD is not None:
            parts[name] = table_VD.numel()
    listed = " + ".join(f"{name} {count:,}" for name, count in parts.items())
    return [f"parameters: {sum(parts.values()):,} = {listed}"]


@dataclass
class Acceptance:
    """What one method did on the prompts. tau: tokens emitted a round, the target's own included."""

    method: str
    prompts: int = 0
    rounds: int = 0
    emitted: int = 0

    @property
    def tau(self) -> float:
        return self.emitted / self.rounds if self.rounds else 0.0


def measure(session: Session, seconds: float = SECONDS) -> list[Acceptance]:
    """Greedy acceptance of a few methods, prompt after prompt until the time is over."""
    started, config = time.monotonic(), session.config
    found = [Acceptance(m) for m in available_methods(session.drafter.spec.head_type) if m in METHODS]
    options = TreeOptions(config.budget, config.width, config.candidates, config.beta)
    proposers = [DraftProposer(session.target, session.drafter, a.method, options) for a in found]
    for prompt in load_prompts("builtin", PROMPTS, config.seed, "eval"):
        ids = session.usable_ids(prompt.turns[:1], [], prompt.tools)
        if ids is None:
            continue
        for acceptance, proposer in zip(found, proposers, strict=True):
            answer = generate(session.target, proposer, [Request(ids, TOKENS)])[0]
            acceptance.prompts += 1
            acceptance.rounds += len(answer.rounds)
            acceptance.emitted += sum(r.accepted + 1 for r in answer.rounds)
        if time.monotonic() - started > seconds:
            break
    if not found[0].rounds:
        raise StageError("no built-in prompt could be answered: the target's template rejects them or ends at once")
    return found


def table(taus: list[Acceptance]) -> str:
    lines = ["| method | prompts | rounds | tau |", "|---|---:|---:|---:|"]
    return "\n".join(lines + [f"| {a.method} | {a.prompts} | {a.rounds} | {a.tau:.2f} |" for a in taus])


def verdict(session: Session, taus: list[Acceptance]) -> str:
    """A sentence about the fit. Raises StageError when next to nothing is accepted, with what else might be wrong."""
    best = best_chain(taus)
    if best.tau >= WRONG:
        return f"verdict: it drafts for this target (tau {best.tau:.2f} with {best.method})"
    other = best_chain(measure(other_layout(session))).tau
    spec = session.drafter.spec
    hint = (
        f"read as {'fill-in' if spec.shift_label else 'shifted'} its tau is {other:.2f}: shift_label (or "
        "sample_from_anchor) in its config.json is wrong"
        if other > max(WRONG, 1.5 * best.tau - 0.5)
        else "the other layout gives no more: look at the target, the taps, the mask id and the tokenizer"
    )
    raise StageError(f"tau {best.tau:.2f}: likely a wrong layout or another target's drafter; {hint}")


def best_chain(taus: list[Acceptance]) -> Acceptance:
    return max((a for a in taus if a.method in CHAINS), key=lambda a: a.tau)


def other_layout(session: Session) -> Session:
    """The same session with the drafter's slots read one token further, or one less far."""
    model = copy.copy(session.drafter.model)  # the same weights
    model.spec = replace(model.spec, shift_label=not model.spec.shift_label)
    return replace(session, drafter=replace(session.drafter, model=model))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
