"""The interface of the autoregressive correction heads.

A block-parallel drafter scores every position on its own. A head adds `correction = W2 code(state, slot)` to the base
logits, where `state` summarises the tokens drafted so far (the anchor first) and `slot` is the backbone's output at the
slot that predicts the next one. Training, chains and trees use the same four calls:

    slots = head.prepare(hidden)                    once for all slots
    state = head.initial_state(anchor, embed)       the anchor is consumed
    code  = head.code(state, slots[d])              low-rank code; logits = base + code @ head.rows(ids).T
    state = head.advance(state, token, embed, slots[d])   the token predicted at that slot is consumed

A new head is one file with a subclass and its name in `models/heads.py`. Copied into exports: torch only.

Shape suffixes: D hidden, G head state, E rank of the correction, V (draft) vocabulary, T depths, `...` any leading
dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Embed = Callable[[Tensor], Tensor]  # token ids [...] -> the target's input embeddings [..., D]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Linear map of [..., I] to [..., O] as one matrix product.

    torch multiplies strided slices with three dimensions row by row and copies the weight for each: 6 ms a call here.
    """
    return nn.functional.linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


class CorrectionHead(nn.Module):
    """Base of the heads. Children are attached to the drafter under the tensor names of the public formats.

    Attributes:
        title: what people call it, as in "a drafter with ...".
        output_name: tensor name of W2, whose rows are those of the draft vocabulary.
        previous_size: size of what `previous_rows` returns; 0 for a head that has no table of previous tokens.
    """

    title: str
    output_name: str
    previous_size = 0

    @classmethod
    def build(cls, spec, hidden_size: int, vocab_size: int) -> CorrectionHead:
        """The head of a `DrafterSpec`, for a target with `vocab_size` tokens."""
        raise NotImplementedError

    @property
    def output(self) -> nn.Linear:
        """The projection W2 (V x E, no bias) from a code to a correction of the logits."""
        raise NotImplementedError

    def prepare(self, hidden: Tensor) -> Tensor:
        """What the head needs of the backbone's output [..., D], computed once for all slots."""
        raise NotImplementedError

    def initial_state(self, anchor: Tensor, embed: Embed) -> Tensor:
        """State [..., G] after the anchor tokens [...]."""
        raise NotImplementedError

    def code(self, state: Tensor, slot: Tensor) -> Tensor:
        """Code [..., E] of the next token, given the state and the prepared slot that predicts it."""
        raise NotImplementedError

    def advance(self, state: Tensor, token: Tensor, embed: Embed, slot: Tensor) -> Tensor:
        """State after consuming `token` [...], which was predicted at `slot`."""
        raise NotImplementedError

    def previous_rows(self, ids: Tensor) -> Tensor:
        """Rows [..., previous_size] of tokens [...]: what a confidence head may look at beside the hidden state."""
        raise NotImplementedError

    def rows(self, ids: Tensor | None = None) -> Tensor:
        """Rows of W2 for (draft vocabulary) ids [...]: [..., E]; all of them without ids."""
        weight = self.output.weight
        return weight if ids is None else weight[ids]

    def teacher_forced_codes(self, anchor: Tensor, tokens: Tensor, embed: Embed, hidden: Tensor) -> Tensor:
        """Codes [..., T, E] of T successive predictions whose true tokens [..., T] are known.

        `hidden` [..., T, D] is the backbone's output at the predicting slots, in order of depth.
        """
        slots = self.prepare(hidden)
        state, codes = self.initial_state(anchor, embed), []
        for t in range(tokens.shape[-1]):
            codes.append(self.code(state, slots[..., t, :]))
            if t + 1 < tokens.shape[-1]:
                state = self.advance(state, tokens[..., t], embed, slots[..., t, :])
        return torch.stack(codes, dim=-2)
