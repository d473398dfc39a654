"""Drafter checkpoints: config.json and safetensors under the public z-lab/Domino names (METHODS section 5A).

A reduced draft vocabulary is one extra file, `draft_vocabulary.safetensors`, with the kept token ids. The head's output
projection has either one row a kept token (our training checkpoints) or one row a vocabulary token (exports, so that
other clients can read them); the loader accepts both.
"""

from __future__ import annotations

import json
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen3Config

from .configuration import DrafterSpec, merge_rope, spec_difference
from .drafter import DFlashDraftModel
from .heads import OUTPUT_PROJECTIONS
from .target import Target

WEIGHTS, DRAFT_VOCABULARY = "model.safetensors", "draft_vocabulary.safetensors"


@dataclass
class Drafter:
    """A drafter ready for decoding: the module, and the ids it can propose (None: the whole vocabulary)."""

    model: DFlashDraftModel
    draft_ids: Tensor | None = None

    @property
    def spec(self) -> DrafterSpec:
        return self.model.spec

    def to_target_ids(self, ids: Tensor) -> Tensor:
        """Draft-vocabulary indices -> token ids of the target."""
        return ids if self.draft_ids is None else self.draft_ids[ids]


def save_draft_ids(folder: str | os.PathLike, draft_ids: Tensor) -> None:
    save_file({"draft_token_ids": draft_ids.cpu().long().contiguous()}, os.path.join(folder, DRAFT_VOCABULARY))


def finished_drafter(run_dir: str, given: str = "") -> str:
    """The drafter to work with: the folder that the user gave, else the finished one of the run.

    Raises ValueError naming the command to run first. The trainer renames RUN/drafter into place, so it is whole.
    """
    folder = given or os.path.join(run_dir, "drafter")
    if os.path.isfile(os.path.join(folder, "config.json")):
        return folder
    if given:
        raise ValueError(f"drafter: {given} holds no config.json")
    raise ValueError(f"no finished drafter in {run_dir}: run first: bash launch.sh train CONFIG")


def read_config(folder: str | os.PathLike) -> Qwen3Config:
    """Reads a drafter's config.json, its rope options in whichever place they stand. Raises ValueError in one line."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"drafter: {folder} holds no config.json")
    try:
        keys = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"drafter: {path} is not valid JSON: {error}") from None
    rope = merge_rope(keys)
    return Qwen3Config(
        **{k: v for k, v in keys.items() if k not in ("rope_theta", "rope_scaling")} | {"rope_parameters": rope}
    )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Reads a safetensors file; anything else, a pickle above all, is refused."""
    if not path.is_file():
        raise ValueError(f"drafter: {path.parent} holds no {path.name} (pickled weights are not loaded)")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise ValueError(f"drafter: {path} is not a whole safetensors file: {error}") from None


def read_draft_ids(folder: str | os.PathLike, config: Qwen3Config) -> Tensor | None:
    """The kept token ids [draft V], ascending; None when the drafter proposes any token."""
    path = Path(folder) / DRAFT_VOCABULARY
    if not path.is_file():
        if getattr(config, "draft_vocab_size", None):
            raise ValueError(f"drafter: {folder} has a draft vocabulary but no {DRAFT_VOCABULARY}")
        return None
    ids = read_tensors(path).get("draft_token_ids")
    if ids is None or ids.ndim != 1 or not len(ids):
        raise ValueError(f"drafter: {path} must hold a one-dimensional tensor draft_token_ids")
    if ids.min() < 0 or ids.max() >= config.vocab_size or (ids.diff() <= 0).any():
        raise ValueError(f"drafter: {path} must hold ascending ids below vocab_size {config.vocab_size}")
    return ids


def load_drafter(folder: str, dtype: torch.dtype | None = torch.float32, device: str = "cpu") -> Drafter:
    """Loads a drafter checkpoint strictly: every tensor present, none left over, all finite.

    Raises ValueError in one line that names the file, key or tensor at fault. `dtype` None keeps the stored one.
    """
    config = read_config(folder)
    tensors = read_tensors(Path(folder) / WEIGHTS)
    draft_ids = read_draft_ids(folder, config)
    if draft_ids is not None:
        config.draft_vocab_size = len(draft_ids)
        for name in OUTPUT_PROJECTIONS:
            if name in tensors and tensors[name].shape[0] == config.vocab_size != len(draft_ids):
                tensors[name] = tensors[name][draft_ids].contiguous()
    model = DFlashDraftModel(config)
    check_tensors(model, tensors, folder)
    # Several stored dtypes become the widest one, so that none loses bits.
    stored = max((t.dtype for t in tensors.values()), key=lambda kind: kind.itemsize)
    model = model.to(dtype=dtype or stored)
    model.load_state_dict(tensors)
    model = model.to(device=device).eval().requires_grad_(False)
    return Drafter(model, None if draft_ids is None else draft_ids.to(device))


def check_tensors(model: torch.nn.Module, tensors: dict[str, Tensor], folder: str) -> None:
    """Raises ValueError naming missing, unexpected, misshapen or non-finite tensors."""
    own = model.state_dict()
    missing, extra = sorted(own.keys() - tensors.keys()), sorted(tensors.keys() - own.keys())
    if missing or extra:
        raise ValueError(f"drafter: {folder} does not fit its config: missing tensors {missing}, unexpected {extra}")
    for name, tensor in tensors.items():
        if tensor.shape != own[name].shape:
            raise ValueError(
                f"drafter: {name} has shape {tuple(tensor.shape)}, its config needs {tuple(own[name].shape)}"
            )
        if not torch.isfinite(tensor).all():
            raise ValueError(f"drafter: {name} in {folder} holds NaN or infinite values")


def check_against_target(spec: DrafterSpec, config: Qwen3Config, target: Target) -> None:
    """Refuses a drafter that cannot belong to this target, before anything runs."""
    if config.hidden_size != target.config.hidden_size:
        raise ValueError(f"drafter has hidden_size {config.hidden_size}, target {target.config.hidden_size}")
    if spec.num_target_layers != target.num_layers:
        raise ValueError(
            f"drafter belongs to a target of {spec.num_target_layers} layers, this one has {target.num_layers}"
        )
    check_mask_token(spec.mask_token_id, target)
    own = getattr(target.tokenizer, "mask_token_id", None)
    if own is not None and own != spec.mask_token_id:
        warnings.warn(
            f"the tokenizer's mask token is {own}, the drafter was trained with {spec.mask_token_id}, which is used",
            stacklevel=2,
        )


def fit_to_target(drafter: Drafter, target: Target) -> Drafter:
    """Checks that a drafter belongs to the target, and limits its proposals to tokens that can really be emitted.

    Embedding tables are often padded beyond what the tokenizer can decode, and the drafter's and the target's may be
    padded differently (TRAPS 18). Rows beyond the common part are cut from the head's output projection, in place.
    """
    model = drafter.model
    check_against_target(drafter.spec, model.config, target)
    known = target.vocab_size if target.tokenizer is None else len(target.tokenizer)
    usable = min(target.vocab_size, model.config.vocab_size, known)
    if drafter.draft_ids is None:
        if usable == target.vocab_size == model.config.vocab_size:
            return drafter
        ids = torch.arange(usable, device=target.device)
    else:
        ids = drafter.draft_ids[drafter.draft_ids < usable]
    model.spec = replace(model.spec, draft_vocab_size=len(ids))
    if model.head is not None:
        output = model.head.output  # ids ascend, so that the rows to keep are the first ones
        output.weight = torch.nn.Parameter(output.weight[: len(ids)], requires_grad=False)
        output.out_features = len(ids)
    return Drafter(model, ids)


def check_mask_token(mask_token_id: int | None, target: Target) -> None:
    """The mask id is explicit, inside the embedding table, and neither an eos nor the pad id (TRAPS 15, 16)."""
    if mask_token_id is None:
        raise ValueError("mask_token_id is not set: give --mask_token_id, the id of a token the target never emits")
    if not 0 <= mask_token_id < target.vocab_size:
        raise ValueError(f"mask_token_id {mask_token_id} lies outside the target's {target.vocab_size} embeddings")
    if mask_token_id in target.eos_ids:
        raise ValueError(f"mask_token_id {mask_token_id} is an eos id of the target: choose another --mask_token_id")
    pad = getattr(target.config, "pad_token_id", None)
    if mask_token_id == pad:
        raise ValueError(f"mask_token_id {mask_token_id} is the target's pad id: choose another --mask_token_id")


def check_same_spec(a: DrafterSpec, b: DrafterSpec, what: str) -> None:
    """Raises ValueError listing every semantic option in which two drafters differ."""
    difference = spec_difference(a, b)
    if difference:
        raise ValueError(f"{what}: " + ", ".join(f"{k} is {x}, not {y}" for k, (x, y) in difference.items()))
