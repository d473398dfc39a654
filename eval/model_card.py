"""README.md of an export: what the drafter is, its recipe and figures, how to use it, and what clients lose."""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass, replace

from huggingface_hub import ModelCardData

from data.fetch_target import PACKAGED
from models.checkpoint import Drafter
from models.configuration import DrafterSpec
from models.formats.detect import FORMATS
from models.heads import head_title

from .serving import usage
from .table import number, rows_of, sections, settings_lines, summary_table
from .tables import main_tables, temperatures

# Hub id and licence of the targets that this project names itself.
KNOWN_TARGETS = {"smollm2-135m-instruct": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")}
# What the Hub offers code for; the other formats are read by serving engines only.
_LIBRARIES = {"transformers": "transformers", "speculators": "speculators"}
# Options of a training run that its recipe names, in this order.
_RECIPE = (
    "prompts", "num_prompts", "max_answer_length", "answer_temperature", "init_from_target", "init_drafter",
    "trainable", "anchors_per_row", "ce_weight", "kl_weight", "tv_weight", "position_weights", "loss_gamma",
    "lambda_start", "lambda_end", "lambda_horizon", "seed", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "warmup_ratio", "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps",
    "weight_decay", "adam_beta2", "max_grad_norm",
)  # fmt: skip
# Facts about a finished training, likewise.
_FACTS = (
    "rows", "steps", "train_seconds", "dtype", "engine", "zero_stage", "world_size", "draft_vocabulary_coverage",
    "label_agreement", "hardware", "versions", "git_commit",
)  # fmt: skip


@dataclass
class Origin:
    """Where a drafter comes from, as far as it is known.

    Attributes:
        target: the run's `target` option: a Hub id, or a name or path that only this machine knows.
        identity: of the target's weights, as the answers' manifest has it: `ID@COMMIT`, or a hash of a folder.
        provenance: what the training wrote beside the drafter.
        results: RUN/results.json of this very drafter.
    """

    target: str
    identity: str = ""
    provenance: dict | None = None
    results: dict | None = None


def model_card(drafter: Drafter, origin: Origin, form: str = "transformers", place: str = "DIR") -> str:
    """The whole README.md of a folder in the format of that name.

    Args:
        place: the Hub id under which the folder will lie, or a stand-in for its path.
    """
    trained_on = (origin.provenance or {}).get("config", {}).get("target") or origin.target
    hub_id, licence = describe_target(trained_on)
    shown = hub_id or os.path.basename(trained_on.rstrip("/"))
    drafter = replace(drafter, origin=_title(form, drafter.spec))
    chat_format = (origin.provenance or {}).get("chat_format")
    parts = [
        _metadata(hub_id, licence, drafter.spec, form),
        f"# Drafter for {shown}\n",
        _what(shown, drafter, form) + _target_weights(trained_on, origin.identity),
        "## Use\n",
        usage(drafter, form, hub_id or "TARGET", place, _best_budget(origin.results), chat_format)
        + ("" if place != "DIR" else "\n`DIR` is this folder or its Hub id.\n"),
        "## Measured\n",
        _measured(origin.results),
        "## What clients lose\n",
        _losses(drafter, origin.results),
        "## Training\n",
        _recipe(origin.provenance),
    ]
    return "\n".join(part for part in parts if part)


def describe_target(name: str) -> tuple[str | None, str | None]:
    """(Hub id, licence) of a target as far as its name tells them."""
    if name in KNOWN_TARGETS:
        return KNOWN_TARGETS[name]
    is_hub_id = (
        re.fullmatch(r"[A-Za-z0-9][\w.-]*/[\w.-]+", name) and not os.path.exists(name) and not name.endswith(".gguf")
    )
    return (name if is_hub_id else None), None


def _metadata(hub_id: str | None, licence: str | None, spec: DrafterSpec, form: str) -> str:
    """The front matter that the Hub reads."""
    # The drafter's layers may be made of the target's, so that the target's licence holds for it.
    terms = {"license": licence} if licence else {"license": "other", "license_name": "same-as-the-target"}
    if hub_id and not licence:
        terms["license_link"] = f"https://huggingface.co/{hub_id}"
    method = spec.head_type.split("_")[0]
    data = ModelCardData(
        base_model=hub_id,
        library_name=_LIBRARIES.get(form),
        pipeline_tag="text-generation",
        tags=["speculative-decoding", "dflash"] + ([method] if method != "none" else []),
        **terms,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _target_weights(trained_on: str, identity: str) -> str:
    """Which weights of the target it was trained for, as a line of the list; empty when that is not known."""
    if trained_on in PACKAGED:
        return f"- target: {' '.join(PACKAGED[trained_on].notice.split())}\n"
    if "@" in identity:
        hub_id, _, commit = identity.rpartition("@")
        return f"- target: {os.path.basename(hub_id) if os.path.isabs(hub_id) else hub_id}, commit {commit}\n"
    return f"- target: weights with fingerprint {identity}\n" if identity else ""


def _best_budget(results: dict | None) -> int | None:
    """The tree size that evaluation chose by measured cost for greedy decoding, as the example decodes; it is this
    machine's, as all speeds are."""
    choices = (results or {}).get("settings", {}).get("budget_choice") or []
    return next((choice["budget"] for choice in choices if choice["temperature"] == 0), None)


def _title(form: str, spec: DrafterSpec) -> str:
    """What other programs take the folder for: ours is z-lab's, with more files, wherever z-lab's can hold the drafter.

    A draft vocabulary is no hindrance: our head then has a row for each token of the full one.
    """
    if form == "transformers":
        with contextlib.suppress(ValueError):
            FORMATS["zlab"].check_can_hold(replace(spec, draft_vocab_size=None))
            form = "zlab"
    return FORMATS[form].title


def _what(target: str, drafter: Drafter, form: str) -> str:
    spec, config = drafter.spec, drafter.model.config
    listed = "draft_vocabulary.safetensors" if form == "transformers" else "d2t"
    vocabulary = (
        "the whole vocabulary"
        if drafter.draft_ids is None
        else f"the {len(drafter.draft_ids)} tokens listed in {listed}"
    )
    held = ", and stand in the file" if FORMATS[form].tables else ""
    parameters = sum(p.numel() for p in drafter.model.parameters())
    taps = ", ".join(map(str, spec.target_layer_ids))
    return (
        f"A block-parallel diffusion drafter (DFlash) with {head_title(spec.head_type)} for speculative decoding of "
        f"{target}. It proposes tokens which the target verifies: the text is the target's own, only faster.\n\n"
        f"- {config.num_hidden_layers} layers, hidden size {config.hidden_size}, {parameters / 1e6:.1f} million "
        f"parameters; embedding table and LM head are the target's{held}\n"
        f"- block of {spec.block_size} slots, {spec.layout} layout: {spec.num_proposals} tokens proposed a round\n"
        f"- reads the outputs of target layers {taps} (0-based, of {spec.num_target_layers})\n"
        f"- mask token id {spec.mask_token_id}\n"
        f"- trained to propose {vocabulary}\n"
    )


def _measured(results: dict | None) -> str:
    if results is None:
        return "Not measured yet: `bash launch.sh eval`, then export again.\n"
    parts = []
    for temperature in temperatures(results):
        names = [name for name, t in sections(results) if t == temperature]
        if len(names) > 1:
            parts += [f"Temperature {temperature:g}:\n", main_tables(results, temperature)]
        else:
            parts += [f"{names[0]}, temperature {temperature:g}:\n", summary_table(results, names[0], temperature)]
    hidden = ("target", "target_name", "drafter", "command")
    own = {k: v for k, v in results["settings"].items() if k not in hidden}
    parts.append("tau: tokens emitted a target forward, the target's own included. B: tree nodes. Settings:\n")
    return "\n".join([*parts, settings_lines(own)])


def _losses(drafter: Drafter, results: dict | None) -> str:
    same = (
        "The text never changes, since the target verifies every token (in bf16 nearly tied tokens may swap, as they "
    )
    lines = [same + "do with any change of batch shape). Speed does:\n"]
    if drafter.spec.head_type != "none":
        lines.append(
            "- A client that ignores the correction head proposes from the backbone alone (the method dflash_chain)."
            + _tau_loss(results)
        )
    if drafter.draft_ids is not None:
        lines.append(
            f"- The loss covered {len(drafter.draft_ids)} of {drafter.model.config.vocab_size} tokens. A client that "
            "ignores draft_vocabulary.safetensors scores the other tokens too, with scores that were never trained "
            "and, in the head, with rows of zeros: fewer drafts are accepted, and the LM head costs more."
        )
    return "\n".join(lines) + "\n"


def _tau_loss(results: dict | None) -> str:
    """Measured tau without and with the head, on the first section; empty when either is missing."""
    if results is None:
        return ""
    rows = {r["method"]: r for r in reversed(rows_of(results, "summary", *sections(results)[0]))}
    pairs = [
        (name, rows[name]["tau_mean"]) for name in ("domino_chain", "markov_chain", "dartree_pruned") if name in rows
    ]
    if "dflash_chain" not in rows or not pairs:
        return ""
    others = ", ".join(f"{number(tau, 2)} with {name}" for name, tau in pairs)
    return f" Measured tau: {number(rows['dflash_chain']['tau_mean'], 2)}, against {others}."


def _recipe(provenance: dict | None) -> str:
    if provenance is None:
        return "The checkpoint carries no provenance.json: its recipe is unknown.\n"
    config = provenance.get("config") or {}
    options = config | (config.get("training") or {})
    chosen = {name: options[name] for name in _RECIPE if options.get(name) not in (None, "")}
    facts = {name: provenance[name] for name in _FACTS if provenance.get(name) is not None}
    return "Distilled from the target's own answers; full options in provenance.json.\n\n" + settings_lines(
        chosen | facts
    )
