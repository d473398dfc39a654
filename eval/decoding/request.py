"""What goes into the round loop and what comes out: requests, their random streams, and their answers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eval.records import RoundRecord

from .cache import column_bytes


@dataclass
class Request:
    """A prompt to answer. `seed` names the request and its own random streams."""

    prompt_ids: list[int]
    max_new_tokens: int
    seed: int | str = 0


@dataclass
class Answer:
    """The tokens of one request (the prefill's first), why it stopped, and what each round did.

    Attributes:
        seconds: from the end of its prefill to its last token, whatever else the batch did meanwhile.
        prefill_seconds: of the target's forward over its prompt (and over the prompts that joined with it).
        target_forwards: forwards that it took part in: always len(rounds) + 1.
    """

    tokens: list[int] = field(default_factory=list)
    stop: str = ""
    rounds: list[RoundRecord] = field(default_factory=list)
    accepted_ranks: list[list[int]] = field(default_factory=list)
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    target_forwards: int = 0


@dataclass
class Served:
    """All answers of a batch, in the order of the requests, and what the batch as a whole cost.

    Attributes:
        seconds: wall time from the start of the first prefill to the last token.
        prefill_seconds: the part of it spent in the target's prefills.
        rounds: target forwards that verified something.
        request_rounds: rounds summed over the requests decoded in them: over `rounds`, the mean concurrency.
        part_seconds: wall seconds of all rounds by their parts (draft, tree, verify, commit).
        cache_bytes: keys and values of target and drafter, allocated for `slots` x the longest request.
    """

    answers: list[Answer]
    seconds: float
    prefill_seconds: float
    rounds: int
    request_rounds: int
    part_seconds: dict[str, float]
    cache_bytes: int

    @property
    def tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)


def uniforms(request: Request, stream: str = "target") -> Tensor:
    """Uniforms in [0, 1), one for each token of the request's answer (with room for the last round's overshoot).

    Streams of different names are independent: no draw decides two things (TRAP 37).
    """
    name = request.seed if stream == "target" else (request.seed, stream)
    digest = hashlib.sha256(repr(name).encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.rand(2 * request.max_new_tokens + 256, generator=generator, dtype=torch.float64)


def columns_needed(request: Request, proposer) -> int:
    """Cache columns that a request may fill: prompt, answer, one overshooting round, and the tree being verified."""
    return len(request.prompt_ids) + request.max_new_tokens + proposer.depth + proposer.size + 2


def check_requests(requests: Sequence[Request], target, proposer, slots: int, max_cache_gb: float) -> None:
    """Raises ValueError for a request that is empty, that the target's positions cannot hold, or the cache's limit."""
    column = slots * (column_bytes(target.config, target.dtype) + proposer.column_bytes)
    columns = int(max_cache_gb * 1e9 // column)
    for request in requests:
        if not request.prompt_ids:
            raise ValueError("a prompt must hold at least one token")
        if request.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens must be at least 1, got {request.max_new_tokens}")
        need = len(request.prompt_ids) + request.max_new_tokens + proposer.depth
        if need > target.max_length:
            raise ValueError(
                f"prompt of {len(request.prompt_ids)} tokens, max_new_tokens {request.max_new_tokens} and a block of "
                f"{proposer.depth} need {need} positions, the target has {target.max_length}"
            )
        if columns_needed(request, proposer) > columns:
            raise ValueError(
                f"request {request.seed!r} needs {columns_needed(request, proposer)} cache columns, but max_cache_gb "
                f"{max_cache_gb:g} holds {columns} for each of {slots} requests at once"
            )
