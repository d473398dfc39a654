"""How an exported folder is used, a program at a time: the Use section of the model card.

Commands stand here only for programs that understand the format (METHODS section 5, and the programs' own public
threads): vLLM's methods `dflash` (0.20 or newer) and `dspark` (0.26 or newer), SGLang's DFLASH and DSPARK.
What they do otherwise is said by `eval.engines`.
"""

from __future__ import annotations

import json
import shlex

from models.checkpoint import Drafter

from .engines import engines

_OURS = """With the project that trained it, which uses the head and decodes by trees:

```
bash launch.sh eval --drafter {place} --target {target}{options}
```
"""
_LOAD = """```python
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{target}")
target = AutoModelForCausalLM.from_pretrained("{target}")
drafter = AutoModel.from_pretrained("{place}", trust_remote_code=True, dtype=target.dtype)
drafter.to(target.device)
messages = [{{"role": "user", "content": "What is 7 times 8?"}}]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_tensors="pt", return_dict=True{format}
)
"""
_TREES = """output = target.generate(
    **inputs, assistant_model=drafter, custom_generate="{place}", trust_remote_code=True, {budget}max_new_tokens=64
)
print(tokenizer.decode(output[0], skip_special_tokens=True))
```
"""
_TREE_NOTES = """`custom_generate` takes batches of prompts (padded on the left), `do_sample` with temperature, top-k,
top-p and the like, several eos ids and a streamer; `method` (dartree_pruned, dartree_fixed, ddtree, dflash_chain, ...),
`budget`, `width`, `candidates` and `beta` choose the tree.
"""
_OWN_LOOP = """transformers' own loop (5.24 or newer) drafts with the backbone alone, by chains, one prompt at a time:

```python
output = target.generate(**inputs, assistant_model=drafter, speculation_type="dflash", max_new_tokens=64)
```
"""
_SHIFTED = "transformers' own loop reads the fill-in layout only: this drafter is shifted and does not fit it.\n"


def usage(
    drafter: Drafter,
    form: str,
    target: str,
    place: str,
    budget: int | None = None,
    chat_format: dict | None = None,
) -> str:
    """Markdown that says how to use the folder.

    Args:
        drafter: with `origin` the title of the written format.
        form: name of the written format.
        target: Hub id of the target, or a stand-in for it.
        place: Hub id of the folder, or a stand-in for its path.
        budget: size of the trees with the most tokens a second, where that was measured.
        chat_format: `thinking` and `template_args` of the prompts that it learned, where its training says them.
    """
    names = {"target": target, "place": place}
    asked = {**names, "format": _template_arguments(chat_format), "options": _options(chat_format)}
    chosen = f"budget={budget}, " if budget else ""
    if form == "transformers":
        parts = [
            "With transformers (5.24 or newer), by trees:\n",
            (_LOAD + _TREES).format(**asked, budget=chosen),
            _TREE_NOTES,
        ]
        parts.append(_SHIFTED if drafter.spec.shift_label else _OWN_LOOP)
        parts.append(_OURS.format(**asked))
    else:
        parts = [f"{drafter.origin} is a format for serving: transformers' AutoModel does not load this folder.\n"]
        parts += [_sglang(drafter, form, **names), _vllm(drafter, form, **names), _OURS.format(**asked)]
    said = engines(drafter)
    parts.append("".join(f"- {name}: {said[name]}\n" for name in ("SGLang", "vLLM")) + _asked_so(chat_format))
    return "\n".join(part for part in parts if part)


def _template_arguments(chat_format: dict | None) -> str:
    """Further arguments of apply_chat_template, as Python."""
    if chat_format is None:
        return ""
    given = {"enable_thinking": chat_format["thinking"], **chat_format["template_args"]}
    return ",\n    " + ", ".join(f"{name}={value!r}" for name, value in given.items())


def _options(chat_format: dict | None) -> str:
    """The same as words of a command line; the options' defaults are not repeated."""
    if chat_format is None:
        return ""
    given = chat_format["template_args"].items()
    words = [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in given]
    arguments = " --template_args " + " ".join(map(shlex.quote, words)) if words else ""
    return (" --thinking" if chat_format["thinking"] else "") + arguments


def _asked_so(chat_format: dict | None) -> str:
    """A line for clients that apply the template themselves."""
    if chat_format is None:
        return ""
    given = "".join(f", {name} {value}" for name, value in chat_format["template_args"].items())
    thinking = "on" if chat_format["thinking"] else "off"
    return (
        f"- Prompts: it was trained with thinking {thinking}{given}. A chat template applied otherwise costs accepted "
        "tokens (a thinking target's thinks unless enable_thinking is false).\n"
    )


def _method(drafter: Drafter, form: str) -> str | None:
    """DFLASH or DSPARK, by which a serving engine reads this folder whole; None where none does."""
    spec = drafter.spec
    plain = spec.head_type == "none" and not spec.confidence_head
    if form == "zlab":
        return "DFLASH" if plain and not spec.shift_label else None
    if form == "deepspec":
        return "DSPARK"
    return ("DFLASH" if plain else "DSPARK") if form == "speculators" else None


def _sglang(drafter: Drafter, form: str, target: str, place: str) -> str:
    method = _method(drafter, form)
    domino = form == "zlab" and drafter.spec.head_type == "domino" and drafter.spec.pure_draft_prefix_len == 1
    if form == "speculators" or method is None and not domino:
        return ""
    version = "a version newer than 0.5.14 that knows Domino" if domino else f"a version that knows {method}"
    return (
        f"With SGLang, {version}:\n\n```\npython -m sglang.launch_server --model-path {target} \\\n"
        f"  --speculative-algorithm {method or 'DFLASH'} --speculative-draft-model-path {place} --dtype bfloat16\n```\n"
    )


def _vllm(drafter: Drafter, form: str, target: str, place: str) -> str:
    method = _method(drafter, form)
    if method is None:
        return ""
    version = {"DFLASH": "0.20", "DSPARK": "0.26"}[method]
    options = {"method": method.lower(), "model": place, "num_speculative_tokens": drafter.spec.num_proposals}
    return (
        f"With vLLM {version} or newer:\n\n```\nvllm serve {target} \\\n"
        f"  --speculative-config '{json.dumps(options)}'\n```\n"
    )
