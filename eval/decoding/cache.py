"""Key/value store for target and drafter: preallocated, ragged over requests, compacted to the accepted path.

transformers' caches cannot keep scattered tree nodes (`crop` removes a suffix only), and they grow by copying. Here all
layers live in one tensor, a forward writes its tokens at columns chosen per request, and a commit moves the accepted
ones together.

Shape suffixes: L layers, R requests, H kv heads, T columns, M tokens of a forward, E head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


class TreeCache:
    """Keys and values of R requests.

    Attributes:
        lengths: committed columns of each request; its next token has this position.
    """

    def __init__(self, layers: int, requests: int, heads: int, capacity: int, head_size: int, dtype, device):
        # Zeros, not empty: a masked column is multiplied by a zero weight, and 0 * NaN would be NaN.
        self.data_L2RHTE = torch.zeros(layers, 2, requests, heads, capacity, head_size, dtype=dtype, device=device)
        self.lengths = [0] * requests
        self._columns_RM: Tensor | None = None
        self._start: int | None = None
        self._width = 0

    @classmethod
    def for_config(cls, config, requests: int, capacity: int, dtype, device) -> TreeCache:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        head_size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return cls(config.num_hidden_layers, requests, heads, capacity, head_size, dtype, device)

    @property
    def capacity(self) -> int:
        return self.data_L2RHTE.shape[4]

    @property
    def nbytes(self) -> int:
        return self.data_L2RHTE.numel() * self.data_L2RHTE.element_size()

    def place(self, columns_RM: Tensor) -> int:
        """Chooses the columns that the next forward writes. Returns the width that its mask must have."""
        first = columns_RM[0].tolist()
        self._width = int(columns_RM.max()) + 1
        if self._width > self.capacity:
            raise ValueError(f"cache holds {self.capacity} columns, this forward needs {self._width}")
        # One contiguous run shared by all requests (always so for one request) is a plain copy.
        run = first == list(range(first[0], first[0] + len(first)))
        same = len(self.lengths) == 1 or bool((columns_RM == columns_RM[0]).all())
        self._start, self._columns_RM = (first[0] if run and same else None), columns_RM
        return self._width

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes [R, H, M, E] keys and values at the placed columns and returns everything up to the width."""
        store = self.data_L2RHTE[layer_idx]
        if self._start is not None:
            stop = self._start + keys.shape[2]
            store[0, :, :, self._start : stop] = keys
            store[1, :, :, self._start : stop] = values
        else:
            index = self._columns_RM[:, None, :, None].expand(-1, keys.shape[1], -1, keys.shape[3])
            store[0].scatter_(2, index, keys)
            store[1].scatter_(2, index, values)
        return store[0, :, :, : self._width], store[1, :, :, : self._width]

    def commit(self, request: int, columns: list[int]) -> None:
        """Appends the given columns of a request (ascending, at or after its length) to what it keeps."""
        start, count = self.lengths[request], len(columns)
        if columns != list(range(start, start + count)):
            rows = self.data_L2RHTE[:, :, request]
            index = torch.tensor(columns, device=rows.device)
            rows[:, :, :, start : start + count] = rows.index_select(3, index)
        self.lengths[request] += count

    # What transformers asks a cache when it builds a causal mask itself (one request, so that nothing is ragged).
    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return max(self.lengths)

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(columns that the forward sees, column of the first of them)."""
        return self._width, 0
