"""README.md of an export: what the drafter is, its recipe and figures, how to use it, and what clients lose."""

from __future__ import annotations

import os
import re

from models.checkpoint import Drafter
from models.configuration import DrafterSpec

from .table import number, rows_of, sections, settings_lines, summary_table

# Hub id and licence of the targets that this project names itself.
KNOWN_TARGETS = {"smollm2-135m-instruct": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")}
_HEADS = {
    "none": "no correction head (plain DFlash)",
    "domino": "Domino's GRU correction head",
    "markov_vanilla": "DSpark's vanilla Markov head",
    "markov_gated": "DSpark's gated Markov head",
    "markov_rnn": "DSpark's recurrent Markov head",
}
# Options of a training run that its recipe names, in this order.
_RECIPE = (
    "prompts", "num_prompts", "max_answer_length", "answer_temperature", "init_from_target", "anchors_per_row",
    "loss_gamma", "lambda_start", "lambda_end", "seed", "learning_rate", "lr_scheduler_type", "warmup_steps",
    "warmup_ratio", "max_steps", "num_train_epochs", "per_device_train_batch_size", "gradient_accumulation_steps",
    "weight_decay", "adam_beta2", "max_grad_norm",
)  # fmt: skip
# Facts about a finished training, likewise.
_FACTS = (
    "rows", "steps", "train_seconds", "dtype", "engine", "zero_stage", "world_size", "draft_vocabulary_coverage",
    "label_agreement", "hardware", "versions", "git_commit",
)  # fmt: skip


def model_card(drafter: Drafter, target_name: str, provenance: dict | None, results: dict | None) -> str:
    """The whole README.md.

    Args:
        target_name: the run's `target` option: a Hub id, or a name or path that only this machine knows.
        provenance: what the training wrote beside the drafter, or None.
        results: RUN/results.json of this very drafter, or None.
    """
    trained_on = (provenance or {}).get("config", {}).get("target") or target_name
    hub_id, licence = describe_target(trained_on)
    shown = hub_id or os.path.basename(trained_on.rstrip("/"))
    spec = drafter.spec
    parts = [
        _metadata(hub_id, licence, spec),
        f"# Drafter for {shown}\n",
        _what(shown, drafter),
        "## Use\n",
        _use(hub_id or "TARGET", spec),
        "## Measured\n",
        _measured(results),
        "## What clients lose\n",
        _losses(drafter, results),
        "## Training\n",
        _recipe(provenance),
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


def _metadata(hub_id: str | None, licence: str | None, spec: DrafterSpec) -> str:
    # The drafter's layers may be made of the target's, so that the target's licence holds for it.
    lines = ["library_name: transformers", "pipeline_tag: text-generation"]
    lines += [f"base_model: {hub_id}"] if hub_id else []
    lines += [f"license: {licence}"] if licence else ["license: other", "license_name: same-as-the-target"]
    tags = ["speculative-decoding", "dflash"] + ([spec.head_type.split("_")[0]] if spec.head_type != "none" else [])
    return "\n".join(["---", *lines, "tags:", *(f"- {tag}" for tag in tags), "---", ""])


def _what(target: str, drafter: Drafter) -> str:
    spec, config = drafter.spec, drafter.model.config
    vocabulary = (
        "the whole vocabulary"
        if drafter.draft_ids is None
        else f"the {len(drafter.draft_ids)} tokens listed in draft_vocabulary.safetensors"
    )
    parameters = sum(p.numel() for p in drafter.model.parameters())
    taps = ", ".join(map(str, spec.target_layer_ids))
    return (
        f"A block-parallel diffusion drafter (DFlash) with {_HEADS[spec.head_type]} for speculative decoding of "
        f"{target}. It proposes tokens which the target verifies: the text is the target's own, only faster.\n\n"
        f"- {config.num_hidden_layers} layers, hidden size {config.hidden_size}, {parameters / 1e6:.1f} million "
        "parameters; embedding table and LM head are the target's\n"
        f"- block of {spec.block_size} slots, {spec.layout} layout: {spec.num_proposals} tokens proposed a round\n"
        f"- reads the outputs of target layers {taps} (0-based, of {spec.num_target_layers})\n"
        f"- mask token id {spec.mask_token_id}\n"
        f"- trained to propose {vocabulary}\n"
    )


def _use(hub_id: str, spec: DrafterSpec) -> str:
    ours = (
        "With the project that trained it, which uses the head and decodes by trees:\n\n"
        "```\nbash launch.sh eval --drafter DIR\n```\n"
    )
    if spec.shift_label:
        return (
            ours
            + "\ntransformers' own loop reads the fill-in layout only: this drafter is shifted and does not fit it.\n"
        )
    return (
        "With transformers (5.24 or newer), which uses the backbone alone:\n\n"
        "```python\n"
        "from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{hub_id}")\n'
        f'target = AutoModelForCausalLM.from_pretrained("{hub_id}")\n'
        'drafter = AutoModel.from_pretrained("DIR", trust_remote_code=True)\n'
        'messages = [{"role": "user", "content": "What is 7 times 8?"}]\n'
        "inputs = tokenizer.apply_chat_template(\n"
        '    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True\n)\n'
        'output = target.generate(**inputs, assistant_model=drafter, speculation_type="dflash", max_new_tokens=64)\n'
        "```\n\n"
        "`DIR` is this folder or its Hub id. " + ours
    )


def _measured(results: dict | None) -> str:
    if results is None:
        return "Not measured yet: `bash launch.sh eval`, then export again.\n"
    parts = []
    for benchmark, temperature in sections(results):
        parts.append(f"{os.path.basename(benchmark)}, temperature {temperature:g}:\n")
        parts.append(summary_table(results, benchmark, temperature))
    own = {k: v for k, v in results["settings"].items() if k not in ("target", "target_name", "drafter")}
    own["benchmarks"] = [os.path.basename(name) for name in own.get("benchmarks") or []]
    return "\n".join([*parts, "tau: tokens emitted a target forward. B: tree nodes. Settings:\n", settings_lines(own)])


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
    if drafter.spec.head_type == "domino":
        lines.append(
            "- Stock SGLang 0.5.14 ignores the Domino tensors without a warning and serves plain DFlash"
            + (", off by one, since this checkpoint is shifted." if drafter.spec.shift_label else ".")
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
