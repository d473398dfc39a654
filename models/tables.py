"""Embedding table and LM head that came with a drafter and differ from the target's (METHODS section 5, B and C).

Block inputs and base logits go through them then; everything that reads or scores tokens for the drafter asks
`Drafter.tables(target)`, which is the target itself when the drafter has none of its own.

Shape suffixes: V vocabulary, D hidden, `...` any leading dimensions.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .target import Target


class OwnTables:
    """The two calls of `Target` that a drafter uses, through its own tables where it has them.

    Attributes:
        embedding_VD: one row a token of the vocabulary, or None for the target's.
        head_VD: one row a token of the draft vocabulary, or None for the target's.
    """

    def __init__(self, target: Target, embedding_VD: Tensor | None, head_VD: Tensor | None):
        self.target, self.embedding_VD, self.head_VD = target, embedding_VD, head_VD
        # Gemma scales what it looks up; the drafter was trained on scaled rows of its own table too.
        self.scale = getattr(target.model.get_input_embeddings(), "embed_scale", 1.0)

    def embed(self, ids: Tensor) -> Tensor:
        """Input embeddings [..., D] of token ids."""
        if self.embedding_VD is None:
            return self.target.embed(ids)
        return nn.functional.embedding(ids, self.embedding_VD) * self.scale

    def logits(self, hidden: Tensor, ids: Tensor | None = None) -> Tensor:
        """Base logits [..., V] over the draft vocabulary `ids` (None: all tokens), scaled as the target's own."""
        if self.head_VD is None:
            return self.target.logits(hidden, ids)
        flat = hidden.reshape(-1, hidden.shape[-1]).to(self.head_VD.dtype)
        logits = self.target.scale_logits(nn.functional.linear(flat, self.head_VD))
        return logits.unflatten(0, hidden.shape[:-1])


def same_rows(own_VD: Tensor, theirs_VD: Tensor) -> bool:
    """Whether two tables agree in the rows that both have, in the coarser of their dtypes.

    Tables are padded differently, and a target loaded in fp32 from bf16 files still holds bf16 values.
    """
    rows = min(len(own_VD), len(theirs_VD))
    dtype = min(own_VD.dtype, theirs_VD.dtype, key=lambda kind: kind.itemsize)
    own, theirs = own_VD[:rows].to(dtype), theirs_VD[:rows].to(device=own_VD.device, dtype=dtype)
    return own.shape == theirs.shape and torch.equal(own, theirs)
