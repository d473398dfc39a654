"""The feature cache RUN/cache: taps and final hidden states of the answers, filled offline or in the first epoch.

A row is known by its id and its tokens, so that answers written anew are captured anew. The cache as a whole belongs to
one target, one chat template and one set of taps. Layout and precision (bf16): data/features.py.

Shape suffixes: R rows, S tokens, C concatenated tap width L*D, D hidden.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from data.answers import AnswerRow, make_folder, read_manifest, target_identity, write_manifest
from data.chat import PLAIN, ChatFormat, template_fingerprint
from data.features import FeatureReader, FeatureWriter, check_space
from data.row_table import Rows, as_rows
from models.target import Target

FOLDER = "cache"
# What is captured is gathered to shards of about this size; a kill loses no more than this.
_SHARD_BYTES = 256 * 2**20


def cache_settings(
    target: Target,
    target_path: str,
    tap_ids: Sequence[int],
    quantization: str = "none",
    form: ChatFormat = PLAIN,
) -> dict:
    """What features depend on: a cache made under other settings is refused."""
    tokenizer = target.tokenizer
    template = template_fingerprint(tokenizer, form) if getattr(tokenizer, "chat_template", None) else None
    identity = target_identity(target_path)
    return {"tap_ids": list(tap_ids), "target_identity": identity, "template": template, "quantization": quantization}


def capture(
    target: Target,
    tokens_RS: Tensor,
    tap_ids: Sequence[int],
    position_ids: Tensor | None = None,
    with_final: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Taps [R, S, C] and final hidden states [R, S, D] (None unless asked for) of right-padded rows, in one forward.

    Attention is causal, so padding on the right changes nothing before it and needs no mask.

    Args:
        position_ids: [R, S], for rows that hold several documents: each starts at 0 again, and they do not see each
            other. None for one document a row.
    """
    mask = None if position_ids is None else target.document_masks(position_ids)
    output = target.forward(
        tokens_RS, tuple(tap_ids), position_ids, mask, cache=_Uncached(), with_logits=False, with_final=with_final
    )
    # A tensor made in inference mode cannot be saved for the backward pass.
    return output.taps.clone(), output.final.clone() if with_final else None


class _Uncached:
    """Stands where transformers asks for a cache, and keeps nothing.

    Without one transformers looks for packed documents in the positions, which waits for the device at every forward.
    The causal mask that it then leaves out or makes is the same.
    """

    is_compileable = False

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *args, **kwargs) -> tuple[Tensor, Tensor]:
        return keys, values

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return query_length, 0


class FeatureCache:
    """Rows in RUN/cache, read and added. Opening it to write drops what a killed run left half done.

    Raises ValueError, naming what differs, when the folder belongs to another target, template or set of taps.
    """

    def __init__(self, folder: str, settings: dict, limit: int, rank: int = 0, writing: bool = False):
        """
        Args:
            settings: of `cache_settings`.
            limit: rows are cut here (tokens), `max_row_length`.
        """
        self.folder, self.limit = folder, limit
        stored = read_manifest(folder).get("settings", {})
        for name, value in settings.items():
            if stored and stored.get(name) != value:
                raise ValueError(
                    f"features: {folder} was made with {name} {stored.get(name)}, this run has {value}: delete it"
                )
        self._writer = None
        if writing:
            make_folder(folder, "run_dir")
            if not stored:
                write_manifest(folder, {"finished": False, "settings": settings})
            self._writer = FeatureWriter(folder, None, rank)
        self._reader = FeatureReader(folder) if stored or writing else None
        self._taps: dict[str, Tensor] = {}
        self._final: dict[str, Tensor] = {}
        self._bytes = 0
        self._added: set[str] = set()  # by this process; the reader sees them only after `refresh`

    def missing(self, rows: Sequence[AnswerRow]) -> Rows:
        """The rows that are not in the cache, or were cut at a smaller limit."""
        rows = as_rows(rows)
        if self._reader is None:
            return rows
        return rows.select(np.fromiter((i for i, row in enumerate(rows) if not self._has(row)), np.int64))

    def get(self, row: AnswerRow) -> tuple[Tensor, Tensor | None] | None:
        """Taps [S - 1, C] and final hidden states [S - 1, D] in bf16, or None for a row that is not there yet."""
        return self._reader.get(row_key(row)) if self._has(row) else None

    def add(self, row: AnswerRow, taps_SC: Tensor, final_SD: Tensor) -> None:
        """Adds a row's features of (at least) all tokens but the last; on disk once a shard is full, or by `flush`.

        A row that is there already is left as it is: a batch is captured whole, also for one row that was missing.
        """
        key, length = row_key(row), self._needed(row)
        if key in self._added or self._has(row):
            return
        self._added.add(key)
        # A copy: a slice would keep the whole batch in memory.
        self._taps[key] = taps_SC[:length].to("cpu", torch.bfloat16, copy=True)
        self._final[key] = final_SD[:length].to("cpu", torch.bfloat16, copy=True)
        self._bytes += self._taps[key].nbytes + self._final[key].nbytes
        if self._bytes >= _SHARD_BYTES:
            self.flush()

    def flush(self) -> None:
        if self._taps:
            self._writer.write(self._taps, self._final)
            self._taps, self._final, self._bytes = {}, {}, 0

    def refresh(self) -> None:
        """Makes rows readable that other ranks have written."""
        self._reader.refresh()

    def check_space(self, rows: Sequence[AnswerRow], width: int) -> int:
        """Bytes of the rows, printed; `width` numbers a token. Raises ValueError when the disk has less free."""
        tokens = int(np.minimum(as_rows(rows).lengths, self.limit).sum(dtype=np.int64)) - len(rows)
        return check_space(self.folder, tokens, width, "features", "pass --features online")

    def finish(self, rows: Sequence[AnswerRow], settings: dict) -> bool:
        """Writes the final manifest if every row is there (the last of several ranks sees them all)."""
        self.refresh()
        if self.missing(rows):
            return False
        write_manifest(self.folder, {"finished": True, "settings": settings, "rows": len(rows)})
        return True

    def _needed(self, row: AnswerRow) -> int:
        return min(self.limit, len(row.prompt_ids) + len(row.answer_ids)) - 1

    def _has(self, row: AnswerRow) -> bool:
        return self._reader is not None and self._reader.length(row_key(row)) >= self._needed(row)


def row_key(row: AnswerRow) -> str:
    """Id and tokens of a row: another answer to the same prompt is another row."""
    tokens = json.dumps([list(row.prompt_ids), list(row.answer_ids)]).encode()
    return f"{row.id} {hashlib.sha256(tokens).hexdigest()[:16]}"
