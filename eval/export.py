"""Stage `export`: a drafter folder that transformers, other clients of the z-lab/Domino format and we ourselves load.

    bash launch.sh export [CONFIG] [--drafter DIR] [--output DIR] [--dtype bf16]

Reads the finished RUN/drafter (or --drafter) and, when it belongs to that drafter, RUN/results.json. Writes RUN/export/
(or --output): config.json with flat and nested keys and both forms of the rope options, model.safetensors under the
public names (METHODS section 5A), the modelling files that `AutoModel.from_pretrained(DIR, trust_remote_code=True)`
loads, README.md as the model card, and provenance.json. With a draft vocabulary the head's output projection is
scattered to one row a token of the full vocabulary (zeros elsewhere) and draft_vocabulary.safetensors keeps the ids.

Tensors keep the dtype of the checkpoint, so that a reload is bit for bit the same; --dtype converts them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

import models
from data.answers import make_folder
from data.settings import RunConfig, run_stage
from models.checkpoint import (
    Drafter,
    finished_drafter,
    load_drafter,
    save_draft_ids,
)
from models.formats.folder import WEIGHTS
from models.heads import OUTPUT_PROJECTIONS
from models.target import choose_dtype

from .model_card import model_card
from .report import read_provenance, read_results

# The entry comes first; it imports the others relatively, which transformers' loader follows.
MODELLING_FILES = (
    "drafter.py", "block_attention.py", "configuration.py", "heads.py", "head.py", "head_domino.py",
    "head_markov.py", "head_confidence.py",
)  # fmt: skip
# Keys of transformers' configurations that say nothing about a drafter.
_NOISE = {
    "draft_vocab_size", "_name_or_path", "id2label", "label2id", "chunk_size_feed_forward", "is_encoder_decoder",
    "output_hidden_states", "output_attentions", "return_dict",
}  # fmt: skip
AUTO_MAP = {"AutoModel": "drafter.DFlashDraftModel"}
MARKER = "export.json"


def main(argv: list[str]) -> int:
    return run_stage("export", argv, export)


def export(config: RunConfig) -> Path:
    """Writes the export of a run and returns its folder. Raises ValueError for the user's mistakes."""
    output = Path(config.output or config.path("export")).resolve()
    check_output(output, config.run_dir)
    source = finished_drafter(config.run_dir, config.drafter)
    dtype = None if config.dtype == "auto" else choose_dtype(config.dtype, "cpu")
    drafter = load_drafter(source, dtype)
    make_folder(str(output.parent), "output")
    # Written beside the output and renamed, so that an export is whole or absent.
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        write_export(temporary, drafter, source, config)
        replace_folder(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"export: {source} -> {output} ({drafter.spec.layout} layout, {drafter.model.dtype})")
    return output


def check_output(output: Path, run_dir: str) -> None:
    """The output must be new, empty, or an earlier export of the same run."""
    for parent in output.parents:
        if parent.exists() and not parent.is_dir():
            raise ValueError(f"output: {output} lies under {parent}, which is a file")
    if not output.exists():
        return
    if not output.is_dir():
        raise ValueError(f"output: {output} is a file")
    if any(output.iterdir()) and read_marker(output).get("run") != run_identity(run_dir):
        raise ValueError(f"output: {output} is not empty and not an export of {run_dir}: choose another --output")


def run_identity(run_dir: str) -> str:
    """A name for the run's folder that tells nothing about the machine's paths."""
    return hashlib.sha256(os.path.realpath(run_dir).encode()).hexdigest()[:16]


def read_marker(folder: Path) -> dict:
    """What an export of ours says about itself; empty for any other folder."""
    path = folder / MARKER
    if not path.is_file():
        return {}
    try:
        marker = json.loads(path.read_text())
    except ValueError:
        return {}
    return marker if isinstance(marker, dict) else {}


def write_export(folder: Path, drafter: Drafter, source: str, config: RunConfig) -> None:
    """Fills an empty folder with the export of a loaded drafter."""
    folder.chmod(0o755)  # a temporary folder is private
    save_file(full_tensors(drafter), folder / WEIGHTS, metadata={"format": "pt"})
    if drafter.draft_ids is not None:
        save_draft_ids(folder, drafter.draft_ids)
    write_json(folder / "config.json", export_config(drafter))
    for name in MODELLING_FILES:
        shutil.copyfile(Path(models.__file__).parent / name, folder / name)
    provenance = without_paths(read_provenance(source))
    if provenance is not None:
        write_json(folder / "provenance.json", provenance)
    results = without_paths(results_of(config, source, provenance))
    (folder / "README.md").write_text(model_card(drafter, config.target, provenance, results))
    write_json(folder / MARKER, {"export": 1, "run": run_identity(config.run_dir)})
    for path in folder.iterdir():
        path.chmod(0o644)  # safetensors writes files for their owner alone


def full_tensors(drafter: Drafter) -> dict[str, Tensor]:
    """The tensors under their public names, W2 with one row a token of the full vocabulary."""
    tensors = {name: tensor.contiguous() for name, tensor in drafter.model.state_dict().items()}
    if drafter.draft_ids is not None:
        for name in OUTPUT_PROJECTIONS:
            if name in tensors:
                rows = tensors[name]
                full = rows.new_zeros(drafter.model.config.vocab_size, rows.shape[1])
                full[drafter.draft_ids] = rows
                tensors[name] = full
    return tensors


def export_config(drafter: Drafter) -> dict:
    """config.json of the export.

    It does not name the draft vocabulary's size: the tensors have full rows, and clients that know the vocabulary find
    it in its own file.
    """
    config = drafter.model.config.to_dict()
    rope = dict(config["rope_parameters"])
    # Older clients read the scaling apart from theta, and "default" is no scaling.
    scaling = {k: v for k, v in rope.items() if k != "rope_theta"}
    keys = {k: v for k, v in config.items() if v is not None and k not in _NOISE}
    keys |= drafter.spec.to_config_keys() | {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "auto_map": AUTO_MAP,
        "rope_theta": rope["rope_theta"],
        "rope_parameters": rope,
        "rope_scaling": None if rope["rope_type"] == "default" else {"type": rope["rope_type"], **scaling},
        "tie_word_embeddings": False,
        "dtype": str(drafter.model.dtype).removeprefix("torch."),
    }
    keys.pop("draft_vocab_size", None)
    return keys


def without_paths(value):
    """A JSON value with absolute paths cut to their last part: an export is meant to be published."""
    if isinstance(value, dict):
        return {key: without_paths(v) for key, v in value.items()}
    if isinstance(value, list):
        return [without_paths(v) for v in value]
    return os.path.basename(value.rstrip("/")) if isinstance(value, str) and os.path.isabs(value) else value


def results_of(config: RunConfig, source: str, provenance: dict | None) -> dict | None:
    """RUN/results.json if it measured this drafter, else None: a card must not show another checkpoint's figures."""
    path = Path(config.path("results.json"))
    if not path.is_file():
        return None
    results = read_results(path)
    measured = without_paths(results["settings"].get("provenance"))
    same_folder = Path(results["settings"].get("drafter") or "").resolve() == Path(source).resolve()
    return results if measured == provenance and (same_folder or provenance is not None) else None


def replace_folder(temporary: Path, output: Path) -> None:
    """Puts a finished folder in the place of an earlier export."""
    if not output.exists():
        temporary.rename(output)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    output.rename(old)  # onto an empty folder, which POSIX replaces
    temporary.rename(output)
    shutil.rmtree(old)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
