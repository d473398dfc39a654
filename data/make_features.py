"""Stage `features`: the target reads its answers once, and what training needs of it is kept in RUN/cache.

    bash launch.sh features CONFIG [--key value ...]
    torchrun --nproc_per_node 8 -m data.make_features CONFIG        several GPUs, each its share of the rows

For answers that were regenerated without taps, made by hand, or whose final hidden states an objective needs. The size
is printed and checked against the disk before the first byte. A killed run goes on where it stopped; the manifest is
marked finished last. `train --features offline` reads the cache.

Shape suffixes: R rows, S tokens.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from data.answers import AnswerRow, check_origin
from data.chat import ChatFormat
from data.environment import choose_device
from data.feature_cache import FOLDER, FeatureCache, cache_settings, capture
from data.features import resolve_taps
from data.fetch_target import resolve_target
from data.rows import Rows, answers_of, as_rows, open_answers
from data.settings import RunConfig, run_stage
from models.placement import placement
from models.target import Target, choose_dtype, load_target

# A batch holds at most so many tokens, padding included: its taps are a few GiB on a large target.
_BATCH_TOKENS = 32768


def main(argv: list[str]) -> int:
    return run_stage("features", argv, make_features)


def make_features(config: RunConfig) -> None:
    """Runs the stage. Raises ValueError for a user's mistake, a cache of another target included."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    path = resolve_target(config)
    rows, manifest = open_answers(config)
    device = choose_device(config.device)
    if device != "cpu":
        device = f"{device}:{os.environ.get('LOCAL_RANK', 0)}"
    dtype = choose_dtype(config.dtype, device)
    placed = placement(config.device_map)
    target = load_target(path, dtype, device, config.trust_remote_code, config.quantization, placed)
    form, taps = ChatFormat.of(config), resolve_taps(config, target.num_layers)
    settings = cache_settings(target, path, taps, config.quantization, form)
    check_origin(manifest, settings, answers_of(config), form)
    folder = config.path(FOLDER)
    cache = FeatureCache(folder, settings, config.max_row_length)
    width = (len(settings["tap_ids"]) + 1) * target.config.hidden_size
    cache.check_space(cache.missing(rows), width)
    cache = FeatureCache(folder, settings, config.max_row_length, rank, writing=True)
    own = cache.missing(rows[rank::world_size])
    fill(cache, target, settings["tap_ids"], own, config.answer_batch_size)
    if cache.finish(rows, settings):
        print(f"features: {len(rows)} rows in {folder}")


def fill(cache: FeatureCache, target: Target, tap_ids: list[int], rows: Sequence[AnswerRow], batch_size: int) -> None:
    """Captures rows and adds them to the cache, a batch of similar lengths at a time."""
    rows = as_rows(rows)
    with tqdm(total=len(rows), desc="features", unit="row") as bar:
        for batch in _batches(rows, cache.limit, batch_size):
            tokens_RS = _padded([(row.prompt_ids + row.answer_ids)[: cache.limit] for row in batch])
            taps_RSC, final_RSD = capture(target, tokens_RS.to(target.device), tap_ids, with_final=True)
            for row, taps_SC, final_SD in zip(batch, taps_RSC, final_RSD, strict=True):
                cache.add(row, taps_SC, final_SD)
            bar.update(len(batch))
    cache.flush()


def _batches(rows: Rows, limit: int, size: int) -> Iterator[Rows]:
    """The longest rows first; the first row of a batch is its longest."""
    order = np.argsort(-rows.lengths, kind="stable")
    lengths, start = np.minimum(rows.lengths, limit), 0
    while start < len(order):
        fitting = _BATCH_TOKENS // max(1, int(lengths[order[start]]))
        batch = order[start : start + max(1, min(size, fitting))]
        yield rows.select(batch)
        start += len(batch)


def _padded(rows: list[list[int]]) -> Tensor:
    padded_RS = torch.zeros(len(rows), max(map(len, rows)), dtype=torch.long)
    for padded_S, tokens in zip(padded_RS, rows, strict=True):
        padded_S[: len(tokens)] = torch.tensor(tokens)
    return padded_RS


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
