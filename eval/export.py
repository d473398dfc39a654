"""Stage `export`: a drafter folder for other programs, in one of the public formats.

    bash launch.sh export [CONFIG] [--drafter DIR] [--output DIR] [--dtype bf16] [--format FORMAT] [--target T]
    bash launch.sh export DRAFTER --output DIR [--format FORMAT] [--target T] [--push_to_hub OWNER/NAME [--private]]

Reads the finished RUN/drafter (or a drafter folder or Hub id, in any format that we read) and, when it belongs to that
drafter, RUN/results.json. Writes RUN/export/ (or --output): config.json with every default spelled out,
model.safetensors under the format's names (models/formats), README.md as the model card, and provenance.json.
`--format transformers`, the default, adds the modelling files that `AutoModel.from_pretrained(DIR,
trust_remote_code=True)` loads; with a draft vocabulary the head's output projection is scattered there to one row a
token of the full vocabulary (zeros elsewhere) and draft_vocabulary.safetensors keeps the ids. DeepSpec's and
speculators' files hold the target's embedding and LM head, for which the target is read.

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

from transformers.utils.logging import disable_progress_bar

from data.answers import make_folder, read_manifest
from data.disk import replace_folder, written
from data.fetch_target import resolve_target
from data.hub import check_access, push, without_paths
from data.settings import RunConfig, run_stage
from models.checkpoint import Drafter, finished_drafter, load_drafter
from models.fitting import check_against_target
from models.formats.detect import FORMATS
from models.formats.writing import needs_target, write_checkpoint
from models.target import Target, choose_dtype, load_target

from .chat_format import read_provenance
from .model_card import Origin, describe_target, model_card
from .publish import own_files
from .report import read_results
from .standalone import CUSTOM_GENERATE, DRAFTER, standalone

AUTO_MAP = {"AutoModel": "drafter.DFlashDraftModel"}
MARKER = "export.json"


def main(argv: list[str]) -> int:
    return run_stage("export", drafter_argument("export", argv), export)


def drafter_argument(stage: str, argv: list[str]) -> list[str]:
    """A stage's words, whose first may be a drafter (a folder or a Hub id) in the place of CONFIG.

    Exits with 2 when such an export names no --output: it belongs to no run.
    """
    if not argv or argv[0].startswith("-") or argv[0].endswith((".yaml", ".yml")) or os.path.isfile(argv[0]):
        return argv
    if stage == "export" and not any(word.split("=")[0] == "--output" for word in argv):
        print(f"export: {argv[0]} is a drafter, no config: give --output", file=sys.stderr)
        raise SystemExit(2)
    return [f"--drafter={argv[0]}", *argv[1:]]


def export(config: RunConfig) -> Path:
    """Writes the export of a run and returns its folder. Raises ValueError for the user's mistakes."""
    output = Path(config.output or config.path("export")).resolve()
    check_output(output, config.drafter or config.run_dir)
    if config.push_to_hub:
        check_access(config.push_to_hub)
    source = finished_drafter(config.run_dir, config.drafter)
    dtype = None if config.dtype == "auto" else choose_dtype(config.dtype, "cpu")
    drafter = load_drafter(source, dtype, allow_extra=config.allow_extra)
    print(f"drafter: {drafter.describe()}")
    # Refused before a target of many gigabytes is read.
    FORMATS[config.format].check_can_hold(drafter.spec)
    target = read_target(config, drafter)
    make_folder(str(output.parent), "output")
    # Written beside the output and renamed, so that an export is whole or absent.
    temporary = Path(tempfile.mkdtemp(prefix=f".{output.name}.", dir=output.parent))
    try:
        with written(f"the export {output}"):
            write_export(temporary, drafter, target, source, config)
            replace_folder(temporary, output)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"export: {source} -> {output} (format {config.format}, {drafter.model.dtype})")
    if config.push_to_hub:
        where = push(output, config.push_to_hub, config.private, "model", "drafter", own_files())
        print(f"uploaded: {where}")
    return output


def read_target(config: RunConfig, drafter: Drafter) -> Target | None:
    """The target, in the drafter's dtype, if this export needs it. Raises ValueError when it is another drafter's."""
    if not needs_target(drafter, config.format):
        return None
    disable_progress_bar()  # transformers' own, for loading weights
    target = load_target(resolve_target(config), drafter.model.dtype, trust_remote_code=config.trust_remote_code)
    check_against_target(drafter.spec, drafter.model.config, target)
    return target


def check_output(output: Path, origin: str) -> None:
    """The output must be new, empty, or an earlier export of the same run (or of the same drafter of no run)."""
    for parent in output.parents:
        if parent.exists() and not parent.is_dir():
            raise ValueError(f"output: {output} lies under {parent}, which is a file")
    if not output.exists():
        return
    if not output.is_dir():
        raise ValueError(f"output: {output} is a file")
    if any(output.iterdir()) and read_marker(output).get("run") != run_identity(origin):
        raise ValueError(f"output: {output} is not empty and not an export of {origin}: choose another --output")


def run_identity(origin: str) -> str:
    """A name for the folder of a run or drafter that tells nothing about the machine's paths."""
    return hashlib.sha256(os.path.realpath(origin).encode()).hexdigest()[:16]


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


def write_export(folder: Path, drafter: Drafter, target: Target | None, source: str, config: RunConfig) -> None:
    """Fills an empty folder with the export of a loaded drafter."""
    folder.chmod(0o755)  # a temporary folder is private
    write_checkpoint(drafter, target, config.format, folder, describe_target(config.target)[0] or "")
    if config.format == "transformers":
        keys = json.loads((folder / "config.json").read_text())
        write_json(folder / "config.json", keys | {"auto_map": AUTO_MAP})
        write_code(folder)
    provenance = without_paths(read_provenance(source))
    if provenance is not None:
        write_json(folder / "provenance.json", provenance)
    results = without_paths(results_of(config, source, provenance))
    origin = Origin(config.target, target_weights(config), provenance, results)
    card = model_card(drafter, origin, config.format, config.push_to_hub or "DIR")
    (folder / "README.md").write_text(card, encoding="utf-8")
    write_json(folder / MARKER, {"export": 1, "run": run_identity(config.drafter or config.run_dir)})
    for path in folder.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)  # safetensors writes files for their owner alone


def target_weights(config: RunConfig) -> str:
    """Identity of the target that answered for this run; empty for a drafter from elsewhere."""
    settings = {} if config.drafter else read_manifest(config.answers or config.path("answers")).get("settings") or {}
    return settings.get("target_identity") or ""


def write_code(folder: Path) -> None:
    """The modules that transformers runs: the drafter's, and the tree decoding of `custom_generate`."""
    (folder / "custom_generate").mkdir()
    for entry, place in ((DRAFTER, folder), (CUSTOM_GENERATE, folder / "custom_generate")):
        for name, text in standalone(*entry).items():
            (place / name).write_text(text, encoding="utf-8")


def results_of(config: RunConfig, source: str, provenance: dict | None) -> dict | None:
    """RUN/results.json if it measured this drafter, else None: a card must not show another checkpoint's figures."""
    path = Path(config.path("results.json"))
    if not path.is_file():
        return None
    # Looked at before it is read in full: a run's older or broken file is no matter of another drafter's export.
    try:
        settings = json.loads(path.read_text())["settings"]
        measured, folder = without_paths(settings.get("provenance")), Path(settings.get("drafter") or "")
    except (ValueError, KeyError, TypeError, AttributeError):
        return read_results(path)
    same_folder = folder.resolve() == Path(source).resolve()
    return read_results(path) if measured == provenance and (same_folder or provenance is not None) else None


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
