"""An export works in transformers' own loop without this project, and reloads bit for bit in it."""

import json
import os
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file

from data.settings import RunConfig
from eval import report
from eval.export import export, main
from eval.results import build_results
from made_up import plan_of, response
from models.checkpoint import load_drafter, save_draft_ids
from tiny import MASK, VOCAB, tiny_drafter, tiny_target
from training.attention import dense_mask

PROMPT = [5, 9, 12, 7]
NEW_TOKENS = 24

# Runs in a process of its own, in which the project cannot be imported.
CLIENT = """
import json, sys
import torch

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("models", "data", "eval", "training"):
            raise ImportError(f"{name} must not be needed")

sys.meta_path.insert(0, Blocked())
from transformers import AutoModel, AutoModelForCausalLM

target_folder, folder, prompt, new_tokens = sys.argv[1], sys.argv[2], json.loads(sys.argv[3]), int(sys.argv[4])
target = AutoModelForCausalLM.from_pretrained(target_folder)
drafter = AutoModel.from_pretrained(folder, trust_remote_code=True)
calls = {"target": 0, "drafter": 0}

def count(name):
    def hook(module, arguments, keywords, output):
        calls[name] += 1
    return hook

target.register_forward_hook(count("target"), with_kwargs=True)
drafter.register_forward_hook(count("drafter"), with_kwargs=True)
ids = torch.tensor([prompt])
options = dict(attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens, do_sample=False)
own = target.generate(ids, **options)[0].tolist()
calls["target"] = 0
drafted = target.generate(ids, assistant_model=drafter, speculation_type="dflash", **options)[0].tolist()
counted = dict(calls)
calls["drafter"] = 0
forwards = []
target.get_decoder().register_forward_hook(lambda *_: forwards.append(1))
trees = dict(assistant_model=drafter, custom_generate=folder, trust_remote_code=True, **options)
tree = target.generate(ids, **trees)[0].tolist()
drafts = calls["drafter"]
torch.manual_seed(0)
hidden = drafter(torch.randn(1, 5, 32), torch.randn(1, 3, 64)).last_hidden_state
torch.save({"state": drafter.state_dict(), "hidden": hidden, "inv_freq": drafter.rotary_emb.inv_freq}, "out.pt")
said = {"own": own, "drafted": drafted, **counted, "class": type(drafter).__module__}
print(json.dumps(said | {"tree": tree, "tree_drafter": drafts, "tree_target": len(forwards)}))
"""


def client(tmp_path, target, folder, new_tokens=NEW_TOKENS):
    """What transformers alone does with a target and an export: the JSON line of `CLIENT`, and its tensors."""
    target.model.save_pretrained(tmp_path / "target")
    (tmp_path / "client.py").write_text(CLIENT)
    words = [str(tmp_path / "target"), str(folder), json.dumps(PROMPT), str(new_tokens)]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    environment |= {"HF_HOME": str(tmp_path / "hf"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "client.py", *words],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1]), torch.load(tmp_path / "out.pt", weights_only=True)


def make_run(tmp_path, drafter, **options):
    """A run folder with a finished drafter, and its configuration."""
    folder = tmp_path / "run" / "drafter"
    drafter.model.save_pretrained(folder)
    if drafter.draft_ids is not None:
        save_draft_ids(folder, drafter.draft_ids)
    return RunConfig(run_dir=str(tmp_path / "run"), target="owner/name", **options)


def overfit(target, drafter, steps=60):
    """Teaches a drafter the target's greedy continuation of PROMPT by heart; returns the last loss."""
    ids = target.model.generate(torch.tensor([PROMPT]), max_new_tokens=NEW_TOKENS, do_sample=False)
    spec, model = drafter.spec, drafter.model.train().requires_grad_(True)
    taps, block = target.forward(ids, spec.target_layer_ids, with_logits=False).taps.clone(), spec.block_size
    anchors = torch.arange(len(PROMPT), ids.shape[1] - block + 1)[None]
    slots = (anchors[..., None] + torch.arange(block)).flatten(1)
    inputs = torch.full_like(slots, MASK)
    inputs[:, ::block] = ids[0, anchors]
    positions = torch.cat([torch.arange(ids.shape[1])[None], slots], dim=1)
    mask = dense_mask(anchors, torch.zeros_like(anchors), ids.shape[1], block)
    head = target.model.get_output_embeddings().weight
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(steps):
        hidden = model(target.embed(inputs), taps, mask, positions).last_hidden_state
        loss = torch.nn.functional.cross_entropy((hidden @ head.T)[0], ids[0, slots[0]])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval().requires_grad_(False)
    return loss.item()


def test_transformers_drafts_with_a_learned_drafter_and_emits_the_targets_tokens(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target, scale=0.3)
    assert overfit(target, drafter) < 0.1
    said, _ = client(tmp_path, target, export(make_run(tmp_path, drafter)))
    assert said["drafted"] == said["own"] and len(said["own"]) == len(PROMPT) + NEW_TOKENS
    # Four drafts a round, nearly all accepted: a misplaced position, label or context would accept almost none.
    assert said["drafter"] >= 4
    assert said["target"] <= 8
    # The folder's own tree decoding, one prefill and a forward a round.
    assert said["tree"] == said["own"]
    assert said["tree_target"] == said["tree_drafter"] + 1 <= 8
    assert said["class"].startswith("transformers_modules.")


def test_transformers_computes_what_we_compute_and_stays_lossless_with_a_random_drafter(tmp_path):
    target = tiny_target("llama")
    drafter = yarn_drafter(draft_vocab_size=12)
    drafter.draft_ids = torch.arange(4, 64, 5)
    said, tensors = client(tmp_path, target, export(make_run(tmp_path, drafter)))
    assert said["drafted"] == said["own"] == said["tree"]
    assert said["drafter"] >= NEW_TOKENS // 5
    assert NEW_TOKENS // 5 <= said["tree_drafter"] == said["tree_target"] - 1
    # The class of the export computes what ours does, bit for bit.
    torch.manual_seed(0)
    hidden = drafter.model(torch.randn(1, 5, 32), torch.randn(1, 3, 64)).last_hidden_state
    assert torch.equal(tensors["hidden"], hidden)
    assert torch.equal(tensors["inv_freq"], drafter.model.rotary_emb.inv_freq)
    full = tensors["state"]["embed_proj.2.weight"]
    assert full.shape == (VOCAB, 8)
    assert torch.equal(full[drafter.draft_ids], drafter.model.head.rows())
    rest = torch.ones(VOCAB, dtype=torch.bool).index_fill(0, drafter.draft_ids, False)
    assert (full[rest] == 0).all()


def yarn_drafter(**spec):
    drafted_for = tiny_target()
    drafted_for.config.rope_parameters = {
        "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128, "rope_theta": 50000.0,
    }  # fmt: skip
    return tiny_drafter(drafted_for, **spec)


def draft_logits(drafter, target):
    torch.manual_seed(3)
    block, context = torch.randn(1, 5, 32, dtype=target.dtype), torch.randn(1, 3, 64, dtype=target.dtype)
    hidden = drafter.model.prediction_slots(drafter.model(block, context).last_hidden_state)
    base = target.logits(hidden, drafter.draft_ids)
    if drafter.model.head is None:
        return base
    codes = drafter.model.head.teacher_forced_codes(
        torch.tensor([3]), torch.tensor([[5, 6, 7, 8]]), target.embed, hidden
    )
    return base + codes @ drafter.model.head.rows().T


@pytest.mark.parametrize("head", ["none", "domino", "markov_rnn"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("reduced", [False, True])
def test_our_loader_gives_back_the_same_bits(tmp_path, head, dtype, reduced):
    target = tiny_target(dtype=dtype)
    drafter = tiny_drafter(target, head_type=head, draft_vocab_size=12 if reduced else None)
    drafter.draft_ids = torch.arange(4, 64, 5) if reduced else None
    folder = export(make_run(tmp_path, drafter))
    loaded = load_drafter(str(folder), dtype=None)
    assert loaded.spec == drafter.spec and loaded.model.dtype == dtype
    own, theirs = drafter.model.state_dict(), loaded.model.state_dict()
    assert own.keys() == theirs.keys() and all(torch.equal(own[k], theirs[k]) for k in own)
    assert torch.equal(draft_logits(drafter, target), draft_logits(loaded, target))
    # And an export of the export is the same again.
    again = export(RunConfig(run_dir=str(tmp_path / "run"), drafter=str(folder), output=str(tmp_path / "again")))
    one, two = load_file(folder / "model.safetensors"), load_file(again / "model.safetensors")
    assert one.keys() == two.keys() and all(torch.equal(one[k], two[k]) for k in one)


def test_named_dtype_converts(tmp_path):
    drafter = tiny_drafter(tiny_target())
    folder = export(make_run(tmp_path, drafter, dtype="bf16"))
    assert {t.dtype for t in load_file(folder / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((folder / "config.json").read_text())["dtype"] == "bfloat16"


@pytest.mark.parametrize("reduced", [False, True])
def test_config_has_flat_and_nested_keys_and_no_draft_vocabulary(tmp_path, reduced):
    drafter = tiny_drafter(tiny_target(), draft_vocab_size=12 if reduced else None)
    drafter.draft_ids = torch.arange(12) if reduced else None
    folder = export(make_run(tmp_path, drafter))
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["model_type"] == "qwen3"
    assert config["auto_map"] == {"AutoModel": "drafter.DFlashDraftModel"}
    for keys in (config, config["dflash_config"]):
        assert keys["block_size"] == 5 and keys["mask_token_id"] == MASK and keys["target_layer_ids"] == [0, 2]
    nested = config["dflash_config"]
    assert (nested["projector_type"], nested["emb_dim"], nested["gru_hidden_dim"]) == ("domino", 8, 16)
    assert (nested["pure_draft_prefix_len"], nested["shift_label"], config["emb_dim"]) == (1, False, 8)
    assert config["num_target_layers"] == 4 and config["tie_word_embeddings"] is False
    assert config["layer_types"] == ["full_attention"] * 2 and config["num_hidden_layers"] == 2
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10000.0 and config["rope_scaling"] is None
    assert "draft_vocab_size" not in config
    assert (folder / "draft_vocabulary.safetensors").exists() == reduced
    names = load_file(folder / "model.safetensors")
    assert not [n for n in names if "embed_tokens" in n or "lm_head" in n or n.startswith("model.")]
    assert names["embed_proj.2.weight"].shape == (VOCAB, 8) and names["prefix_gru.weight_ih_l0"].shape == (48, 32)


def test_rope_options_stand_in_both_forms(tmp_path):
    drafter = yarn_drafter()
    folder = export(make_run(tmp_path, drafter))
    config = json.loads((folder / "config.json").read_text())
    assert config["rope_scaling"]["type"] == config["rope_scaling"]["rope_type"] == "yarn"
    assert config["rope_parameters"]["factor"] == config["rope_scaling"]["factor"] == 4.0
    assert config["rope_theta"] == 50000.0 and "rope_theta" not in config["rope_scaling"]
    assert torch.equal(load_drafter(str(folder)).model.rotary_emb.inv_freq, drafter.model.rotary_emb.inv_freq)


def test_mask_token_in_the_last_row_gives_the_same_drafts_after_the_export(tmp_path):
    target = tiny_target()
    drafter = tiny_drafter(target, mask_token_id=VOCAB - 1)
    loaded = load_drafter(str(export(make_run(tmp_path, drafter))))
    assert loaded.spec.mask_token_id == VOCAB - 1
    assert torch.equal(draft_logits(drafter, target), draft_logits(loaded, target))


# ---- the command ----


def run_main(tmp_path, *words):
    (tmp_path / "config.yaml").write_text(f"run_dir: {tmp_path / 'run'}\ntarget: owner/name\n")
    return main([str(tmp_path / "config.yaml"), *words])


def test_command_exports_and_replaces_its_own_export(tmp_path, capsys):
    make_run(tmp_path, tiny_drafter(tiny_target()))
    assert run_main(tmp_path) == 0
    output = tmp_path / "run" / "export"
    (output / "left.txt").write_text("from the first export")
    make_run(tmp_path, tiny_drafter(tiny_target(), seed=5))
    assert run_main(tmp_path) == 0
    assert not (output / "left.txt").exists()
    new = load_file(tmp_path / "run" / "drafter" / "model.safetensors")["fc.weight"]
    assert torch.equal(load_file(output / "model.safetensors")["fc.weight"], new)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["drafter", "export"]
    assert sorted(p.name for p in output.iterdir()) == [
        "README.md", "block_attention.py", "config.json", "configuration.py", "custom_generate", "drafter.py",
        "export.json", "head.py", "head_confidence.py", "head_domino.py", "head_markov.py", "heads.py",
        "model.safetensors",
    ]  # fmt: skip


def refused(tmp_path, capsys, *words):
    capsys.readouterr()
    assert run_main(tmp_path, *words) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and error.startswith("export: ")
    return error


def test_nothing_trained_is_one_line_that_names_the_command(tmp_path, capsys):
    assert "bash launch.sh train" in refused(tmp_path, capsys)
    assert not (tmp_path / "run").exists()


def test_output_is_never_written_over_anything_else(tmp_path, capsys):
    make_run(tmp_path, tiny_drafter(tiny_target()))
    (tmp_path / "file").write_text("kept")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "notes.txt").write_text("kept")
    assert "is a file" in refused(tmp_path, capsys, "--output", str(tmp_path / "file"))
    assert "which is a file" in refused(tmp_path, capsys, "--output", str(tmp_path / "file" / "below" / "it"))
    assert "not empty" in refused(tmp_path, capsys, "--output", str(tmp_path / "full"))
    assert "not empty" in refused(tmp_path, capsys, "--output", str(tmp_path / "run" / "drafter"))
    assert (tmp_path / "file").read_text() == (tmp_path / "full" / "notes.txt").read_text() == "kept"
    (tmp_path / "empty").mkdir()
    assert run_main(tmp_path, "--output", str(tmp_path / "empty")) == 0
    assert (tmp_path / "empty" / "config.json").is_file()


def test_export_of_another_run_is_not_replaced(tmp_path, capsys):
    make_run(tmp_path, tiny_drafter(tiny_target()))
    assert run_main(tmp_path, "--output", str(tmp_path / "shared")) == 0
    assert run_main(tmp_path, "--output", str(tmp_path / "shared")) == 0
    os.rename(tmp_path / "run", tmp_path / "other")
    words = ("--output", str(tmp_path / "shared"), "--run_dir", str(tmp_path / "other"))
    assert "not an export of" in refused(tmp_path, capsys, *words)


def test_broken_drafter_leaves_the_earlier_export_alone(tmp_path, capsys):
    make_run(tmp_path, tiny_drafter(tiny_target()))
    assert run_main(tmp_path) == 0
    (tmp_path / "run" / "drafter" / "model.safetensors").write_bytes(b"no")
    assert "not a whole safetensors file" in refused(tmp_path, capsys)
    assert load_drafter(str(tmp_path / "run" / "export")).spec.block_size == 5
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["drafter", "export"]


def test_wrong_option_and_missing_config_exit_with_2(tmp_path, capsys):
    for argv in (["--no_such_option", "1"], [str(tmp_path / "nothing.yaml")]):
        with pytest.raises(SystemExit) as stopped:
            main(argv)
        assert stopped.value.code == 2
        assert capsys.readouterr().err.count("\n") == 1


# ---- the model card ----


def provenance(tmp_path):
    return {
        "config": {"target": "smollm2-135m-instruct", "lambda_end": 0.3, "training": {"learning_rate": 0.002}},
        "engine": "DeepSpeedEngine", "zero_stage": 1, "world_size": 1, "steps": 400, "train_seconds": 200.5,
        "versions": {"torch": "2.13.0"}, "checkpoint": str(tmp_path / "run"),
    }  # fmt: skip


def measure(run_dir, folder, facts):
    rows = [
        response([accepted] * (8 // (accepted + 1)), f"p{n}", plan=plan_of(method, budget), tokens=list(range(9)))
        for n in range(2)
        for method, budget, accepted in (("ar", 0, 0), ("dflash_chain", 7, 1), ("domino_chain", 7, 3))
    ]
    settings = {"drafter": str(folder), "provenance": facts, "dtype": "bfloat16", "hardware": {"cores": 2}}
    report.write_report(str(run_dir), build_results(rows, settings), rows)


def test_card_has_recipe_table_and_warnings(tmp_path):
    drafter = tiny_drafter(tiny_target(), draft_vocab_size=12)
    drafter.draft_ids = torch.arange(12)
    config = make_run(tmp_path, drafter)
    folder, facts = tmp_path / "run" / "drafter", provenance(tmp_path)
    (folder / "provenance.json").write_text(json.dumps(facts))
    measure(tmp_path / "run", folder, facts)
    output = export(config)
    card = (output / "README.md").read_text()
    head = card.split("---")[1]
    for line in (
        "base_model: HuggingFaceTB/SmolLM2-135M-Instruct",
        "license: apache-2.0",
        "library_name: transformers",
    ):
        assert line in head
    assert "| domino_chain | 7 | 2 | 4.00 |" in card and "- dtype: bfloat16" in card
    assert "Measured tau: 2.00, against 4.00 with domino_chain" in card
    assert "- lambda_end: 0.3" in card and "- learning_rate: 0.002" in card and "- zero_stage: 1" in card
    assert 'speculation_type="dflash"' in card and "trust_remote_code=True" in card
    assert "covered 12 of 64 tokens" in card and "- SGLang: stock 0.5.14 ignores" in card
    for name in ("README.md", "provenance.json", "export.json", "config.json"):
        assert str(tmp_path) not in (output / name).read_text()


def test_card_does_not_show_figures_of_another_checkpoint(tmp_path):
    config = make_run(tmp_path, tiny_drafter(tiny_target()))
    folder, facts = tmp_path / "run" / "drafter", provenance(tmp_path)
    measure(tmp_path / "run", folder, facts)
    (folder / "provenance.json").write_text(json.dumps(facts | {"steps": 401}))
    card = (export(config) / "README.md").read_text()
    assert "Not measured yet" in card and "| domino_chain" not in card


def test_card_of_an_unknown_target_and_a_shifted_drafter(tmp_path):
    config = make_run(tmp_path, tiny_drafter(tiny_target(), shift_label=True))
    config.target = str(tmp_path / "my-target")
    card = (export(config) / "README.md").read_text()
    assert "base_model" not in card and "license: other" in card and "# Drafter for my-target" in card
    assert "does not fit it" in card and "off by one" in card and 'speculation_type="dflash"' not in card
    assert "its recipe is unknown" in card
