"""Key/value store for target and drafter: preallocated, ragged over requests, compacted to the accepted path.

transformers' caches cannot keep scattered tree nodes (`crop` removes a suffix only), and they grow by copying. Here all
layers of a device live in one tensor with a row for each request that may be decoded at once. A forward runs on
consecutive rows, which it sees as views, and writes its tokens at columns chosen per request; a commit moves the
accepted ones together. A request that ends leaves its row to the last one in use, so that the rows in use are always
the first ones.

Shape suffixes: L layers (of a device), R requests, H kv heads, T columns, M tokens of a forward, E head size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor


def column_bytes(config, dtype: torch.dtype) -> int:
    """Bytes of the keys and values of one token in all layers."""
    heads, head_size = _sizes(config)
    return 2 * config.num_hidden_layers * heads * head_size * dtype.itemsize


def _sizes(config) -> tuple[int, int]:
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


class TreeCache:
    """Keys and values of up to R requests.

    Attributes:
        capacity: T.
        stores: [L, 2, R, H, T, E] for each device, its own layers in their order; one tensor for all as a rule.
        lengths: committed columns of each row; the next token of its request has this position.
    """

    def __init__(self, requests: int, heads: int, capacity: int, head_size: int, dtype, devices: Sequence):
        """
        Args:
            devices: where each layer's keys and values come from, one entry a layer.
        """
        self.capacity, counts = capacity, Counter(devices)
        # Zeros, not empty: a masked column is multiplied by a zero weight, and 0 * NaN would be NaN.
        self.stores = [
            torch.zeros(layers, 2, requests, heads, capacity, head_size, dtype=dtype, device=device)
            for device, layers in counts.items()
        ]
        own = {device: iter(store_L2RHTE) for device, store_L2RHTE in zip(counts, self.stores, strict=True)}
        self._layers = [next(own[device]) for device in devices]
        self.lengths = [0] * requests
        self._rows = slice(0, requests)
        self._start: int | None = None
        self._width = 0

    @classmethod
    def for_config(cls, config, requests: int, capacity: int, dtype, devices) -> TreeCache:
        """A cache of a model's sizes. devices: one for all layers, or a list with one a layer."""
        heads, head_size = _sizes(config)
        each = devices if isinstance(devices, list) else [devices] * config.num_hidden_layers
        return cls(requests, heads, capacity, head_size, dtype, each)

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self.stores)

    def place(self, columns_RM: Tensor, first: int = 0) -> int:
        """Chooses the columns that the next forward writes, in the rows from `first` on. Returns its mask's width.

        Columns are best given on the CPU: they are read here, and reading them from a GPU would wait for it.
        """
        columns = columns_RM.tolist()
        self._width = max(max(row) for row in columns) + 1
        if self._width > self.capacity:
            raise ValueError(f"cache holds {self.capacity} columns, this forward needs {self._width}")
        self._rows = slice(first, first + len(columns))
        # One contiguous run shared by all requests (always so for one request) is a plain copy.
        start = columns[0][0]
        run = columns[0] == list(range(start, start + len(columns[0])))
        self._start = start if run and all(row == columns[0] for row in columns) else None
        rows_R1 = torch.arange(first, first + len(columns))[:, None]
        self._index = {s.device: (rows_R1.to(s.device), columns_RM.to(s.device)) for s in self.stores}
        return self._width

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        """Writes [R, H, M, E] keys and values at the placed columns and returns everything up to the width."""
        store = self._layers[layer_idx]
        if self._start is not None:
            stop = self._start + keys.shape[2]
            store[0, self._rows, :, self._start : stop] = keys
            store[1, self._rows, :, self._start : stop] = values
        else:
            # An indexed write of whole [H, E] rows: scatter_ goes element by element, ten times slower on a CPU.
            index = self._index[store.device]
            store[0].transpose(1, 2)[index] = keys.transpose(1, 2)
            store[1].transpose(1, 2)[index] = values.transpose(1, 2)
        return store[0, self._rows, :, : self._width], store[1, self._rows, :, : self._width]

    def commit(self, row: int, columns: list[int]) -> None:
        """Appends the given columns of a row (ascending, at or after its length) to what it keeps."""
        start, count = self.lengths[row], len(columns)
        if columns != list(range(start, start + count)):
            for store in self.stores:
                data = store[:, :, row]
                index = torch.tensor(columns, device=data.device)
                data[:, :, :, start : start + count] = data.index_select(3, index)
        self.lengths[row] += count

    def keep(self, rows: list[int]) -> None:
        """Row i takes over what row `rows[i]` holds (itself, or one after the kept rows); all others are empty."""
        for row, source in enumerate(rows):
            if source != row:
                length = self.lengths[row] = self.lengths[source]
                for store in self.stores:
                    store[:, :, row, :, :length] = store[:, :, source, :, :length]
        self.lengths[len(rows) :] = [0] * (len(self.lengths) - len(rows))

    # What transformers asks a cache when it builds a causal mask itself (one request, so that nothing is ragged).
    is_compileable = False

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return max(self.lengths[self._rows])

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return max(self.lengths[self._rows])

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """(columns that the forward sees, column of the first of them)."""
        return self._width, 0
