"""The card of an export: what the Hub reads of it, commands that fit the format, and the measured tables."""

import json

import pytest
import torch
from huggingface_hub import ModelCard

from eval.export import export
from eval.model_card import Origin, model_card
from eval.results import build_results
from made_up import plan_of, response
from test_export import make_run
from tiny import tiny_drafter, tiny_target

HUB_ID = "owner/name"


def card_of(form="transformers", place="DIR", origin=None, **spec):
    drafter = tiny_drafter(tiny_target(), **spec)
    return model_card(drafter, origin or Origin(HUB_ID), form, place)


def front_matter(text):
    """As the Hub reads it; the library raises for front matter that is no YAML."""
    return ModelCard(text).data.to_dict()


@pytest.mark.parametrize(
    ("form", "spec", "library", "tags"),
    [
        ("transformers", {"head_type": "markov_gated"}, "transformers", ["speculative-decoding", "dflash", "markov"]),
        ("zlab", {}, None, ["speculative-decoding", "dflash", "domino"]),
        ("speculators", {"head_type": "none"}, "speculators", ["speculative-decoding", "dflash"]),
    ],
)
def test_the_hub_reads_base_model_library_licence_and_tags(form, spec, library, tags):
    data = front_matter(card_of(form, **spec))
    assert data.pop("library_name", None) == library
    assert data == {
        "base_model": HUB_ID, "license": "other", "license_name": "same-as-the-target", "tags": tags,
        "license_link": "https://huggingface.co/owner/name", "pipeline_tag": "text-generation",
    }  # fmt: skip


def test_the_demos_target_has_its_licence_and_says_which_weights_it_is():
    text = card_of(origin=Origin("smollm2-135m-instruct", "0123456789abcdef"))
    data = front_matter(text)
    assert data["license"] == "apache-2.0" and data["base_model"] == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert "license_link" not in data and "ships the weights as Q4_1 GGUF" in text


def test_a_target_that_only_this_machine_knows_is_no_base_model(tmp_path):
    text = card_of(origin=Origin(str(tmp_path / "mine"), "0123456789abcdef"))
    assert "base_model" not in front_matter(text)
    assert "weights with fingerprint 0123456789abcdef" in text and str(tmp_path) not in text
    assert "- target: owner/name, commit abc123\n" in card_of(origin=Origin(HUB_ID, "owner/name@abc123"))


def test_the_transformers_folder_is_used_by_trees_and_by_the_own_loop():
    text = card_of()
    assert 'AutoModel.from_pretrained("DIR", trust_remote_code=True, dtype=target.dtype)' in text
    assert 'custom_generate="DIR"' in text and 'speculation_type="dflash"' in text
    assert "stock 0.5.14 ignores the Domino tensors WITHOUT A WARNING" in text
    for block in text.split("```python")[1:]:
        compile(block.split("```")[0], "card", "exec")
    pushed = card_of(place="me/drafter")
    assert 'custom_generate="me/drafter"' in pushed and "DIR" not in pushed
    shifted = card_of(shift_label=True)
    assert 'custom_generate="DIR"' in shifted and 'speculation_type="dflash"' not in shifted
    assert "off by one" in shifted


def command(text, program):
    """The words of a program's command, JSON read; None when the card has none."""
    blocks = [b for b in text.split("```") if b.strip().startswith(program)]
    return blocks[0].replace("\\\n", " ").split("\n")[1] if blocks else None


@pytest.mark.parametrize(
    ("form", "spec", "vllm", "sglang"),
    [
        ("zlab", {"head_type": "none"}, ("0.20", "dflash", 4), "DFLASH"),
        ("zlab", {"head_type": "none", "shift_label": True}, None, None),
        ("zlab", {}, None, "DFLASH"),
        ("zlab", {"pure_draft_prefix_len": 2}, None, None),
        ("deepspec", {"head_type": "markov_rnn", "shift_label": True}, ("0.26", "dspark", 5), "DSPARK"),
        ("speculators", {"head_type": "none"}, ("0.20", "dflash", 4), None),
        ("speculators", {"head_type": "markov_gated", "shift_label": True}, ("0.26", "dspark", 5), None),
    ],
)
def test_commands_stand_for_engines_that_read_the_format_whole(form, spec, vllm, sglang):
    prefix = {"pure_draft_prefix_len": 0} if spec.get("head_type", "domino") != "domino" else {}
    text = card_of(form, place="me/drafter", **{**prefix, **spec})
    assert "custom_generate" not in text and "AutoModel.from_pretrained" not in text
    line = command(text, "vllm serve")
    assert (line is None) == (vllm is None)
    if vllm:
        version, method, tokens = vllm
        options = json.loads(line.split("'")[1])
        assert options == {"method": method, "model": "me/drafter", "num_speculative_tokens": tokens}
        assert line.startswith("vllm serve owner/name ") and f"With vLLM {version} or newer" in text
    line = command(text, "python -m sglang")
    assert (line is None) == (sglang is None)
    if sglang:
        assert f"--speculative-algorithm {sglang} --speculative-draft-model-path me/drafter" in line
    assert "bash launch.sh eval --drafter me/drafter --target owner/name" in text


def results_of(benchmarks):
    rows = [
        response([accepted] * 4, f"p{n}", plan=plan_of(method, budget), benchmark=benchmark, seconds=seconds,
                 tokens=list(range(1 + 4 * (accepted + 1))))
        for benchmark in benchmarks
        for n in range(2)
        for method, budget, accepted, seconds in (("ar", 0, 0, 4.0), ("dartree_pruned", 8, 3, 2.0))
    ]  # fmt: skip
    return build_results(rows, {"dtype": "float32", "drafter": "d", "command": "eval/run_eval.py secret"})


def test_measured_tables_have_tau_speed_up_and_intervals():
    one = card_of(origin=Origin(HUB_ID, results=results_of(["gsm8k"])))
    assert "gsm8k, temperature 0:" in one and "- dtype: float32" in one and "secret" not in one
    row = next(line for line in one.splitlines() if line.startswith("| dartree_pruned"))
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    # After the prefill's token 16 in 2 s with 4 a round, against 4 in 4 s: eight times the speed.
    assert cells[1:7] == ["8", "2", "4.00", "4.00 to 4.00", "8.00", "8.00 to 8.00"]
    two = card_of(origin=Origin(HUB_ID, results=results_of(["gsm8k", "mbpp"])))
    assert "8.00x / 4.00 | 8.00x / 4.00 | 8.00x / 4.00 |" in two and "4.00 (4.00–4.00)" in two


def test_the_tree_size_chosen_by_measured_cost_stands_in_the_example():
    results = results_of(["gsm8k"])
    sampled, greedy = ({"budget": b, "curve": [], "temperature": t} for b, t in ((7, 1.0), (12, 0.0)))
    results["settings"]["budget_choice"] = [sampled, greedy]
    assert "trust_remote_code=True, budget=12, max_new_tokens=64" in card_of(origin=Origin(HUB_ID, results=results))
    results["settings"]["budget_choice"] = [sampled]  # the example decodes greedily
    plain = "trust_remote_code=True, max_new_tokens=64"
    assert plain in card_of(origin=Origin(HUB_ID, results=results)) and plain in card_of()


def test_a_reduced_vocabulary_is_said_for_the_file_that_holds_it():
    drafter = tiny_drafter(tiny_target(), head_type="none", pure_draft_prefix_len=0, draft_vocab_size=12)
    drafter.draft_ids = torch.arange(12)
    assert "the 12 tokens listed in d2t" in model_card(drafter, Origin(HUB_ID), "speculators")
    assert "the 12 tokens listed in draft_vocabulary.safetensors" in model_card(drafter, Origin(HUB_ID))


def test_an_export_names_the_weights_that_answered(tmp_path):
    config = make_run(tmp_path, tiny_drafter(tiny_target()))
    manifest = tmp_path / "run" / "answers" / "manifest.json"
    manifest.parent.mkdir()
    manifest.write_text(json.dumps({"finished": True, "settings": {"target_identity": "owner/name@c0ffee"}}))
    assert "- target: owner/name, commit c0ffee\n" in (export(config) / "README.md").read_text()
    config.drafter, config.output = str(tmp_path / "run" / "drafter"), str(tmp_path / "other")
    assert "commit" not in (export(config) / "README.md").read_text()


def test_the_code_asks_in_the_format_that_the_drafter_learned():
    """A thinking target's template thinks unless it is told not to."""
    learned = {"thinking": False, "template_args": {"date_string": "26 Jul 2024", "n": 3}, "template": "abc"}
    text = card_of(origin=Origin(HUB_ID, provenance={"chat_format": learned}))
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert "enable_thinking=False, date_string='26 Jul 2024', n=3\n)" in code
    assert "--template_args 'date_string=26 Jul 2024' n=3\n" in text
    assert "- Prompts: it was trained with thinking off, date_string 26 Jul 2024, n 3." in text
    thinking = card_of(
        origin=Origin(HUB_ID, provenance={"chat_format": learned | {"thinking": True, "template_args": {}}})
    )
    assert (
        "--target owner/name --thinking\n" in thinking and "return_dict=True,\n    enable_thinking=True\n)" in thinking
    )
    assert "enable_thinking" not in card_of()
