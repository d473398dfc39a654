"""README.md of a data set: what the rows are, where they come from, how they were made, and how to load them."""

from __future__ import annotations

import os

from huggingface_hub import DatasetCardData

from data.hub import without_paths

_SIZES = (1_000, 10_000, 100_000, 1_000_000, 10_000_000, 100_000_000, 1_000_000_000)
# Settings of the answers that say how they were sampled and cut, in this order.
_SAMPLING = (
    "engine", "answer_temperature", "top_p", "top_k", "min_p", "seed", "max_prompt_length", "max_answer_length",
    "dtype",
)  # fmt: skip
_NOT_SAID = ("version", "prompts")  # of the preparation: the sources stand for themselves
_COLUMNS = {
    "`id`, `domain`, `source`, `language`": "of the prompt; later turns of a conversation end in `.turn2`, `.turn3`, "
    "...; `language` is empty where none was detected",
    "`messages`": "the conversation up to and with the answer: `role`, `content`, `tool_calls` (JSON), "
    "`tool_call_id`, `name`",
    "`tools`": "the functions that the target was offered, as JSON; null without any",
    "`prompt_ids`": "tokens up to where the assistant begins, as the target read them",
    "`answer_ids`": "the target's tokens, its end token included when `stop` is `eos`",
    "`stop`": "`eos`, or `length` for an answer that was cut, which does not end there",
    "`exact`": "true where the ids are those that the target sampled; false where its text was tokenised again and "
    "verified",
}


def dataset_card(manifest: dict, report: dict, target: str, place: str = "") -> str:
    """The whole README.md.

    Args:
        target: the run's `target` option.
        place: the Hub id under which the data set will lie; "" for the folder alone.
    """
    settings = manifest["settings"]
    name = os.path.basename(target.rstrip("/")) if os.path.exists(target) else without_paths(target)
    what = (
        f"Prompts of {_sources(manifest)} and the answers that {name} wrote to them, as text and as its own tokens: "
        "training data for a drafter that speculates for this target.\n"
    )
    partial = "**Not all prompts are answered yet.**\n" if manifest["partial"] else ""
    parts = [
        _metadata(report),
        f"# Answers of {name}\n",
        what,
        partial,
        "## Use\n",
        _use(place),
        "## Columns\n",
        "".join(f"- {name}: {what}\n" for name, what in _COLUMNS.items()),
        "## Origin\n",
        _facts(_origin(manifest, name)),
        "## Sampling\n",
        _facts({key.replace("_", " "): settings[key] for key in _SAMPLING if settings.get(key) not in (None, "")}),
        "## Content\n",
        _facts(_content(manifest, report)),
        "report.md has lengths, repetition, contamination and the mix.\n\n![](report.png)\n",
        "## Licence\n",
        "None is named here. It follows from the prompts' sources and from the target's own terms: add `license:` to "
        "the head of this file.\n",
    ]
    return "\n".join(part for part in parts if part)


def _metadata(report: dict) -> str:
    """The head that the Hub reads."""
    languages = [code for code in report["languages"] if len(code) == 2][:20]
    data = DatasetCardData(
        language=languages or None,
        task_categories=["text-generation"],
        size_categories=[size_category(report["rows"])],
        tags=["speculative-decoding", "distillation", "synthetic"],
        configs=[{"config_name": "default", "data_files": [{"split": "train", "path": "data/train-*.parquet"}]}],
    )
    return f"---\n{data.to_yaml()}\n---\n"


def size_category(rows: int) -> str:
    """As the Hub names sizes: `n<1K`, `1K<n<10K`, ..."""
    words = ["1K", "10K", "100K", "1M", "10M", "100M", "1B"]
    for index, limit in enumerate(_SIZES):
        if rows < limit:
            return f"n<{words[0]}" if index == 0 else f"{words[index - 1]}<n<{words[index]}"
    return f"n>{words[-1]}"


def _use(place: str) -> str:
    where = place or "DIR"
    command = f"bash launch.sh train CONFIG --answers {where}"
    return (
        f'```python\nfrom datasets import load_dataset\n\nrows = load_dataset("{where}", split="train")\n```\n\n'
        f"A drafter is trained on it by the project that wrote it:\n\n```\n{command}\n```\n"
        + ("" if place else "\n`DIR` is this folder or its Hub id.\n")
    )


def _sources(manifest: dict) -> str:
    sources = manifest["prompts"].get("sources") or []
    names = [source["name"] for source in sources]
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") or "unknown sources"


def _origin(manifest: dict, name: str) -> dict:
    settings, prompts = manifest["settings"], manifest["prompts"]
    hub_id, at, commit = (settings.get("target_identity") or "").rpartition("@")
    weights = f"{hub_id}, revision {commit}" if at else f"weights with fingerprint {commit}" if commit else "unknown"
    arguments = settings.get("template_args") or {}
    facts = {"target": f"{name}, {weights}", "chat template (hash with its arguments)": settings.get("template")}
    facts |= {"thinking": "on" if settings.get("thinking") else "off"}
    if arguments:
        facts["template arguments"] = ", ".join(f"{key}={value}" for key, value in arguments.items())
    for source in prompts.get("sources") or []:
        version = f", version {source['version']}" if source.get("version") else ""
        facts[f"prompts of {source['name']}"] = f"{source['kept']:,} kept{version}"
    chosen = _given({key: value for key, value in (prompts.get("settings") or {}).items() if key not in _NOT_SAID})
    facts["preparation"] = ", ".join(f"{key} {_plain(value)}" for key, value in chosen.items())
    facts |= {"fingerprint of the prompts": prompts.get("fingerprint"), "fingerprint": manifest["fingerprint"]}
    return facts


def _given(settings: dict) -> dict:
    """The settings that are not empty, those inside of others included."""
    inner = {key: _given(value) if isinstance(value, dict) else value for key, value in settings.items()}
    return {key: value for key, value in inner.items() if value not in (None, "", [], {}, 0)}


def _content(manifest: dict, report: dict) -> dict:
    rows, counts = report["rows"], manifest["counts"]
    facts = {"answered turns": f"{rows:,} of {report['conversations']:,} conversations"}
    if counts:
        facts["accounting"] = ", ".join(f"{value:,} {name}" for name, value in counts.items() if isinstance(value, int))
    facts |= {f"answers that end by {stop}": f"{n / rows:.1%}" for stop, n in report["stops"].items()}
    facts |= {
        "tokens": f"{report['prompt_tokens']['tokens']:,} of prompts, {report['answer_tokens']['tokens']:,} of answers"
    }
    return facts


def _facts(facts: dict) -> str:
    return "".join(f"- {name}: {_plain(value)}\n" for name, value in facts.items() if value not in (None, "")) or "-\n"


def _plain(value) -> str:
    if isinstance(value, dict):
        return "; ".join(f"{key} {_plain(v)}" for key, v in value.items())
    return " ".join(map(_plain, value)) if isinstance(value, list) else str(value)
