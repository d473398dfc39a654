"""Drafter checkpoints: reading any known format into a `Drafter`, and checking that drafter and target belong together.

The formats themselves are in models/formats. Our own folders use z-lab's names (METHODS section 5A); a reduced draft
vocabulary is one extra file there, `draft_vocabulary.safetensors`, with the kept token ids. The head's output
projection has either one row a kept token (our training checkpoints) or one row a vocabulary token (exports, so that
other clients can read them); the loader accepts both.

Shape suffixes: V (draft) vocabulary, D hidden.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import Qwen3Config

from .bundle import Drafter
from .configuration import DrafterSpec, spec_difference
from .drafter import DFlashDraftModel
from .formats.detect import detect
from .formats.folder import local_folder, read_keys, read_shapes, read_tensors, read_weights, weight_files
from .formats.format import EMBED, LM_HEAD, TO_DRAFT, TO_TARGET, Format
from .heads import output_projections

DRAFT_VOCABULARY = "draft_vocabulary.safetensors"


def save_draft_ids(folder: str | os.PathLike, draft_ids: Tensor) -> None:
    save_file({"draft_token_ids": draft_ids.cpu().long().contiguous()}, os.path.join(folder, DRAFT_VOCABULARY))


def finished_drafter(run_dir: str, given: str = "") -> str:
    """The folder of the drafter to work with: the one that the user gave (or its Hub id), else the run's finished one.

    Raises ValueError naming the command to run first. The trainer renames RUN/drafter into place, so it is whole.
    """
    folder = local_folder(given) if given else os.path.join(run_dir, "drafter")
    if os.path.isfile(os.path.join(folder, "config.json")):
        return folder
    if given:
        raise ValueError(f"drafter: {given} holds no config.json")
    raise ValueError(f"no finished drafter in {run_dir}: run first: bash launch.sh train CONFIG")


def read_config(folder: str | os.PathLike) -> Qwen3Config:
    """A drafter's configuration in our keys, whatever its format. Raises ValueError in one line."""
    keys, shapes = read_keys(folder), read_shapes(weight_files(folder))
    return detect(keys, shapes).read(keys, shapes)


def read_draft_ids(folder: str | os.PathLike, config: Qwen3Config, extra: dict[str, Tensor]) -> Tensor | None:
    """The kept token ids [draft V], ascending; None when the drafter proposes any token."""
    path, ids = Path(folder) / DRAFT_VOCABULARY, None
    if TO_TARGET in extra:  # speculators: the target id of draft id i is i + d2t[i]
        path, ids = Path(folder), extra[TO_TARGET] + torch.arange(len(extra[TO_TARGET]))
        kept = extra.get(TO_DRAFT)
        if kept is not None and kept.bool().nonzero().flatten().tolist() != ids.tolist():
            raise ValueError(f"drafter: d2t and t2d in {folder} name different tokens")
    elif path.is_file():
        ids = read_tensors(path).get("draft_token_ids")
        if ids is None or ids.ndim != 1 or not len(ids):
            raise ValueError(f"drafter: {path} must hold a one-dimensional tensor draft_token_ids")
    elif getattr(config, "draft_vocab_size", None):
        raise ValueError(f"drafter: {folder} has a draft vocabulary but neither {DRAFT_VOCABULARY} nor d2t")
    if ids is not None and (ids.min() < 0 or ids.max() >= config.vocab_size or (ids.diff() <= 0).any()):
        raise ValueError(f"drafter: {path} must hold ascending ids below vocab_size {config.vocab_size}")
    return ids


def load_drafter(
    folder: str, dtype: torch.dtype | None = torch.float32, device: str = "cpu", allow_extra: bool = False
) -> Drafter:
    """Loads a drafter checkpoint strictly: every tensor present, none left over, all finite.

    Args:
        folder: a folder, or the id of a Hub repository.
        dtype: None keeps the stored one.
        allow_extra: go on when config.json or the file holds something that is not known here.

    Raises ValueError in one line that names the file, key or tensor at fault.
    """
    folder = local_folder(folder)
    keys, files = read_keys(folder), weight_files(folder)
    shapes = read_shapes(files)
    form = detect(keys, shapes)
    unknown = form.unknown_keys(keys)
    if unknown and not allow_extra:
        raise ValueError(f"drafter: config.json in {folder} has unknown keys {unknown}; --allow_extra goes on")
    config = form.read(keys, shapes)
    tensors, extra = sort_tensors(form, read_weights(files))
    draft_ids = read_draft_ids(folder, config, extra)
    if draft_ids is not None:
        config.draft_vocab_size = len(draft_ids)
        for name in output_projections():
            if name in tensors and tensors[name].shape[0] == config.vocab_size != len(draft_ids):
                tensors[name] = tensors[name][draft_ids].contiguous()
    model = DFlashDraftModel(config)
    if allow_extra:
        tensors = {name: tensor for name, tensor in tensors.items() if name in model.state_dict()}
    check_tensors(model, tensors, folder)
    # Several stored dtypes become the widest one, so that none loses bits.
    widest = max((t.dtype for t in tensors.values()), key=lambda kind: kind.itemsize)
    model = model.to(dtype=dtype or widest)
    model.load_state_dict(tensors)
    model = model.to(device=device).eval().requires_grad_(False)
    # In the stored dtype, in which they may equal the target's; `fit_to_target` converts those that do not.
    tables = [extra[n].to(device) if n in extra else None for n in (EMBED, LM_HEAD)]
    check_tables(model, *tables)
    return Drafter(model, None if draft_ids is None else draft_ids.to(device), *tables, form.title)


def sort_tensors(form: Format, stored: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(tensors of the module under our names, tables and vocabulary maps), without what nothing needs."""
    renamed = {ours: tensor for name, tensor in stored.items() if (ours := form.our_name(name)) is not None}
    names = (EMBED, LM_HEAD, TO_TARGET, TO_DRAFT) if form.tables else ()
    return {n: t for n, t in renamed.items() if n not in names}, {n: t for n, t in renamed.items() if n in names}


def check_tensors(model: torch.nn.Module, tensors: dict[str, Tensor], folder: str) -> None:
    """Raises ValueError naming missing, unexpected, misshapen or non-finite tensors."""
    own = model.state_dict()
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or extra:
        hint = "; --allow_extra leaves the unexpected ones out" if extra and not missing else ""
        raise ValueError(
            f"drafter: {folder} does not fit its config: missing tensors {missing}, unexpected {extra}{hint}"
        )
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"drafter: {name} has shape {tuple(tensor.shape)}, its config needs {tuple(own[name].shape)}"
            )
        if not torch.isfinite(tensor).all():
            raise ValueError(f"drafter: {name} in {folder} holds NaN or infinite values")


def check_tables(model: DFlashDraftModel, embedding_VD: Tensor | None, head_VD: Tensor | None) -> None:
    """Raises ValueError for an embedding or LM head of another size than config.json says."""
    config = model.config
    rows = getattr(config, "draft_vocab_size", None) or config.vocab_size
    for name, table, size in ((EMBED, embedding_VD, config.vocab_size), (LM_HEAD, head_VD, rows)):
        if table is not None and table.shape != (size, config.hidden_size):
            raise ValueError(
                f"drafter: {name} has shape {tuple(table.shape)}, its config needs {(size, config.hidden_size)}"
            )


def check_same_spec(a: DrafterSpec, b: DrafterSpec, what: str) -> None:
    """Raises ValueError listing every semantic option in which two drafters differ."""
    difference = spec_difference(a, b)
    if difference:
        raise ValueError(f"{what}: " + ", ".join(f"{k} is {x}, not {y}" for k, (x, y) in difference.items()))
