"""Writes a drafter's folder in a public format. What a format has no words for is refused, never left out.

Tensors keep their dtype, so that a drafter comes back from any format that can hold it bit for bit.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from ..checkpoint import Drafter, save_draft_ids
from ..fitting import drop_equal_tables, name_layers, rows_of_head
from ..heads import output_projections
from ..target import Target
from .detect import FORMATS
from .folder import WEIGHTS
from .format import EMBED, LM_HEAD, TO_DRAFT, TO_TARGET, Format
from .zlab import Own


def needs_target(drafter: Drafter, name: str) -> bool:
    """Whether writing asks for the target: its tables go into the file, the drafter's are compared with them, or its
    number of layers is not known."""
    return FORMATS[name].tables or drafter.own_tables or drafter.spec.num_target_layers is None


def write_checkpoint(drafter: Drafter, target: Target | None, name: str, folder: Path, target_name: str = "") -> None:
    """Fills a folder with config.json and weights in the format of that name (see `FORMATS`).

    Args:
        target: needed where `needs_target` says so.
        target_name: what a format that names its target writes, a Hub id.

    Raises ValueError for a drafter that the format cannot hold.
    """
    form = FORMATS[name]
    form.check_can_hold(drafter.spec)
    if target is not None:
        name_layers(drafter, target)
        drafter = drop_equal_tables(drafter, target)
    elif needs_target(drafter, name):
        raise ValueError(
            f"format {name} holds what only the target knows (its tables or its number of layers): give --target"
        )
    tensors = {n: tensor.contiguous() for n, tensor in drafter.model.state_dict().items()}
    if form.tables:
        tensors |= tables_of(drafter, target)
    elif drafter.own_tables:
        raise ValueError(f"format {name} has no place for a drafter's own embedding and LM head: choose another")
    if drafter.draft_ids is not None:
        tensors |= _vocabulary(drafter, form, tensors)
    config = form.write(drafter.spec, drafter.model.config) | {"dtype": str(drafter.model.dtype).split(".")[-1]}
    if isinstance(form, Own):
        config.pop("draft_vocab_size", None)  # the tensors have full rows; the ids are in a file of their own
        if drafter.draft_ids is not None:
            save_draft_ids(folder, drafter.draft_ids)
    if "speculators_config" in config:
        verifier = config["speculators_config"]["verifier"]
        verifier["name_or_path"] = target_name or None
        verifier["architectures"] = list(target.model.config.architectures or [])
    renamed = {form.their_name(n): tensor for n, tensor in tensors.items()}
    save_file(renamed, os.path.join(folder, WEIGHTS), metadata={"format": "pt"})
    (Path(folder) / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def tables_of(drafter: Drafter, target: Target) -> dict[str, Tensor]:
    """Embedding and LM head for the file: the drafter's own, else the target's, in the drafter's dtype."""
    embedding, head = drafter.embedding_VD, drafter.head_VD
    if embedding is None:
        embedding = _padded(target.model.get_input_embeddings().weight, drafter.model.config.vocab_size)
    if head is None:
        rows = None if drafter.draft_ids is not None else drafter.model.config.vocab_size
        head = _padded(rows_of_head(target, drafter.draft_ids), rows)
    dtype = drafter.model.dtype
    return {EMBED: embedding.detach().to(dtype).contiguous(), LM_HEAD: head.detach().to(dtype).contiguous().clone()}


def _padded(table: Tensor, rows: int | None) -> Tensor:
    """The table with as many rows as the drafter's config says: tables of one vocabulary are padded differently."""
    if rows is None or rows == len(table):
        return table
    return table[:rows] if rows < len(table) else torch.cat([table, table.new_zeros(rows - len(table), table.shape[1])])


def _vocabulary(drafter: Drafter, form: Format, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """What says the draft vocabulary: maps in speculators, rows of zeros for the other tokens in our own folders."""
    ids, size = drafter.draft_ids.cpu(), drafter.model.config.vocab_size
    if not isinstance(form, Own):
        known = torch.zeros(size, dtype=torch.bool).index_fill(0, ids, True)
        return {TO_TARGET: ids - torch.arange(len(ids)), TO_DRAFT: known}
    full = {}
    for name in output_projections():
        if name in tensors:
            full[name] = tensors[name].new_zeros(size, tensors[name].shape[1]).index_copy(0, ids, tensors[name])
    return full
