"""Taps of the answers, kept in bf16 while the target writes them, so that training needs no forward of the target.

Layout: RUN/answers/features/NNNNNN.safetensors, one shard for each batch of generation, holding `taps` [tokens, L*D],
the batch's rows one after another; index.jsonl maps a row id to its shard, offset and length. A row has len(prompt) +
len(answer) - 1 tokens: the last token is never forwarded in generation, and no anchor's context needs it.

Shapes: R rows of a batch, S padded prompt, T generated tokens, L taps, D hidden size.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.answers import read_manifest
from data.settings import RunConfig
from models.configuration import check_taps, default_taps

FOLDER, INDEX = "features", "index.jsonl"


def resolve_taps(config: RunConfig, num_layers: int) -> tuple[int, ...]:
    """The target layers that this run taps. Raises ValueError for taps that cannot be served."""
    count = config.num_taps or config.num_draft_layers
    taps = tuple(config.target_layer_ids) or default_taps(num_layers, count)
    check_taps(taps, num_layers)
    return taps


def check_space(folder: str, tokens: int, width: int) -> int:
    """Bytes that `tokens` rows of `width` bf16 numbers take. Raises ValueError when the disk has less free."""
    size, free = tokens * width * 2, shutil.disk_usage(folder).free
    text = f"up to {size / 1e9:.2f} GB of features, {free / 1e9:.1f} GB free in {folder}"
    if size > free:
        raise ValueError(f"keep_features: {text}; free some space or pass --keep_features false")
    print(text, flush=True)
    return size


def gather_taps(hidden_states: tuple, tap_ids: tuple[int, ...], row: int, start: int, length: int) -> Tensor:
    """One row's taps [length, L*D] in bf16 from what `generate(output_hidden_states=[i + 1, ...])` returned.

    Args:
        hidden_states: per step a tuple over layers; step 0 is the prompt [R, S, D], each later one a token [R, 1, D].
        start: number of padding tokens at the left of the row.
    """
    columns = []
    for tap in tap_ids:
        prompt_SD = hidden_states[0][tap + 1][row, start:]
        later = [step[tap + 1][row] for step in hidden_states[1 : 1 + max(0, length - prompt_SD.shape[0])]]
        columns.append(torch.cat([prompt_SD, *later])[:length])
    taps_MH = torch.cat(columns, dim=-1).to(torch.bfloat16).cpu()
    assert taps_MH.shape[0] == length, (taps_MH.shape, length)
    return taps_MH


class FeatureWriter:
    """Writes one shard for each batch. A shard is on disk before its rows are in answers.jsonl.

    Opening it removes what a killed run left: shards whose rows were never recorded as answered.
    """

    def __init__(self, answers: str, done: set[str]):
        self.folder = Path(answers, FOLDER)
        self.folder.mkdir(parents=True, exist_ok=True)
        index = {key: place for key, place in _read_index(self.folder).items() if key in done}
        lost = sorted(done - set(index))
        if lost:
            raise ValueError(
                f"{self.folder} lacks features of {len(lost)} answers, such as {lost[0]}; delete {answers}"
            )
        temporary = self.folder / f"{INDEX}.partial"
        temporary.write_text("".join(_index_line(key, *place) for key, place in index.items()))
        temporary.replace(self.folder / INDEX)
        used = {shard for shard, _, _ in index.values()}
        for path in self.folder.glob("*.safetensors*"):
            if path.name not in used:
                path.unlink()
        self.count = max((int(name.split(".")[0]) + 1 for name in used), default=0)

    def write(self, taps: dict[str, Tensor]) -> None:
        """taps: row id -> [len, L*D]."""
        name = f"{self.count:06d}.safetensors"
        partial = self.folder / f"{name}.partial"
        save_file({"taps": torch.cat(list(taps.values()))}, partial)
        partial.replace(self.folder / name)
        lines, offset = [], 0
        for key, value in taps.items():
            lines.append(_index_line(key, name, offset, len(value)))
            offset += len(value)
        with open(self.folder / INDEX, "a") as file:
            file.write("".join(lines))
            file.flush()
            os.fsync(file.fileno())
        self.count += 1


class FeatureReader:
    """Reads rows of the shards without loading the rest (memory-mapped).

    Args:
        folder: RUN/answers (its `features` subfolder is accepted too).
        tap_ids, target: what the caller needs; ValueError when the features are of other taps or another target
            (`data.answers.target_identity`). None leaves the check out.
    """

    def __init__(self, folder: str, tap_ids: tuple[int, ...] | None = None, target: str | None = None):
        answers = Path(folder).parent if Path(folder).name == FOLDER else Path(folder)
        self.folder = answers / FOLDER
        settings = read_manifest(str(answers)).get("settings", {})
        if not settings.get("tap_ids"):
            raise ValueError(f"{answers} holds no features; regenerate with --keep_features true in another run_dir")
        self.tap_ids = tuple(settings["tap_ids"])
        if tap_ids is not None and tuple(tap_ids) != self.tap_ids:
            raise ValueError(f"{answers} holds features of layers {list(self.tap_ids)}, this run taps {list(tap_ids)}")
        if target is not None and target != settings["target_identity"]:
            raise ValueError(f"{answers} holds features of target {settings['target_identity']}, this run has {target}")
        self._index = _read_index(self.folder)
        self._shards: dict[str, object] = {}

    def __contains__(self, row_id: str) -> bool:
        return row_id in self._index

    def get(self, row_id: str) -> Tensor:
        """[len, L*D] bf16, taps in id order, len = len(prompt_ids) + len(answer_ids) - 1."""
        shard, offset, length = self._index[row_id]
        if shard not in self._shards:
            self._shards[shard] = safe_open(self.folder / shard, framework="pt").get_slice("taps")
        return self._shards[shard][offset : offset + length]


def _index_line(key: str, shard: str, offset: int, length: int) -> str:
    return json.dumps([key, shard, offset, length], ensure_ascii=False) + "\n"


def _read_index(folder: Path) -> dict[str, tuple[str, int, int]]:
    """The last entry of each id counts; an unfinished last line is left out."""
    path = folder / INDEX
    if not path.is_file():
        return {}
    rows = [json.loads(line) for line in path.read_text().split("\n")[:-1]]
    return {key: (shard, offset, length) for key, shard, offset, length in rows}
