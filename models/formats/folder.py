"""A checkpoint folder or Hub repository: config.json and safetensors, in one file or in shards. Never a pickle."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt")
# Nothing else is fetched: code that comes with a drafter is never run.
PATTERNS = ["config.json", "*.safetensors", INDEX]
_CONVERT = (
    'python -c "import torch; from safetensors.torch import save_file; save_file({{k: v.contiguous() for k, v in '
    "torch.load('{name}', weights_only=True).items()}}, 'model.safetensors')\""
)


def local_folder(path_or_id: str) -> str:
    """The folder itself, or the local copy of a Hub repository (its config.json and safetensors).

    Raises ValueError in one line for something that is neither.
    """
    if os.path.exists(path_or_id) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path_or_id):
        return path_or_id
    try:
        return snapshot_download(path_or_id, allow_patterns=PATTERNS)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"drafter: {path_or_id} is no folder here and cannot be had from the Hub: {reason}") from None


def read_keys(folder: str | os.PathLike) -> dict:
    """config.json as it is. Raises ValueError in one line."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"drafter: {folder} holds no config.json")
    try:
        keys = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"drafter: {path} is not valid JSON: {error}") from None
    if not isinstance(keys, dict):
        raise ValueError(f"drafter: {path} must hold an object")
    return keys


def read_weights(folder: str | os.PathLike) -> dict[str, Tensor]:
    """All tensors of the folder. Raises ValueError when a file is missing, broken or a pickle."""
    folder = Path(folder)
    if (folder / WEIGHTS).is_file() or not (folder / INDEX).is_file():
        return read_tensors(folder / WEIGHTS)
    try:
        shards = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, AttributeError) as error:
        raise ValueError(f"drafter: {folder / INDEX} is no index of shards: {error!r}") from None
    outside = [name for name in shards if os.path.basename(name) != name]
    if outside:
        raise ValueError(f"drafter: {folder / INDEX} names files outside its folder: {outside}")
    tensors: dict[str, Tensor] = {}
    for name in shards:
        tensors |= read_tensors(folder / name)
    return tensors


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file; anything else, a pickle above all, is refused."""
    if not path.is_file():
        pickles = sorted(p.name for p in path.parent.iterdir() if p.suffix in PICKLES) if path.parent.is_dir() else []
        hint = f"; {pickles[0]} may hold code: if you trust it, convert it there with " if pickles else ""
        command = _CONVERT.format(name=pickles[0]) if pickles else ""
        raise ValueError(f"drafter: {path.parent} holds no {path.name} (pickled weights are not loaded){hint}{command}")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"drafter: {path} is not a whole safetensors file: {error}") from None
