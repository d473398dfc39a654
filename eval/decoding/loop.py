"""The one round loop: propose, verify, commit, record. Every method goes through it, autoregressive decoding too.

Up to `slots` requests are decoded together (continuous batching): when one ends, its row is freed and the next waiting
request joins with a prefill of its own. Nothing about a request depends on its neighbours except, in low precision, the
rounding of batched kernels. The clock of an answer runs from the end of its prefill to its last token, so that the
drafter's prefill and the first draft are inside it; the token that the prefill yields belongs to no round.

Shape suffixes: R requests decoded at once, J joining requests, S prompt length, M tree tokens, L taps, V vocabulary.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from eval.records import PARTS, RoundRecord
from models.target import Target

from .cache import TreeCache
from .rejection import verify_rejection
from .request import Answer, Request, Served, check_requests, columns_needed, uniforms
from .tree import Tree
from .verification import Verification, choose_tokens, verify

MAX_CACHE_GB = 16.0


class Clock:
    """Wall time with the devices' queues drained, so that work is charged to the stage that issued it."""

    def __init__(self, *devices: torch.device):
        """devices: those of the target, its main one first."""
        self._cuda = devices[0].type == "cuda"
        self._devices = dict.fromkeys(devices) if self._cuda else ()

    def now(self) -> float:
        for device in self._devices:
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def stamp(self) -> tuple[float, float | torch.cuda.Event]:
        """`now`, and what processor time is counted from: seconds of all threads, or an event on the device."""
        if self._cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            return self.now(), event
        return self.now(), time.process_time()

    def parts(self, stamps: list) -> dict:
        """Wall and processor seconds of the parts of a round between five stamps, as RoundRecord's fields."""
        walls, marks = zip(*stamps, strict=True)
        busy = [a.elapsed_time(b) / 1000 if self._cuda else b - a for a, b in pairwise(marks)]
        return {name: b - a for name, (a, b) in zip(PARTS, pairwise(walls), strict=True)} | {"busy": tuple(busy)}


class Batch:
    """Requests being decoded: their answers, the target's cache, and who has which row.

    Attributes:
        answers: of all requests, in the order given.
        rows: the request that each row of the caches (target's and drafter's) holds; rows in use are the first ones.
        waiting: requests that have not joined yet.
        capacity: columns of a cache row, enough for the longest request.
    """

    def __init__(
        self,
        target: Target,
        proposer,
        requests: list[Request],
        temperature: float = 0.0,
        slots: int | None = None,
        max_cache_gb: float = MAX_CACHE_GB,
    ):
        self.target, self.proposer, self.requests, self.temperature = target, proposer, requests, temperature
        self.slots = min(slots or len(requests), len(requests))
        check_requests(requests, target, proposer, self.slots, max_cache_gb)
        self.answers = [Answer() for _ in requests]
        self.rows: list[int] = []
        self.waiting = deque(range(len(requests)))
        self.clock = Clock(target.device, *target.layer_devices)
        self.capacity = max(columns_needed(request, proposer) for request in requests)
        self.cache = TreeCache.for_config(target.config, self.slots, self.capacity, target.dtype, target.layer_devices)
        proposer.begin(self.slots, self.capacity)
        self.prefills = self.rounds = self.request_rounds = 0
        self.prefill_seconds, self.part_seconds = 0.0, dict.fromkeys(PARTS, 0.0)
        self._started: dict[int, float] = {}
        self._streams: dict[tuple[int, str], Tensor] = {}

    @property
    def cache_bytes(self) -> int:
        """Keys and values of target and drafter."""
        return self.slots * self.capacity * self.proposer.column_bytes + self.cache.nbytes

    def admit(self) -> bool:
        """Waiting requests take the free rows. False when nothing is left to decode."""
        while self.waiting and len(self.rows) < self.slots:
            count = min(self.slots - len(self.rows), len(self.waiting))
            self._prefill([self.waiting.popleft() for _ in range(count)])
            self._free_rows()  # an answer may end with its first token
        return bool(self.rows)

    def _prefill(self, joiners: list[int]) -> None:
        """One target forward over the joiners' prompts; its last logits give each one's first token."""
        start, first, device = self.clock.now(), len(self.rows), self.target.device
        prompts = [self.requests[i].prompt_ids for i in joiners]
        lengths, width = [len(prompt) for prompt in prompts], max(map(len, prompts))
        ids_JS = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=device)
        positions_JS = torch.arange(width).expand(len(joiners), -1)
        self.cache.place(positions_JS, first)
        lengths_J = torch.tensor(lengths, device=device)
        output = self.target.forward(
            ids_JS,
            self.proposer.tap_ids,
            position_ids=positions_JS.to(device),
            # One request is plainly causal: without a mask of ours the kernels skip masking, as in `generate`.
            mask=None if len(joiners) == 1 else self.target.causal_masks(lengths_J, width),
            cache=self.cache,
            with_logits=False,
            with_final=True,
        )
        last_JD = output.final[torch.arange(len(joiners), device=device), lengths_J - 1]
        self.rows += joiners
        self.cache.lengths[first : len(self.rows)] = lengths
        uniforms_JS = self._uniforms(joiners, "target", 1)
        tokens = choose_tokens(self.target.logits(last_JD), self.temperature, uniforms_JS[:, 0]).tolist()
        now = self.clock.now()
        for i, token in zip(joiners, tokens, strict=True):
            self.answers[i].prefill_seconds, self.answers[i].target_forwards = now - start, 1
            self._started[i] = now
            self._emit(i, [token])
        self.prefills, self.prefill_seconds = self.prefills + 1, self.prefill_seconds + now - start
        self.proposer.join(output.taps, lengths)

    def round(self) -> None:
        """Propose, verify, commit, record."""
        clock, proposer = self.clock, self.proposer
        stamps = [clock.stamp()]
        anchors = [self.answers[i].tokens[-1] for i in self.rows]
        anchor_R = torch.tensor(anchors, device=self.target.device)
        draft = proposer.draft(anchor_R)
        if draft is not None and proposer.samples:
            draft = replace(
                draft,
                temperature=self.temperature,
                uniforms_RT=self._uniforms(self.rows, "draft", proposer.depth),
            )
        stamps.append(clock.stamp())
        tree = proposer.build(draft)
        stamps.append(clock.stamp())
        output = self._forward_tree(anchor_R, tree)
        verdict = self._verify(output.logits, tree)
        stamps.append(clock.stamp())
        self._commit(output.taps, verdict.paths)
        stamps.append(clock.stamp())
        self._record(tree, verdict, clock.parts(stamps), stamps[-1][0])
        self._free_rows()

    def _forward_tree(self, anchor_R: Tensor, tree: Tree):
        """The target over root and nodes: ancestor mask, positions by depth (siblings share one), scattered columns."""
        device, lengths = anchor_R.device, self.cache.lengths[: len(self.rows)]
        root = torch.zeros_like(anchor_R)[:, None]
        tokens_RM = torch.cat([anchor_R[:, None], tree.tokens_RN], dim=1)
        depths_RM = torch.cat([root, tree.depths_RN], dim=1)
        parents_RM = torch.cat([root, tree.parents_RN], dim=1)
        width = self.cache.place(torch.tensor(lengths)[:, None] + torch.arange(tokens_RM.shape[1]))
        lengths_R = torch.tensor(lengths, device=device)
        alone = tokens_RM.shape == (1, 1)  # plainly causal again
        return self.target.forward(
            tokens_RM,
            self.proposer.tap_ids,
            position_ids=lengths_R[:, None] + depths_RM,
            mask=None if alone else self.target.tree_masks(parents_RM, depths_RM, lengths_R, width),
            cache=self.cache,
        )

    def _verify(self, logits_RMV: Tensor, tree: Tree) -> Verification:
        steps = max(tree.max_depths) + 1
        uniforms_RS = self._uniforms(self.rows, "target", steps)
        if tree.drawn_from is None:
            return verify(logits_RMV, tree, self.temperature, uniforms_RS)
        accept_RS = self._uniforms(self.rows, "accept", steps)
        return verify_rejection(logits_RMV, tree, self.temperature, accept_RS, uniforms_RS)

    def _uniforms(self, requests: list[int], stream: str, steps: int) -> Tensor:
        """[R, steps] uniforms for the next tokens of the requests; zeros in greedy decoding, which draws nothing."""
        if self.temperature == 0:
            return torch.zeros(len(requests), steps, dtype=torch.float64, device=self.target.device)
        drawn = []
        for i in requests:
            if (i, stream) not in self._streams:
                self._streams[i, stream] = uniforms(self.requests[i], stream)
            done = len(self.answers[i].tokens)
            drawn.append(self._streams[i, stream][done : done + steps])
        return torch.stack(drawn).to(self.target.device)

    def _commit(self, taps_RML: Tensor, paths: list[list[int]]) -> None:
        """Keeps KV and taps of root and accepted nodes."""
        kept = [[0] + [node + 1 for node in path] for path in paths]
        for row, tokens in enumerate(kept):
            start = self.cache.lengths[row]
            self.cache.commit(row, [start + m for m in tokens])
        if self.proposer.tap_ids:
            longest = max(map(len, kept))
            index = torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens in kept], device=taps_RML.device)
            taps = taps_RML.gather(1, index[..., None].expand(-1, -1, taps_RML.shape[2]))
            self.proposer.commit(taps, [len(tokens) for tokens in kept])

    def _record(self, tree: Tree, verdict: Verification, times: dict, now: float) -> None:
        """Every request's record of this round. Its times are those of the whole batch."""
        self.rounds, self.request_rounds = self.rounds + 1, self.request_rounds + len(self.rows)
        for part in PARTS:
            self.part_seconds[part] += times[part]
        depths = tree.max_depths
        ranks = tree.ranks_RN.tolist()
        for row, i in enumerate(self.rows):
            answer, path = self.answers[i], verdict.paths[row]
            answer.target_forwards += 1
            emitted = self._emit(i, verdict.emitted[row])
            answer.rounds.append(RoundRecord(tree.sizes[row], depths[row], len(path), emitted, **times))
            answer.accepted_ranks.append([ranks[row][node] for node in path])
            answer.seconds = now - self._started[i]

    def _emit(self, i: int, tokens: list[int]) -> int:
        """Appends tokens up to the first eos and the length limit. Returns how many were emitted."""
        answer = self.answers[i]
        for count, token in enumerate(tokens, start=1):
            answer.tokens.append(token)
            if token in self.target.eos_ids:
                answer.stop = "eos"
            elif len(answer.tokens) >= self.requests[i].max_new_tokens:
                answer.stop = "length"
            if answer.stop:
                return count
        return len(tokens)

    def _free_rows(self) -> None:
        """Finished requests leave; the last rows move into the gaps, so that a forward sees only live ones."""
        alive = [not self.answers[i].stop for i in self.rows]
        if all(alive):
            return
        count = sum(alive)
        movers = [row for row in range(count, len(alive)) if alive[row]]
        keep = [row if alive[row] else movers.pop() for row in range(count)]
        self.cache.keep(keep)
        self.proposer.keep(keep)
        self.rows = [self.rows[row] for row in keep]


@torch.inference_mode()
def serve(
    target: Target,
    proposer,
    requests: list[Request],
    temperature: float = 0.0,
    slots: int | None = None,
    max_cache_gb: float = MAX_CACHE_GB,
) -> Served:
    """Answers all requests, at most `slots` at once (default: all). Greedy at temperature 0, else the target's samples.

    Every answer satisfies `target_forwards == len(rounds) + 1`. Raises ValueError for a request that cannot be served.
    """
    before = target.forwards
    batch = Batch(target, proposer, requests, temperature, slots, max_cache_gb)
    start = batch.clock.now()
    while batch.admit():
        batch.round()
    seconds = batch.clock.now() - start
    # Counted where it happens, so that no method can hide a forward.
    assert target.forwards - before == batch.prefills + batch.rounds
    assert all(answer.target_forwards == len(answer.rounds) + 1 for answer in batch.answers)
    return Served(
        batch.answers,
        seconds,
        batch.prefill_seconds,
        batch.rounds,
        batch.request_rounds,
        batch.part_seconds,
        batch.cache_bytes,
    )


def generate(
    target: Target,
    proposer,
    requests: list[Request],
    temperature: float = 0.0,
    slots: int | None = None,
    max_cache_gb: float = MAX_CACHE_GB,
) -> list[Answer]:
    """The answers of `serve`."""
    return serve(target, proposer, requests, temperature, slots, max_cache_gb).answers
