"""Domino's head (arXiv 2605.29707 section 3): a GRU over the drafted tokens corrects the logits of the next one.

Copied into exports: torch only. Shape suffixes: as in head.py.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .head import CorrectionHead, Embed, linear


class DominoHead(CorrectionHead):
    """One-layer bias-free GRU over token embeddings; code = SiLU(W1 [h ; s])."""

    title = "Domino's GRU correction head"
    output_name = "embed_proj.2.weight"

    def __init__(self, hidden_size: int, state_size: int, rank: int, vocab_size: int):
        super().__init__()
        self.prefix_gru = nn.GRU(hidden_size, state_size, bias=False)
        self.embed_proj = nn.Sequential(
            nn.Linear(hidden_size + state_size, rank, bias=False), nn.SiLU(), nn.Linear(rank, vocab_size, bias=False)
        )
        self.hidden_size, self.state_size = hidden_size, state_size

    @classmethod
    def build(cls, spec, hidden_size: int, vocab_size: int) -> DominoHead:
        return cls(hidden_size, spec.gru_hidden_dim, spec.head_rank, spec.draft_vocab_size or vocab_size)

    @property
    def output(self) -> nn.Linear:
        return self.embed_proj[2]

    def prepare(self, hidden: Tensor) -> Tensor:
        # W1 [h ; s] = W1[:, :D] h + W1[:, D:] s: the first term is shared by all parents at a depth.
        return linear(hidden, self.embed_proj[0].weight[:, : self.hidden_size])

    def initial_state(self, anchor: Tensor, embed: Embed) -> Tensor:
        embeds = embed(anchor)
        return self._step(embeds, embeds.new_zeros(*anchor.shape, self.state_size))

    def code(self, state: Tensor, slot: Tensor) -> Tensor:
        projected = linear(state, self.embed_proj[0].weight[:, self.hidden_size :])
        return self.embed_proj[1](slot + projected)

    def advance(self, state: Tensor, token: Tensor, embed: Embed, slot: Tensor) -> Tensor:
        return self._step(embed(token), state)

    def _step(self, embeds: Tensor, state: Tensor) -> Tensor:
        # All blocks or nodes are the batch of one step. The cell has the values of `nn.GRU`, which wraps it in a loop
        # over time: 0.25 ms a step more on a CPU, where a step takes 0.4 (sizes of the demo).
        gru = self.prefix_gru
        flat_state, flat_embeds = state.reshape(-1, self.state_size), embeds.reshape(-1, self.hidden_size)
        state_new = torch.gru_cell(flat_embeds.to(state.dtype), flat_state, gru.weight_ih_l0, gru.weight_hh_l0)
        return state_new.view(state.shape)
