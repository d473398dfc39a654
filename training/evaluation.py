"""Acceptance measured while training: held-out prompts, real decoding, the weights of this moment.

Teacher-forced accuracy says little of acceptance (TRAPS 32), so every `eval_steps` the ranks share the prompts, decode
them through the evaluation's own loop, and pool what they recorded. Nothing of training is touched: the drafter that
decodes is a copy in the target's dtype, and random states are restored.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import TrainerCallback
from transformers.initialization import no_init_weights

from data.chat import turn_text
from data.settings import RunConfig
from eval.decoding.loop import Request, generate
from eval.decoding.proposals import available_methods
from eval.decoding.request import check_requests
from eval.held_out import held_out
from eval.metrics import acceptance_by_position, tau_mean, tau_rounds
from eval.plans import CHAINS, configured_plan
from eval.records import AR, Generation
from eval.session import Session
from models.checkpoint import Drafter
from models.drafter import DFlashDraftModel
from models.fitting import fit_to_target
from models.target import Target
from training.adapters import full_weights

REQUESTS = 16  # decoded at once on a rank: bounds the logits of their trees


@dataclass
class Example:
    """One round of one prompt, in words.

    Attributes:
        drafted: the proposed chain; accepted: its part that the target took; bonus: the target's own next token, empty
            where the answer ended before it.
    """

    step: int
    prompt: str
    round: int
    drafted: str
    accepted: str
    bonus: str


class TrainingEvaluation:
    """Decodes the same prompts at every call, `train_eval_tokens` each. Chains are whole: no confidence cuts them.

    Attributes:
        methods: the drafter's chains, and DARTree; AR is decoded once and kept.
        requests: this rank's share, as (prompt id, request).
        examples: rounds of the first prompt at the last call, on the first rank.
    """

    def __init__(self, config: RunConfig, target: Target, model: DFlashDraftModel, rank: int, ranks: int):
        """Raises ValueError for benchmarks that cannot be read, when no prompt is short enough, and when the keys and
        values of the prompts decoded at once exceed `max_cache_gb`."""
        tokens = config.train_eval_tokens or config.max_new_tokens
        self.config = replace(config, confidence_threshold=0.0)
        self.target, self.methods = target, decoded_methods(model.spec.head_type)
        session = Session(self.config, target, Drafter(model), "")
        # Usable are those that the eval stage can answer: what it reports stays the same prompts.
        usable = session.usable_ids
        self.prompts = held_out(config, usable, config.train_eval_prompts, ", or set eval_strategy to no")
        own = self.prompts[rank::ranks]
        self.requests = [(p.id, Request(usable(p.turns[:1], [], p.tools), tokens, p.id)) for p in own]
        self.rank, self.examples = rank, []
        self._ar: list[Generation] | None = None
        slots, requests = min(REQUESTS, len(own)), [request for _, request in self.requests]
        for method in self.methods if requests else ():
            check_requests(requests, target, session.proposer(method), slots, config.max_cache_gb)

    @property
    def metric_names(self) -> list[str]:
        return [f"{kind}_{m}" for m in self.methods for kind in ("tau", "tau_rounds", "equal_ar")]

    def __call__(self, model: DFlashDraftModel, draft_ids: Tensor | None, step: int, gather: Callable) -> dict:
        """Figures over all ranks' prompts; every rank gets the same.

        Args:
            model: the module that is trained, sharded or not.
            gather: list of this rank -> list of all ranks.
        """
        start = time.monotonic()
        devices = [self.target.device] if self.target.device.type == "cuda" else []
        with torch.random.fork_rng(devices):
            session = Session(self.config, self.target, decoding_copy(model, draft_ids, self.target), "")
            if self._ar is None:
                self._ar = self._decode(session, AR)
            own = self._ar + [g for m in self.methods for g in self._decode(session, m)]
            if self.rank == 0:
                self.examples = self._examples(session, step)
        generations = gather(own)
        return summarise_decoding(generations, self.methods) | {"seconds": round(time.monotonic() - start, 3)}

    def _decode(self, session: Session, method: str) -> list[Generation]:
        names, requests = [name for name, _ in self.requests], [request for _, request in self.requests]
        plan = configured_plan(self.config, session.drafter.spec, method)
        proposer, limit = session.proposer_of(plan), self.config.max_cache_gb
        answers = generate(self.target, proposer, requests, 0.0, REQUESTS, limit) if requests else []
        return [Generation.of("train", name, plan, 0.0, a) for name, a in zip(names, answers, strict=True)]

    def _examples(self, session: Session, step: int) -> list[Example]:
        """The head's chain (or the plain one) round by round, for the first prompt."""
        method = [m for m in self.methods if m in CHAINS][-1]
        name, request = self.requests[0]
        proposer = _Recorder(session.proposer(method))
        (answer,) = generate(self.target, proposer, [request], max_cache_gb=self.config.max_cache_gb)
        prompt = next(turn_text(p.turns[0]) for p in self.prompts if p.id == name)
        examples, place, words = [], 1, self.target.tokenizer.decode
        for number, (record, drafted) in enumerate(zip(answer.rounds, proposer.chains, strict=True), 1):
            taken, rest = drafted[: record.accepted], answer.tokens[place + record.accepted : place + record.emitted]
            examples.append(Example(step, prompt, number, words(drafted), words(taken), words(rest)))
            place += record.emitted
        return examples


class _Recorder:
    """A proposer that keeps the chains it proposes to its one request."""

    def __init__(self, proposer):
        self.proposer, self.chains = proposer, []

    def __getattr__(self, name):
        return getattr(self.proposer, name)

    def build(self, draft):
        tree = self.proposer.build(draft)
        self.chains.append(tree.tokens_RN[0].tolist())
        return tree


class EvaluateAtEnd(TrainerCallback):
    """The last weights are measured too, or the best of earlier ones would win without a contest."""

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step >= state.max_steps and args.eval_strategy != "no":
            control.should_evaluate = True


def decoded_methods(head_type: str) -> list[str]:
    """What is decoded while training beside AR: the chains, and DARTree."""
    return [m for m in available_methods(head_type) if m in CHAINS or m == "dartree_pruned"]


def decoding_copy(model: DFlashDraftModel, draft_ids: Tensor | None, target: Target) -> Drafter:
    """The drafter as a finished run would load it: whole weights, LoRA added in, in the target's dtype."""
    config = deepcopy(model.config)
    config._attn_implementation = "sdpa"  # flex, which training may use, takes no masks of trees and ragged rows
    with no_init_weights():
        copy = DFlashDraftModel(config)
    copy = copy.to(device=target.device, dtype=target.dtype)
    copy.load_state_dict(full_weights(model))
    ids = None if draft_ids is None else draft_ids.to(target.device)
    return fit_to_target(Drafter(copy.eval().requires_grad_(False), ids), target)


def summarise_decoding(generations: list[Generation], methods: list[str]) -> dict[str, float]:
    """tau, acceptance by position, and the share of answers equal to AR's, by method."""
    ar = {g.prompt_id: g.tokens for g in generations if g.method == AR}
    figures: dict[str, float] = {}
    for method in methods:
        own = [g for g in generations if g.method == method]
        # Without a round (every answer is one token long) nothing was drafted: the worst that a method can do.
        figures[f"tau_{method}"] = tau_mean(own) or 1.0
        figures[f"tau_rounds_{method}"] = tau_rounds(own) or 1.0
        figures[f"equal_ar_{method}"] = sum(ar[g.prompt_id] == g.tokens for g in own) / len(own)
        for row in acceptance_by_position(own):
            figures[f"accepted_{row['depth']}_{method}"] = row["conditional"]
    return figures
