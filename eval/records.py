"""What one decoded request leaves behind: its tokens, its rounds, its clock, and where it left the AR text.

Plain dataclasses with JSON-able `to_dict` and `from_dict`; everything in `eval/metrics.py` is computed from them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass

AR = "ar"
SAMPLE_MATCH, REJECTION = "sample-match", "rejection"
FIXED = "fixed"  # the policy of a budget that decoding does not change
PARTS = ("draft", "tree", "verify", "commit")  # of a round
MAIN, SWEEP = "main", "sweep"  # phases of an evaluation; a sweep's name goes on with a hash of its points
AVERAGE = "average"  # stands for a benchmark where the row is over all of them; no benchmark may have this name


@dataclass(frozen=True)
class Plan:
    """A method with the knobs that decide what it proposes and how that is accepted.

    Attributes:
        budget: tree nodes B allowed in a round, the root not counted (0 for AR, the chain's length for chains).
        width, candidates, beta: W, K and beta of the methods that have them, else None.
        acceptance: "sample-match" (the target's own tokens), or "rejection" (chains sampled from the drafter, T > 0).
        policy: "fixed", or the rule that lowers B while decoding.
        note: why the plan is evaluated when it is not the configured one; no part of its identity.
    """

    method: str
    budget: int = 0
    width: int | None = None
    candidates: int | None = None
    beta: float | None = None
    acceptance: str = SAMPLE_MATCH
    policy: str = FIXED
    note: str = ""

    @property
    def id(self) -> str:
        """Unique among plans: `dartree_pruned-b64-w12-k64-beta-0.2`."""
        if self.method == AR:
            return AR
        knobs = [("w", self.width), ("k", self.candidates), ("beta", self.beta)]
        words = [self.method, f"b{self.budget}", *(f"{name}{value:g}" for name, value in knobs if value is not None)]
        words += [word for word in (self.acceptance, self.policy) if word not in (SAMPLE_MATCH, FIXED)]
        return "-".join(words)

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass
class RoundRecord:
    """One verified round of one request.

    Attributes:
        proposed: tokens proposed: tree nodes, or the length of the chain (0 for AR).
        max_depth: depth of the deepest proposal (0 for AR).
        accepted: draft tokens that the target accepted; the round emits accepted + 1, untrimmed.
        emitted: tokens really emitted, after trimming at eos or at max_new_tokens.
        draft, tree, verify, commit: wall seconds of the four parts of the round.
        busy: processor seconds of the same parts: of all CPU threads, or between device events on CUDA.
    """

    proposed: int
    max_depth: int
    accepted: int
    emitted: int
    draft: float
    tree: float
    verify: float
    commit: float
    busy: tuple[float, float, float, float] | None = None

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict) -> RoundRecord:
        return cls(**{**data, "busy": tuple(data["busy"]) if data.get("busy") else None})


@dataclass
class Generation:
    """One request decoded by one plan.

    Attributes:
        turn: 0 for the first turn of a conversation; the turns before it were answered by AR.
        tokens: emitted ids, the prefill's token first, trimmed at eos and at max_new_tokens.
        stop: "eos" or "length".
        seconds: from the end of the target's prefill to the last token, the drafter's prefill and first draft inside.
        target_forwards: forwards of the target, the prefill included; always len(rounds) + 1.
        phase: "main", or "sweep-" and a hash for an answer that belongs to a sweep and its own AR baseline.
        peak_memory_gb: largest memory of the process while it decoded, None where the system does not tell.
        prompt: digest of the prompt's tokens, which tells other prompts under one id apart; empty in older files.
    """

    benchmark: str
    prompt_id: str
    plan: Plan
    temperature: float
    tokens: list[int]
    stop: str
    rounds: list[RoundRecord]
    seconds: float
    prefill_seconds: float
    target_forwards: int
    turn: int = 0
    domain: str = ""
    phase: str = MAIN
    peak_memory_gb: float | None = None
    prompt: str = ""

    @classmethod
    def of(cls, benchmark: str, prompt_id: str, plan: Plan, temperature: float, answer, **more) -> Generation:
        """The record of an `eval.decoding` Answer."""
        return cls(
            benchmark,
            prompt_id,
            plan,
            temperature,
            answer.tokens,
            answer.stop,
            answer.rounds,
            answer.seconds,
            answer.prefill_seconds,
            answer.target_forwards,
            **more,
        )

    @property
    def method(self) -> str:
        return self.plan.method

    @property
    def answer(self) -> tuple[str, int]:
        """What is answered: the same for all plans."""
        return self.prompt_id, self.turn

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict) -> Generation:
        rounds = [RoundRecord.from_dict(r) for r in data["rounds"]]
        return cls(**{**data, "rounds": rounds, "plan": Plan(**data["plan"])})


@dataclass
class Divergence:
    """The first position at which a method's tokens differ from AR's on the same prompt.

    Attributes:
        position: index into the emitted tokens.
        gap: the target's highest logit there less that of the lower of the two tokens, in a plain forward of its own;
            None when one text merely ends earlier.
        threshold: gap up to which rounding alone explains the difference; None like `gap`.
        near_tie: gap <= threshold, or pieces.
        pieces: so many last tokens, read at once after the rest, at which the target alone picks the token (bf16, gaps
            above the threshold); None where none does, or none was asked for.
    """

    prompt_id: str
    method: str
    position: int
    ar_token: int
    token: int
    gap: float | None
    threshold: float | None
    near_tie: bool
    benchmark: str = ""
    turn: int = 0
    plan: str = ""
    phase: str = MAIN
    pieces: int | None = None

    def to_dict(self) -> dict:
        # JSON knows no infinity: null stands for it.
        finite = self.gap is not None and math.isfinite(self.gap)
        return {**asdict(self), "gap": self.gap if finite else None}

    @classmethod
    def from_dict(cls, data: dict) -> Divergence:
        return cls(**data)
