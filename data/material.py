"""What a data set is made of: the answers of a run, the prompts that they are to, and all that is known of both."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from data.answers import check_origin, read_manifest, target_identity
from data.chat import ChatFormat, template_fingerprint
from data.fetch_target import resolve_target
from data.hub import without_paths
from data.prompt_store import Prepared
from data.rows import Rows, open_rows
from data.settings import RunConfig

VERSION = 1  # of the columns and files of a data set


@dataclass(frozen=True)
class Material:
    """What a data set is made of.

    Attributes:
        path: of the target.
        about: what the manifest says of its origin.
        key: changes with any of it.
    """

    rows: Rows
    prompts: Prepared
    tokenizer: object
    path: str
    about: dict
    key: str


def collect(config: RunConfig) -> Material:
    """Opens and checks answers, prompts and tokenizer. Raises ValueError when something is missing or unfinished."""
    from transformers import AutoTokenizer

    answers = config.path("answers")
    manifest = read_manifest(answers)
    if not manifest:
        raise ValueError(f"the answers in {answers} are missing; run: bash launch.sh regenerate CONFIG")
    counts = manifest.get("counts", {})
    left = counts.get("left", 0)
    if (left or not manifest.get("finished")) and not config.allow_partial:
        cut = f" (cut by time_budget, {left} turns are left)" if left and manifest.get("out_of_time") else ""
        raise ValueError(
            f"the answers in {answers} are not finished{cut}: run bash launch.sh regenerate CONFIG to its end, or give "
            "--allow_partial for a data set of those that are there"
        )
    path, form = resolve_target(config), ChatFormat.of(config)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=config.trust_remote_code)
    except (OSError, ValueError) as error:
        raise ValueError(f"target: cannot read the tokenizer of {path}: {str(error).splitlines()[0]}") from error
    now = {"target_identity": target_identity(path), "template": template_fingerprint(tokenizer, form)}
    check_origin(manifest, now | {"quantization": config.quantization}, answers, form)
    prompts = Prepared(config.path("prompts"))
    if manifest.get("prompts", {}).get("fingerprint", prompts.fingerprint) != prompts.fingerprint:
        raise ValueError(
            f"the answers in {answers} were asked with other prompts than those in {prompts.folder}: prepare them with "
            "the options of then, or delete both folders and run: bash launch.sh regenerate CONFIG"
        )
    rows = open_rows(answers)
    if not len(rows):
        raise ValueError(f"{answers} holds no answer")
    about = without_paths(
        {
            "settings": manifest.get("settings", {}),
            "partial": not manifest.get("finished") or left + counts.get("failed", 0) > 0,
            "counts": counts if manifest.get("finished") else {},  # else they are those of the run's beginning
            "prompts": {name: prompts.manifest.get(name) for name in ("fingerprint", "settings", "sources", "counts")},
        }
    )
    told = [VERSION, rows.digest, prompts.manifest["content"], about]
    key = hashlib.sha256(json.dumps(told, sort_keys=True).encode()).hexdigest()[:16]
    return Material(rows, prompts, tokenizer, path, about, key)
