"""The correction heads by name. A new head is a file with a subclass of `CorrectionHead` and a line here.

Copied into exports: torch only.
"""

from __future__ import annotations

from .head import CorrectionHead
from .head_domino import DominoHead
from .head_markov import GatedMarkovHead, MarkovHead, RnnMarkovHead

HEADS: dict[str, type[CorrectionHead]] = {
    "domino": DominoHead,
    "markov_vanilla": MarkovHead,
    "markov_gated": GatedMarkovHead,
    "markov_rnn": RnnMarkovHead,
}


def head_types() -> tuple[str, ...]:
    """Every name that `DrafterSpec.head_type` may have."""
    return ("none", *HEADS)


def head_title(head_type: str) -> str:
    """What people call the head."""
    return "no correction head (plain DFlash)" if head_type == "none" else HEADS[head_type].title


def output_projections() -> tuple[str, ...]:
    """Names of the tensors with one row a token of the draft vocabulary."""
    return tuple(dict.fromkeys(head.output_name for head in HEADS.values()))


def build_head(spec, hidden_size: int, vocab_size: int) -> CorrectionHead | None:
    """The head that a `DrafterSpec` names; None for plain DFlash."""
    return None if spec.head_type == "none" else HEADS[spec.head_type].build(spec, hidden_size, vocab_size)
