"""A run with prepared prompts and finished answers on disk, for tests of the stage `dataset`."""

from __future__ import annotations

import json
from pathlib import Path

from data import prepare
from data.answers import target_identity
from data.chat import PLAIN, encode_prompt, messages_of, template_fingerprint
from tiny_tokenizer import TEMPLATE, save_tiny_target, tiny_tokenizer

TOOL_TEMPLATE = TEMPLATE.replace("['user', 'assistant']", "['user', 'assistant', 'tool']")
# An eos, then answers of the tiny tokenizer's letters.
ANSWERS = {"a": ["fine, thanks."], "b": ["one.", "two."], "c": ["three is it."], "d": []}
CALL = {"id": "c1", "type": "function", "function": {"name": "count", "arguments": {"of": "x"}}}
PROMPTS = [
    {"id": "a", "turns": ["how are you?"], "domain": "chat"},
    {"id": "b", "turns": ["count.", "more."], "domain": "maths"},
    {
        "id": "c",
        "domain": "maths",
        "messages": [
            {"role": "user", "content": "count x."},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "content": "3", "tool_call_id": "c1", "name": "count"},
        ],
    },
    {"id": "d", "turns": ["no answer yet"], "domain": "chat"},
]


def save_target(folder: Path) -> str:
    return save_tiny_target(folder, template=TOOL_TEMPLATE)


def begin_run(tmp_path: Path, target: str) -> list[str]:
    """Writes the run and returns the words of a command line over it."""
    source, folder = tmp_path / "asked.jsonl", tmp_path / "run"
    source.write_text("".join(json.dumps(row) + "\n" for row in PROMPTS))
    config = tmp_path / "config.yaml"
    config.write_text(
        f"run_dir: {folder}\ntarget: {target}\nprompts: [{source}]\nbenchmarks: [{tmp_path / 'b.jsonl'}]\n"
    )
    (tmp_path / "b.jsonl").write_text('{"turns": ["How are YOU?"]}\n{"turns": ["something else altogether"]}\n')
    assert prepare.main([str(config)]) == 0
    write_answers(folder, target)
    return [str(config), "--agreement_rows", "0"]


def write_answers(folder, target, finished=True, order=1):
    tokenizer, rows = tiny_tokenizer(TOOL_TEMPLATE), []
    prompts = prepare.Prepared(str(folder / "prompts"))
    for prompt in prompts:
        texts = ANSWERS[prompt.id]
        for turn, text in enumerate(texts):
            ids = encode_prompt(tokenizer, messages_of(prompt.turns[: turn + 1], texts[:turn]))
            cut = prompt.id == "c"
            rows.append(
                {
                    "id": prompt.id + (f".turn{turn + 1}" if turn else ""),
                    "domain": prompt.domain,
                    "prompt_ids": ids,
                    "answer_ids": tokenizer(text)["input_ids"] + [1] * (not cut),
                    "stop": "length" if cut else "eos",
                    "exact": prompt.id != "a",
                }
            )
    (folder / "answers").mkdir(exist_ok=True)
    (folder / "answers" / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[::order]))
    settings = {"target": target, "target_identity": target_identity(target), "answer_temperature": 0.0, "seed": 0}
    settings |= {
        "template": template_fingerprint(tokenizer),
        **PLAIN.recorded,
        "prompts": ["/home/someone/asked.jsonl"],
    }
    counts = {"input": 5, "done": 4, "failed": 0, "skipped": 1, "left": 0}
    manifest = {"finished": finished, "num_prompts": 1536, "settings": settings, "counts": counts}
    manifest["prompts"] = {"fingerprint": prompts.fingerprint}
    (folder / "answers" / "manifest.json").write_text(json.dumps(manifest))
