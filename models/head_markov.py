"""DSpark's Markov heads (arXiv 2607.05147 section 3.2): the previous token's row of a table corrects the next one.

W1 has a row for every token of the target, since any of them may come before; W2 has one for every token that the
drafter can propose. Copied into exports: torch only. Shape suffixes: as in head.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .head import CorrectionHead, Embed, linear


class _MarkovTables(nn.Module):
    """Holder that gives the tensors their public prefix `markov_head.`."""

    def __init__(self, kind: str, hidden_size: int, rank: int, vocab_size: int, draft_vocab_size: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, draft_vocab_size, bias=False)
        if kind == "gated":
            self.gate_proj = nn.Linear(hidden_size + rank, rank)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden_size, 3 * rank)


class MarkovHead(CorrectionHead):
    """Markov head, vanilla: the code is the previous token's row of W1, [..., E]; nothing else is remembered."""

    title, kind = "DSpark's vanilla Markov head", "vanilla"
    output_name = "markov_head.markov_w2.weight"

    def __init__(self, hidden_size: int, rank: int, vocab_size: int, draft_vocab_size: int):
        super().__init__()
        self.markov_head = _MarkovTables(self.kind, hidden_size, rank, vocab_size, draft_vocab_size)
        self.hidden_size, self.rank, self.previous_size = hidden_size, rank, rank

    @classmethod
    def build(cls, spec, hidden_size: int, vocab_size: int) -> MarkovHead:
        return cls(hidden_size, spec.head_rank, vocab_size, spec.draft_vocab_size or vocab_size)

    @property
    def output(self) -> nn.Linear:
        return self.markov_head.markov_w2

    def prepare(self, hidden: Tensor) -> Tensor:
        return hidden[..., :0]  # the vanilla head does not look at the backbone

    def initial_state(self, anchor: Tensor, embed: Embed) -> Tensor:
        return self.markov_head.markov_w1(anchor)

    def code(self, state: Tensor, slot: Tensor) -> Tensor:
        return state

    def advance(self, state: Tensor, token: Tensor, embed: Embed, slot: Tensor) -> Tensor:
        return self.markov_head.markov_w1(token)

    def previous_rows(self, ids: Tensor) -> Tensor:
        return self.markov_head.markov_w1(ids)


class GatedMarkovHead(MarkovHead):
    """Markov head, gated: code = sigmoid(gate_proj [h ; W1[x]]) * W1[x]."""

    title, kind = "DSpark's gated Markov head", "gated"

    def prepare(self, hidden: Tensor) -> Tensor:
        gate = self.markov_head.gate_proj
        return linear(hidden, gate.weight[:, : self.hidden_size], gate.bias)

    def code(self, state: Tensor, slot: Tensor) -> Tensor:
        gate = slot + linear(state, self.markov_head.gate_proj.weight[:, self.hidden_size :])
        return torch.sigmoid(gate) * state


class RnnMarkovHead(MarkovHead):
    """Markov head, rnn: state [s ; W1[x]] of size 2E; (g, c, o) = joint_proj [s ; W1[x] ; h], code = tanh(o)."""

    title, kind = "DSpark's recurrent Markov head", "rnn"

    def prepare(self, hidden: Tensor) -> Tensor:
        joint = self.markov_head.joint_proj
        return linear(hidden, joint.weight[:, 2 * self.rank :], joint.bias)

    def initial_state(self, anchor: Tensor, embed: Embed) -> Tensor:
        row = self.markov_head.markov_w1(anchor)
        return torch.cat([torch.zeros_like(row), row], dim=-1)

    def code(self, state: Tensor, slot: Tensor) -> Tensor:
        return torch.tanh(self._gates(state, slot)[2])

    def advance(self, state: Tensor, token: Tensor, embed: Embed, slot: Tensor) -> Tensor:
        gate, new, _ = self._gates(state, slot)
        gate = torch.sigmoid(gate)
        memory = gate * state[..., : self.rank] + (1 - gate) * torch.tanh(new)
        return torch.cat([memory, self.markov_head.markov_w1(token)], dim=-1)

    def _gates(self, state: Tensor, slot: Tensor) -> tuple[Tensor, ...]:
        weight = self.markov_head.joint_proj.weight[:, : 2 * self.rank]
        return (slot + linear(state, weight)).chunk(3, dim=-1)
