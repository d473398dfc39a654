"""Autoregressive correction heads: Domino's GRU and DSpark's three Markov heads behind one interface.

A block-parallel drafter scores every position on its own. A head adds `correction = W2 code(state, slot)` to the base
logits, where `state` summarises the tokens drafted so far (the anchor first) and `slot` is the backbone's output at the
slot that predicts the next one. Training, chains and trees use the same four calls:

    slots = head.prepare(hidden)                    once for all slots
    state = head.initial_state(anchor, embed)       the anchor is consumed
    code  = head.code(state, slots[d])              low-rank code; logits = base + code @ head.rows(ids).T
    state = head.advance(state, token, embed, slots[d])   the token predicted at that slot is consumed

Sources: Domino arXiv 2605.29707 section 3; DSpark arXiv 2607.05147 section 3.2. Copied into exports: torch only.

Shape suffixes: D hidden, G head state, E rank of the correction, V (draft) vocabulary, `...` any leading dimensions.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

Embed = Callable[[Tensor], Tensor]  # token ids [...] -> the target's input embeddings [..., D]


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Linear map of [..., I] to [..., O] as one matrix product.

    torch multiplies strided slices with three dimensions row by row and copies the weight for each: 6 ms a call here.
    """
    return nn.functional.linear(x.reshape(-1, x.shape[-1]), weight, bias).view(*x.shape[:-1], weight.shape[0])


class CorrectionHead(nn.Module):
    """Base of the heads. Children are attached to the drafter under the tensor names of the public formats."""

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


class DominoHead(CorrectionHead):
    """One-layer bias-free GRU over token embeddings; code = SiLU(W1 [h ; s])."""

    def __init__(self, hidden_size: int, state_size: int, rank: int, vocab_size: int):
        super().__init__()
        self.prefix_gru = nn.GRU(hidden_size, state_size, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + state_size, rank, bias=False), nn.SiLU(), nn.Linear(rank, vocab_size, bias=False)
        )
        self.hidden_size, self.state_size = hidden_size, state_size

    @property
    def output(self) -> nn.Linear:
        return self.embed_proj[2]

    def prepare(self, hidden: Tensor) -> Tensor:
        # W1 [h ; s] = W1[:, :D] h + W1[:, D:] s: the first term is shared by all parents at a depth.
        return _linear(hidden, self.embed_proj[0].weight[:, : self.hidden_size])

    def initial_state(self, anchor: Tensor, embed: Embed) -> Tensor:
        embeds = embed(anchor)
        return self._step(embeds, embeds.new_zeros(*anchor.shape, self.state_size))

    def code(self, state: Tensor, slot: Tensor) -> Tensor:
        projected = _linear(state, self.embed_proj[0].weight[:, self.hidden_size :])
        return self.embed_proj[1](slot + projected)

    def advance(self, state: Tensor, token: Tensor, embed: Embed, slot: Tensor) -> Tensor:
        return self._step(embed(token), state)

    def _step(self, embeds: Tensor, state: Tensor) -> Tensor:
        # A sequence of one step, all blocks or nodes as its batch.
        flat_state = state.reshape(1, -1, self.state_size).contiguous()
        flat_embeds = embeds.reshape(1, -1, self.hidden_size).to(state.dtype)
        _, state_new = self.prefix_gru(flat_embeds, flat_state)
        return state_new.view(state.shape)


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

    kind = "vanilla"

    def __init__(self, hidden_size: int, rank: int, vocab_size: int, draft_vocab_size: int):
        super().__init__()
        self.markov_head = _MarkovTables(self.kind, hidden_size, rank, vocab_size, draft_vocab_size)
        self.hidden_size, self.rank = hidden_size, rank

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


class GatedMarkovHead(MarkovHead):
    """Markov head, gated: code = sigmoid(gate_proj [h ; W1[x]]) * W1[x]."""

    kind = "gated"

    def prepare(self, hidden: Tensor) -> Tensor:
        gate = self.markov_head.gate_proj
        return _linear(hidden, gate.weight[:, : self.hidden_size], gate.bias)

    def code(self, state: Tensor, slot: Tensor) -> Tensor:
        gate = slot + _linear(state, self.markov_head.gate_proj.weight[:, self.hidden_size :])
        return torch.sigmoid(gate) * state


class RnnMarkovHead(MarkovHead):
    """Markov head, rnn: state [s ; W1[x]] of size 2E; (g, c, o) = joint_proj [s ; W1[x] ; h], code = tanh(o)."""

    kind = "rnn"

    def prepare(self, hidden: Tensor) -> Tensor:
        joint = self.markov_head.joint_proj
        return _linear(hidden, joint.weight[:, 2 * self.rank :], joint.bias)

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
        return (slot + _linear(state, weight)).chunk(3, dim=-1)


_MARKOV = {f"markov_{cls.kind}": cls for cls in (MarkovHead, GatedMarkovHead, RnnMarkovHead)}


def build_head(spec, hidden_size: int, vocab_size: int) -> CorrectionHead | None:
    """The head that a `DrafterSpec` names; None for plain DFlash."""
    rows = spec.draft_vocab_size or vocab_size
    if spec.head_type == "none":
        return None
    if spec.head_type == "domino":
        return DominoHead(hidden_size, spec.gru_hidden_dim, spec.head_rank, rows)
    return _MARKOV[spec.head_type](hidden_size, spec.head_rank, vocab_size, rows)
