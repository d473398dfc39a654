"""A checkpoint folder or Hub repository: config.json and safetensors, in one file or in shards. Never a pickle."""

from __future__ import annotations

import contextlib
import json
import os
import re
from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError, safe_open
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


def local_folder(path_or_id: str, option: str = "drafter") -> str:
    """The folder itself, or the local copy of a Hub repository (its config.json and safetensors).

    Args:
        option: the option that gave it, for the message.

    Raises ValueError in one line for something that is neither.
    """
    if os.path.exists(path_or_id) or not re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", path_or_id):
        return path_or_id
    try:
        return snapshot_download(path_or_id, allow_patterns=PATTERNS)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(f"{option}: {path_or_id} is no folder here and cannot be had from the Hub: {reason}") from None


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


def weight_files(folder: str | os.PathLike) -> list[Path]:
    """The safetensors files of a folder: one, or the shards that its index names.

    Raises ValueError when there is none, with the command that converts a pickle.
    """
    folder = Path(folder)
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    if not (folder / INDEX).is_file():
        pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
        convert = (
            f"; if you trust {pickles[0]}, convert it there: {_CONVERT.format(name=pickles[0])}" if pickles else ""
        )
        raise ValueError(f"drafter: {folder} holds no {WEIGHTS} (pickled weights are not loaded){convert}")
    try:
        shards = sorted(set(json.loads((folder / INDEX).read_text())["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"drafter: {folder / INDEX} is no index of shards: {error!r}") from None
    for name in shards:
        if os.path.basename(name) != name or not (folder / name).is_file():
            raise ValueError(f"drafter: {folder / INDEX} names {name}, which is not in its folder")
    return [folder / name for name in shards]


def read_shapes(files: list[Path]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors, from the files' headers."""
    shapes: dict[str, tuple[int, ...]] = {}
    for path in files:
        with _whole(path), safe_open(path, framework="pt") as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
    return shapes


def read_weights(files: list[Path]) -> dict[str, Tensor]:
    """All tensors of the files."""
    return {name: tensor for path in files for name, tensor in read_tensors(path).items()}


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file; anything else, a pickle above all, is refused."""
    with _whole(path):
        return load_file(path)


@contextlib.contextmanager
def _whole(path: Path):
    try:
        yield
    except SafetensorError as error:
        raise ValueError(f"drafter: {path} is not a whole safetensors file: {error}") from None
