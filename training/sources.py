"""Where training finds the target's hidden states: a forward each step, what `regenerate` kept, or RUN/cache.

A source is asked for a row's features and, when it has none, is offered what the step has captured instead. Stored
features are bf16. A bf16 target loses nothing by that; with an fp32 target a hybrid run rounds in its first epoch too,
so that all its epochs see the same numbers, while `online` keeps fp32 (relative difference at most 2**-9 a value).
"""

from __future__ import annotations

import os

import torch
from torch import Tensor

from data.answers import AnswerRow
from data.feature_cache import FOLDER as CACHE
from data.feature_cache import FeatureCache
from data.features import FOLDER as TAPS
from data.features import FeatureReader
from data.rows import Rows, answers_of
from data.settings import RunConfig

Features = tuple[Tensor, Tensor | None]


class OnlineSource:
    """Nothing is stored: every step forwards the target."""

    name = "online"
    keeps = False

    def get(self, row: AnswerRow) -> Features | None:
        return None

    def complete(self, rows: Rows) -> bool:
        """Whether every row is stored, so that no step forwards the target."""
        return False

    def flush(self) -> None:
        """Puts on disk what was added; called before a checkpoint is written, so that a resume finds what it had."""
        return None

    def start_epoch(self) -> None:
        return None


class AnswersSource(OnlineSource):
    """The taps that `regenerate` kept beside the answers; there are no final hidden states."""

    name = "answers"

    def __init__(self, reader: FeatureReader):
        self.reader = reader

    def get(self, row: AnswerRow) -> Features | None:
        return self.reader.get(row.id)

    def complete(self, rows: Rows) -> bool:
        return all(row_id in self.reader for row_id in rows.ids())


class CacheSource(OnlineSource):
    """RUN/cache. A hybrid run (`keeps`) adds the rows that it lacks, as the first epoch meets them."""

    def __init__(self, cache: FeatureCache, rows: Rows, keeps: bool):
        self.cache, self.keeps, self.name = cache, keeps, "hybrid" if keeps else "offline"
        self._rows = rows

    def get(self, row: AnswerRow) -> Features | None:
        return self.cache.get(row)

    def add(self, row_id: str, taps_SC: Tensor, final_SD: Tensor) -> None:
        self.cache.add(self._rows[self._rows.find(row_id)], taps_SC, final_SD)

    def complete(self, rows: Rows) -> bool:
        return not self.cache.missing(rows)

    def flush(self) -> None:
        self.cache.flush()

    def start_epoch(self) -> None:
        """All ranks call this: what each has captured becomes readable by all, since rows change ranks."""
        if not self.keeps:
            return
        self.cache.flush()
        if torch.distributed.is_initialized():
            torch.distributed.barrier()
        self.cache.refresh()


def expects_stored(config: RunConfig) -> bool:
    """Whether `open_source` would find everything, as far as the folders and options tell: nothing is opened."""
    if config.features != "auto":
        return config.features == "offline"
    if os.path.isdir(answers_of(config)):
        kept = os.path.isdir(os.path.join(answers_of(config), TAPS))
        return os.path.isdir(config.path(CACHE)) or (config.keep_features and kept and not config.needs_teacher)
    return config.keep_features and not config.needs_teacher


def open_source(config: RunConfig, settings: dict, rows: Rows, width: int, rank: int) -> OnlineSource:
    """The source that `features` asks for. Raises ValueError when it lacks something or belongs to something else.

    Args:
        settings: of `data.feature_cache.cache_settings`, what this run needs.
        width: D, numbers of a hidden state.
    """
    folder, kind = config.path(CACHE), config.features
    if kind == "online":
        return OnlineSource()
    if kind == "hybrid":
        cache = FeatureCache(folder, settings, config.max_row_length)
        if rank == 0:
            cache.check_space(cache.missing(rows), (len(settings["tap_ids"]) + 1) * width)
        return CacheSource(FeatureCache(folder, settings, config.max_row_length, rank, writing=True), rows, keeps=True)
    if kind == "offline" or os.path.isdir(folder):
        cache = FeatureCache(folder, settings, config.max_row_length)
        missing = cache.missing(rows)
        if not missing:
            return CacheSource(cache, rows, keeps=False)
        if kind == "offline":
            raise ValueError(
                f"features: {folder} lacks {len(missing)} of {len(rows)} rows, such as {missing.id_of(0)}; "
                "run: bash launch.sh features CONFIG"
            )
    answers = answers_of(config)
    if config.keep_features and os.path.isdir(os.path.join(answers, TAPS)) and not config.needs_teacher:
        return AnswersSource(FeatureReader(answers, tuple(settings["tap_ids"]), settings["target_identity"]))
    return OnlineSource()
