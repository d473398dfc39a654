"""Whether a drafter is asked in the chat format that it was trained in: thinking on in one and off in the other costs
it most of its acceptance (TRAPS 28), and nothing else would say so.
"""

from __future__ import annotations

import json
from pathlib import Path

from data.chat import PLAIN, ChatFormat, template_fingerprint
from data.settings import RunConfig


def read_provenance(drafter_folder: str) -> dict | None:
    """What the training wrote beside the drafter; None for a drafter from elsewhere."""
    path = Path(drafter_folder) / "provenance.json"
    return json.loads(path.read_text()) if path.is_file() else None


def trained_format(provenance: dict | None) -> dict | None:
    """`thinking`, `template_args` and `template` of the answers that a drafter learned; None when it does not say.

    `template` is None for a drafter of an earlier version, which knew one format only.
    """
    if not provenance:
        return None
    return {**PLAIN.recorded, "template": None} | provenance.get("chat_format", {})


def compare_formats(config: RunConfig, tokenizer, provenance: dict | None) -> dict:
    """What results say of the format: this evaluation's template (a hash that thinking and template_args change), the
    drafter's own format, and whether they are equal (None when the drafter does not say)."""
    form, trained = ChatFormat.of(config), trained_format(provenance)
    template = template_fingerprint(tokenizer, form) if getattr(tokenizer, "chat_template", None) else None
    now = {**form.recorded, "template": template}
    equal = None if trained is None else not _differences(trained, now)
    return {"template": template, "drafter": trained, "equal": equal}


def warning(config: RunConfig, tokenizer, provenance: dict | None) -> str | None:
    """One line for a drafter that was trained in another format, else None."""
    found = compare_formats(config, tokenizer, provenance)
    if found["equal"] is not False:
        return None
    now = {**ChatFormat.of(config).recorded, "template": found["template"]}
    what = "; ".join(_differences(found["drafter"], now))
    return f"warning: the drafter was trained in another chat format ({what}): expect fewer accepted tokens"


def _differences(trained: dict, now: dict) -> list[str]:
    """In words. The template's hash also follows the options: it is named where they are equal."""
    names = [name for name in ("thinking", "template_args") if trained[name] != now[name]]
    if not names and None not in (trained["template"], now["template"]) and trained["template"] != now["template"]:
        names = ["template"]
    return [f"{name} {trained[name]}, here {now[name]}" for name in names]
