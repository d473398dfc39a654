"""The one round loop: propose, verify, commit, record. Every method goes through it, autoregressive decoding too.

Requests are decoded together; nothing about one depends on its neighbours except, in low precision, the rounding of
batched kernels. The clock runs from the end of the target's prefill to the last token, so that the drafter's prefill
and the first draft are inside it; the token that the prefill yields belongs to no round.

Shape suffixes: R requests, S prompt length, M tree tokens, C committed tokens, L taps, V vocabulary.
"""

from __future__ import annotations

import hashlib
import time
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.records import RoundRecord
from models.attention import causal_mask, tree_mask
from models.target import Target

from .cache import TreeCache
from .tree import Tree
from .verification import choose_tokens, verify


@dataclass
class Request:
    """A prompt to answer. `seed` names the request's own random stream."""

    prompt_ids: list[int]
    max_new_tokens: int
    seed: int | str = 0


@dataclass
class Answer:
    """The tokens of one request (the prefill's first), why it stopped, and what each round did."""

    tokens: list[int] = field(default_factory=list)
    stop: str = ""
    rounds: list[RoundRecord] = field(default_factory=list)
    accepted_ranks: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    target_forwards: int = 0


class Clock:
    """Wall time with the device's queue drained, so that work is charged to the stage that issued it."""

    def __init__(self, device: torch.device):
        self._sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def now(self) -> float:
        self._sync()
        return time.perf_counter()


def uniforms(request: Request) -> Tensor:
    """The request's uniforms in [0, 1), one a token of its answer (with room for the last round's overshoot)."""
    digest = hashlib.sha256(repr(request.seed).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.rand(2 * request.max_new_tokens + 256, generator=generator, dtype=torch.float64)


class Batch:
    """Requests in flight: their answers, the target's cache, and the last verified token (the anchor) of each."""

    def __init__(self, target: Target, proposer, requests: list[Request], temperature: float):
        self.target, self.proposer, self.requests, self.temperature = target, proposer, requests, temperature
        self.answers = [Answer() for _ in requests]
        self.clock = Clock(target.device)
        longest = max(len(r.prompt_ids) for r in requests)
        self.capacity = longest + max(r.max_new_tokens for r in requests) + proposer.depth + proposer.size + 2
        self.cache = TreeCache.for_config(target.config, len(requests), self.capacity, target.dtype, target.device)
        width = max(2 * r.max_new_tokens + 256 for r in requests)
        rows = [uniforms(r) for r in requests]
        self.uniforms_RS = torch.stack([torch.cat([u, u.new_zeros(width - len(u))]) for u in rows]).to(target.device)

    @property
    def active(self) -> list[int]:
        return [r for r, answer in enumerate(self.answers) if not answer.stop]

    def prefill(self) -> None:
        """One target forward over the prompts; its last logits give each request's first token."""
        start = self.clock.now()
        lengths = [len(r.prompt_ids) for r in self.requests]
        device, width = self.target.device, max(lengths)
        ids_RS = torch.zeros(len(lengths), width, dtype=torch.long)
        for row, request in zip(ids_RS, self.requests, strict=True):
            row[: len(request.prompt_ids)] = torch.tensor(request.prompt_ids)
        positions_RS = torch.arange(width, device=device).expand(len(lengths), -1)
        lengths_R = torch.tensor(lengths, device=device)
        self.cache.place(positions_RS)
        output = self.target.forward(
            ids_RS.to(device),
            self.proposer.tap_ids,
            position_ids=positions_RS,
            # One request is plainly causal: without a mask of ours the kernels skip masking, as in `generate`.
            mask=None if len(lengths) == 1 else causal_mask(lengths_R, width),
            cache=self.cache,
            with_logits=False,
            with_final=True,
        )
        last_RD = output.final[torch.arange(len(lengths), device=device), lengths_R - 1]
        first_R = choose_tokens(self.target.logits(last_RD), self.temperature, self.uniforms_RS[:, 0])
        for r, length in enumerate(lengths):
            self.cache.lengths[r] = length
        elapsed = self.clock.now() - start
        for answer, request, token in zip(self.answers, self.requests, first_R.tolist(), strict=True):
            answer.prefill_seconds, answer.target_forwards = elapsed, 1
            self._emit(answer, [token], request)
        self.started = self.clock.now()
        self.proposer.begin(output.taps, lengths, self.capacity)

    def round(self) -> None:
        """Propose, verify, commit, record."""
        active, clock = self.active, self.clock
        start = clock.now()
        anchor_R = torch.tensor([answer.tokens[-1] for answer in self.answers], device=self.target.device)
        draft = self.proposer.draft(anchor_R)
        drafted = clock.now()
        tree = self.proposer.build(draft)
        built = clock.now()
        output, lengths_R = self._forward_tree(anchor_R, tree)
        done_R = torch.tensor([len(answer.tokens) for answer in self.answers], device=self.target.device)
        steps = torch.arange(max(tree.max_depths) + 1, device=self.target.device)
        verdict = verify(output.logits, tree, self.temperature, self.uniforms_RS.gather(1, done_R[:, None] + steps))
        verified = clock.now()
        self._commit(output.taps, verdict.paths, active)
        finished = clock.now()
        times = dict(draft=drafted - start, tree=built - drafted, verify=verified - built, commit=finished - verified)
        depths = tree.max_depths
        for r in active:
            answer, path = self.answers[r], verdict.paths[r]
            answer.target_forwards += 1
            emitted = self._emit(answer, verdict.emitted[r], self.requests[r])
            answer.rounds.append(RoundRecord(tree.sizes[r], depths[r], len(path), emitted, **times))
            answer.accepted_ranks.append(tree.ranks_RN[r, path].tolist() if path else [])
            answer.seconds = finished - self.started

    def _forward_tree(self, anchor_R: Tensor, tree: Tree):
        """The target over root and nodes: ancestor mask, positions by depth (siblings share one), scattered columns."""
        device = anchor_R.device
        lengths_R = torch.tensor(self.cache.lengths, device=device)
        root = torch.zeros_like(anchor_R)[:, None]
        tokens_RM = torch.cat([anchor_R[:, None], tree.tokens_RN], dim=1)
        depths_RM = torch.cat([root, tree.depths_RN], dim=1)
        parents_RM = torch.cat([root, tree.parents_RN], dim=1)
        width = self.cache.place(lengths_R[:, None] + torch.arange(tokens_RM.shape[1], device=device))
        output = self.target.forward(
            tokens_RM,
            self.proposer.tap_ids,
            position_ids=lengths_R[:, None] + depths_RM,
            mask=None if tokens_RM.shape == (1, 1) else tree_mask(parents_RM, lengths_R, width),
            cache=self.cache,
        )
        return output, lengths_R

    def _commit(self, taps_RML: Tensor, paths: list[list[int]], active: list[int]) -> None:
        """Keeps KV and taps of root and accepted nodes. Finished requests keep what they have."""
        kept = [[0] + [node + 1 for node in path] if r in active else [] for r, path in enumerate(paths)]
        for r, tokens in enumerate(kept):
            start = self.cache.lengths[r]
            self.cache.commit(r, [start + m for m in tokens])
        if self.proposer.tap_ids:
            longest = max(len(tokens) for tokens in kept)
            index = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in kept], device=taps_RML.device)
            taps = taps_RML.gather(1, index[..., None].expand(-1, -1, taps_RML.shape[2]))
            self.proposer.commit(taps, [len(tokens) for tokens in kept])

    def _emit(self, answer: Answer, tokens: list[int], request: Request) -> int:
        """Appends tokens up to the first eos and the length limit. Returns how many were emitted."""
        count = 0
        for token in tokens:
            answer.tokens.append(token)
            count += 1
            if token in self.target.eos_ids:
                answer.stop = "eos"
                break
            if len(answer.tokens) >= request.max_new_tokens:
                answer.stop = "length"
                break
        return count


def check_request(request: Request, target: Target, proposer) -> None:
    """Raises ValueError for a request that cannot be served: empty, or longer than the target's positions."""
    if not request.prompt_ids:
        raise ValueError("a prompt must have at least one token")
    if request.max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
    need = len(request.prompt_ids) + request.max_new_tokens + proposer.depth
    if need > target.max_length:
        raise ValueError(
            f"prompt of {len(request.prompt_ids)} tokens, max_new_tokens {request.max_new_tokens} and a block of "
            f"{proposer.depth} need {need} positions, the target has {target.max_length}"
        )


@torch.inference_mode()
def generate(target: Target, proposer, requests: list[Request], temperature: float = 0.0) -> list[Answer]:
    """Answers the requests together. Greedy at temperature 0, else the target's own samples.

    Every answer satisfies `target_forwards == len(rounds) + 1`.
    """
    for request in requests:
        check_request(request, target, proposer)
    before = target.forwards
    batch = Batch(target, proposer, requests, temperature)
    batch.prefill()
    while batch.active:
        batch.round()
    # Counted where it happens, so that no method can hide a forward.
    assert target.forwards - before == 1 + max(len(answer.rounds) for answer in batch.answers)
    assert all(answer.target_forwards == len(answer.rounds) + 1 for answer in batch.answers)
    return batch.answers
