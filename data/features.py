"""Hidden states of the target on disk, in bf16, so that training needs no forward of the target.

Layout: FOLDER/features/NNNNNN.safetensors, shards of several rows that hold `taps` [tokens, L*D], the rows one after
another, and in a cache (data/feature_cache.py) `final` [tokens, D], the hidden state after the last norm, which the LM
head takes. index.jsonl maps a row to its shard, offset and length. FOLDER/manifest.json says what they were made with.
`regenerate` fills RUN/answers while the target writes, the stage `features` and hybrid training fill RUN/cache. A row
has len(prompt) + len(answer) - 1 tokens: nothing needs the last one, which no label follows.

Shapes: R rows of a batch, S padded prompt, T generated tokens, L taps, D hidden size.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from data.answers import read_manifest
from data.disk import written
from data.feature_index import FeatureIndex, read_entries
from data.settings import RunConfig
from models.configuration import check_taps, default_taps

FOLDER, INDEX = "features", "index.jsonl"


def resolve_taps(config: RunConfig, num_layers: int) -> tuple[int, ...]:
    """The target layers that this run taps. Raises ValueError for taps that cannot be served."""
    count = config.num_taps or config.num_draft_layers
    taps = tuple(config.target_layer_ids) or default_taps(num_layers, count)
    check_taps(taps, num_layers)
    return taps


def check_space(folder: str, tokens: int, width: int, option: str, remedy: str) -> int:
    """Bytes that `tokens` rows of `width` bf16 numbers take. Raises ValueError when the disk has less free.

    Args:
        option, remedy: of the error line, what asks for the features and what to do without them.
    """
    place = Path(folder).absolute()
    existing = next(path for path in (place, *place.parents) if path.is_dir())
    size, free = tokens * width * 2, shutil.disk_usage(existing).free
    text = f"up to {size / 1e9:.2f} GB of features, {free / 1e9:.1f} GB free in {folder}"
    if size > free:
        raise ValueError(f"{option}: {text}; free some space or {remedy}")
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
        # Layers may lie on different devices.
        columns.append(torch.cat([prompt_SD, *later])[:length].to("cpu", torch.bfloat16))
    taps_MH = torch.cat(columns, dim=-1)
    assert taps_MH.shape[0] == length, (taps_MH.shape, length)
    return taps_MH


class FeatureWriter:
    """Writes shards. A shard is on disk before the index names it, and the index before answers.jsonl names its rows.

    Opening it removes what a killed run left: entries of rows that are not done, and shards that no entry names.
    """

    def __init__(self, folder: str, done: set[str] | None, rank: int = 0):
        """
        Args:
            folder: the one that holds `features`.
            done: rows that must be there; others are dropped. None keeps every whole entry.
            rank: several ranks fill one folder, each with an index and shards of its own.
        """
        self.folder, self._prefix = Path(folder, FOLDER), f"r{rank}-" if rank else ""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._index = self.folder / f"{self._prefix}{INDEX}"
        # The last entry of a row counts.
        index = {key: place for key, place in read_entries(self._index) if done is None or key in done}
        lost = sorted((done or set()) - set(index))
        if lost:
            raise ValueError(f"{self.folder} lacks features of {len(lost)} answers, such as {lost[0]}; delete {folder}")
        temporary = self.folder / f"{self._index.name}.partial"
        temporary.write_text("".join(_index_line(key, *place) for key, place in index.items()))
        temporary.replace(self._index)
        used = {shard for shard, _, _ in index.values()}
        for path in self.folder.glob(f"{self._prefix}[0-9]*.safetensors*"):
            if path.name not in used:
                path.unlink()
        self.count = max((int(name.removeprefix(self._prefix).split(".")[0]) + 1 for name in used), default=0)

    def write(self, taps: dict[str, Tensor], final: dict[str, Tensor] | None = None) -> None:
        """One shard. taps: row -> [len, L*D]; final: the same rows -> [len, D], or None. All bf16, on the CPU.

        Raises StageError when the disk refuses it; what was written before stays.
        """
        name = f"{self._prefix}{self.count:06d}.safetensors"
        partial = self.folder / f"{name}.partial"
        tensors = {"taps": torch.cat(list(taps.values()))}
        if final is not None:
            tensors["final"] = torch.cat([final[key] for key in taps])
        lines, offset = [], 0
        for key, value in taps.items():
            lines.append(_index_line(key, name, offset, len(value)))
            offset += len(value)
        with written(f"features in {self.folder}", partial):
            save_file(tensors, partial)
            partial.replace(self.folder / name)
            with open(self._index, "a") as file:
                file.write("".join(lines))
                file.flush()
                os.fsync(file.fileno())
        self.count += 1


class FeatureReader:
    """Reads rows of the shards without loading the rest (memory-mapped).

    Args:
        folder: RUN/answers (its `features` subfolder is accepted too) or RUN/cache.
        tap_ids, target: what the caller needs; ValueError when the features are of other taps or another target
            (`data.answers.target_identity`). None leaves the check out.
    """

    def __init__(self, folder: str, tap_ids: tuple[int, ...] | None = None, target: str | None = None):
        parent = Path(folder).parent if Path(folder).name == FOLDER else Path(folder)
        self.folder = parent / FOLDER
        settings = read_manifest(str(parent)).get("settings", {})
        if not settings.get("tap_ids"):
            raise ValueError(f"{parent} holds no features; regenerate with --keep_features true in another run_dir")
        self.tap_ids = tuple(settings["tap_ids"])
        if tap_ids is not None and tuple(tap_ids) != self.tap_ids:
            raise ValueError(f"{parent} holds features of layers {list(self.tap_ids)}, this run taps {list(tap_ids)}")
        if target is not None and target != settings["target_identity"]:
            raise ValueError(f"{parent} holds features of target {settings['target_identity']}, this run has {target}")
        # A shard is a mapping, of which the system allows a process some tens of thousands.
        self._open = functools.lru_cache(maxsize=256)(_open_shard)
        self.refresh()

    def refresh(self) -> None:
        """Reads the indexes again: what other processes have written since is seen from now on."""
        self.index = FeatureIndex(sorted(self.folder.glob(f"*{INDEX}")))

    def __contains__(self, row_id: str) -> bool:
        return self.index.place(row_id) is not None

    def length(self, row_id: str) -> int:
        """Tokens stored of a row, 0 for a row that is not there."""
        place = self.index.place(row_id)
        return place[2] if place else 0

    def get(self, row_id: str) -> tuple[Tensor, Tensor | None]:
        """Taps [len, L*D] in id order and final hidden states [len, D] (None where they were not stored), bf16.

        len = len(prompt_ids) + len(answer_ids) - 1.
        """
        place = self.index.place(row_id)
        if place is None:
            raise KeyError(f"{self.folder} has no features of row {row_id}")
        shard, offset, length = place
        taps, final = self._open(self.folder / shard)
        piece = slice(offset, offset + length)
        return taps[piece], None if final is None else final[piece]


def _open_shard(path: Path):
    file = safe_open(path, framework="pt")
    return file.get_slice("taps"), file.get_slice("final") if "final" in file.keys() else None


def _index_line(key: str, shard: str, offset: int, length: int) -> str:
    return json.dumps([key, shard, offset, length], ensure_ascii=False) + "\n"
