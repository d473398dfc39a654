"""What one decoded request leaves behind: its tokens, its rounds, its clock, and where it left the AR text.

Plain dataclasses with JSON-able `to_dict` and `from_dict`; everything in `eval/metrics.py` is computed from them.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass


@dataclass
class RoundRecord:
    """One verified round of one request.

    Attributes:
        proposed: tokens proposed: tree nodes, or the length of the chain (0 for AR).
        max_depth: depth of the deepest proposal (0 for AR).
        accepted: draft tokens that the target accepted; the round emits accepted + 1, untrimmed.
        emitted: tokens really emitted, after trimming at eos or at max_new_tokens.
        draft, tree, verify, commit: seconds of the four parts of the round.
    """

    proposed: int
    max_depth: int
    accepted: int
    emitted: int
    draft: float
    tree: float
    verify: float
    commit: float

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict) -> RoundRecord:
        return cls(**data)


@dataclass
class Generation:
    """One request decoded by one method.

    Attributes:
        budget: tree nodes B allowed in a round, the root not counted (0 for AR, the chain's length for chains).
        tokens: emitted ids, the prefill's token first, trimmed at eos and at max_new_tokens.
        stop: "eos" or "length".
        seconds: from the end of the target's prefill to the last token, the drafter's prefill and first draft inside.
        target_forwards: forwards of the target, the prefill included; always len(rounds) + 1.
    """

    benchmark: str
    prompt_id: str
    method: str
    temperature: float
    budget: int
    tokens: list[int]
    stop: str
    rounds: list[RoundRecord]
    seconds: float
    prefill_seconds: float
    target_forwards: int
    domain: str = ""

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: dict) -> Generation:
        return cls(**{**data, "rounds": [RoundRecord.from_dict(r) for r in data["rounds"]]})


@dataclass
class Divergence:
    """The first position at which a method's tokens differ from AR's on the same prompt.

    Attributes:
        position: index into the emitted tokens.
        gap: difference between the target's logits of the two tokens there, in fp32 arithmetic on its own forward;
            None when one text merely ends earlier.
        near_tie: the gap is below the run's threshold, so that rounding alone explains the difference.
    """

    prompt_id: str
    method: str
    position: int
    ar_token: int
    token: int
    gap: float | None
    near_tie: bool

    def to_dict(self) -> dict:
        # JSON knows no infinity: null stands for it.
        finite = self.gap is not None and math.isfinite(self.gap)
        return {**asdict(self), "gap": self.gap if finite else None}

    @classmethod
    def from_dict(cls, data: dict) -> Divergence:
        return cls(**data)
