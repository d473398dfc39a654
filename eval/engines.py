"""What other programs do with a drafter folder, as far as public code and threads tell (METHODS section 5)."""

from __future__ import annotations

from models.checkpoint import Drafter


def engines(drafter: Drafter) -> dict[str, str]:
    """Program -> what it does with this drafter, in a sentence or two."""
    return {
        "transformers 5.24": _transformers(drafter),
        "SGLang": _sglang(drafter),
        "vLLM": _vllm(drafter),
        "this project": "all methods of `bash launch.sh eval --drafter DIR`, trees included",
    }


def _transformers(drafter: Drafter) -> str:
    spec = drafter.spec
    if spec.shift_label:
        return (
            'its loop (speculation_type="dflash") reads the fill-in layout only: this drafter is shifted, so that '
            "nearly every draft would be rejected; do not use it there"
        )
    if drafter.own_tables:
        return "its loop uses the target's embedding and LM head, not the ones of this drafter: do not use it there"
    lost = [] if spec.head_type == "none" else [f"the {spec.head_type} head"]
    lost += [] if drafter.draft_ids is None else ["the draft vocabulary"]
    return 'its loop (speculation_type="dflash") drafts with an export for transformers, one prompt at a time' + (
        f"; {' and '.join(lost)} would be ignored" if lost else ""
    )


def _sglang(drafter: Drafter) -> str:
    spec, origin = drafter.spec, drafter.origin
    if spec.head_type == "domino":
        off = ", off by one since this checkpoint is shifted" if spec.shift_label else ""
        newer = (
            "newer versions know Domino, in bf16" + (", with one proposal fewer a round" if spec.shift_label else "")
            if spec.pure_draft_prefix_len == 1
            else f"newer versions accept pure_draft_prefix_len 1 only, this drafter has {spec.pure_draft_prefix_len}"
        )
        return f"stock 0.5.14 ignores the Domino tensors WITHOUT A WARNING and serves plain DFlash{off}; {newer}"
    if origin.startswith("z-lab") and spec.head_type == "none" and not spec.shift_label:
        windows = ""
        if spec.sliding_layers:
            windows = "; its sliding layers are causal inside the block" + (
                ", as here"
                if spec.sliding_causal and spec.window_floor == "slot"
                else ", unlike here: fewer drafts fit"
            )
        return f"serves it as plain DFlash{windows}"
    if origin.startswith("DeepSpec"):
        return "versions that know --speculative-algorithm DSPARK read it"
    if origin.startswith("z-lab") and spec.shift_label:
        return "serves plain DFlash as fill-in: off by one for this shifted drafter"
    return f"not known for {origin}; plain DFlash and Domino are read from z-lab's format (export --format zlab)"


def _vllm(drafter: Drafter) -> str:
    spec, origin = drafter.spec, drafter.origin
    if spec.head_type == "domino":
        return "has no Domino head: do not serve this drafter there"
    if origin.startswith("speculators"):
        return "reads this format (speculators), by method dflash from 0.20 on, dspark from 0.26 on"
    if origin.startswith("DeepSpec"):
        return "0.26 or newer reads it, by method dspark"
    if origin.startswith("z-lab") and spec.head_type == "none":
        if spec.shift_label:
            return "its method dflash takes z-lab's folders for fill-in: off by one for this shifted drafter"
        return "0.20 or newer reads it, by method dflash"
    if spec.pure_draft_prefix_len or spec.causal:
        return "reads speculators folders, which have no word for this drafter's prefix or causal blocks"
    return "reads speculators folders: bash launch.sh export DIR --format speculators --target T --output OUT"
