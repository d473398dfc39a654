"""DSpark's confidence head (arXiv 2607.05147): how likely the target accepts a drafted token, given those before.

It looks at the backbone's output h at the predicting slot, and at the previous token's row W1[x] of a Markov head if
the checkpoint says so (`confidence_head_with_markov`). Copied into exports: torch only.

Shape suffixes: D hidden, E rank of a Markov head, `...` any leading dimensions.
"""

from __future__ import annotations

from torch import Tensor, nn

from .head import CorrectionHead, linear


class ConfidenceHead(nn.Module):
    """Logit of acceptance, Linear([h ; W1[x]] -> 1, bias) or Linear(h -> 1, bias)."""

    def __init__(self, size: int):
        super().__init__()
        self.proj = nn.Linear(size, 1)

    def forward(self, hidden: Tensor, previous: Tensor | None) -> Tensor:
        """Logits [...] for hidden states [..., D] and the rows [..., E] of the tokens before them, if it uses them."""
        weight, size = self.proj.weight, hidden.shape[-1]
        # Two products instead of one of [h ; W1[x]]: joining them would copy the hidden states.
        logits = linear(hidden.to(weight.dtype), weight[:, :size], self.proj.bias)
        if previous is not None:
            logits = logits + linear(previous.to(weight.dtype), weight[:, size:])
        return logits[..., 0]


def build_confidence(spec, hidden_size: int, head: CorrectionHead | None) -> ConfidenceHead | None:
    """The confidence head of a `DrafterSpec`, or None. Only a Markov head has rows of previous tokens to look at."""
    if not spec.confidence_head:
        return None
    return ConfidenceHead(hidden_size + (head.previous_size if spec.confidence_with_markov else 0))
