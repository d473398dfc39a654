"""Train, export to each format that can hold the head, reload: the same tau. Code in a folder never runs."""

import json

import pytest
import torch

from data.answers import AnswerRow
from data.settings import RunConfig
from eval.decoding.loop import generate
from eval.decoding.policy import TreeOptions
from eval.decoding.proposals import make_proposer
from eval.decoding.request import Request
from eval.export import export, main
from mistakes import mistake
from models.checkpoint import Drafter, load_drafter
from models.fitting import fit_to_target
from models.formats.detect import FORMATS
from models.target import load_target
from trainers import make_trainer
from training.rows import TrainingRows
from training_runs import write_target

PROMPTS, NEW_TOKENS = ([5, 9, 12, 7], [30, 8, 41], [22, 17, 3, 50, 6]), 12


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    write_target(folder)
    return load_target(str(folder), torch.float32)


def trained(target, folder, head, shifted, steps=50):
    """A drafter that has learned the target's own answers to PROMPTS, as RUN/drafter."""
    rows = []
    for ids in PROMPTS:
        text = target.model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS + 4, do_sample=False)[0].tolist()
        rows.append(AnswerRow(str(ids), "own", ids, text[len(ids) :], "length"))
    arguments = dict(max_steps=steps, learning_rate=1e-2, per_device_train_batch_size=len(rows))
    trainer = make_trainer(folder, shifted=shifted, target=target, head=head, **arguments)
    trainer.train_dataset = TrainingRows(rows, 64, 8, seed=0)
    trainer.train()
    model = trainer.model.eval().requires_grad_(False)
    model.save_pretrained(folder / "drafter")
    return Drafter(model)


def accepted(target, drafter):
    """Accepted draft tokens of every round of every answer, by method."""
    head = "domino_chain" if drafter.spec.head_type == "domino" else "markov_chain"
    found = {}
    for method in ("dflash_chain", "dartree_pruned") + ((head,) if drafter.spec.head_type != "none" else ()):
        requests = [Request(ids, NEW_TOKENS) for ids in PROMPTS]
        proposer = make_proposer(target, drafter, method, TreeOptions(budget=12, width=4, candidates=8))
        found[method] = [[r.accepted for r in answer.rounds] for answer in generate(target, proposer, requests)]
    return found


HEADS = {
    "domino": (dict(), False, ("transformers", "zlab")),
    "markov": (
        dict(head_type="markov_gated", pure_draft_prefix_len=0),
        True,
        ("transformers", "deepspec", "speculators", "modelopt"),
    ),
    "none": (dict(head_type="none", pure_draft_prefix_len=0), False, ("transformers", "zlab", "speculators")),
}


@pytest.mark.parametrize("name", HEADS)
def test_every_format_that_holds_the_head_keeps_tau(tmp_path, target, name, capsys):
    head, shifted, formats = HEADS[name]
    expected = accepted(target, trained(target, tmp_path, head, shifted))
    counts = [count for rounds in expected["dartree_pruned"] for count in rounds]
    assert sum(counts) / len(counts) >= 1  # tau >= 2: it does draft
    for form in FORMATS:
        output = tmp_path / form
        words = [str(tmp_path / "drafter"), "--output", str(output), "--target", target.path, "--format", form]
        if form not in formats:
            assert form in mistake(capsys, main, "export", *words)
            continue
        assert main(words) == 0
        loaded = load_drafter(str(output))
        assert accepted(target, fit_to_target(loaded, target)) == expected
        assert f"# Drafter for {target.path.rsplit('/', 1)[-1]}" in (output / "README.md").read_text()


def test_code_that_comes_with_a_checkpoint_never_runs(tmp_path, target):
    head = dict(head_type="none", pure_draft_prefix_len=0)
    trained(target, tmp_path, head, False, steps=1)
    folder = export(RunConfig(run_dir=str(tmp_path), target=target.path))
    trap = f"open({str(tmp_path / 'ran')!r}, 'w').close()\n"
    for path in [*folder.rglob("*.py")]:
        path.write_text(trap + path.read_text())
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"]["AutoModel"] == "drafter.DFlashDraftModel"  # what would be run if it were trusted
    load_drafter(str(folder))
    # Likewise a target: it is refused, or read by transformers' own class.
    own = tmp_path / "own"
    own.mkdir()
    (own / "modeling.py").write_text(trap)
    keys = {"model_type": "unheard_of", "auto_map": {"AutoConfig": "modeling.C", "AutoModelForCausalLM": "modeling.M"}}
    (own / "config.json").write_text(json.dumps(keys))
    with pytest.raises(ValueError):
        load_target(str(own), torch.float32)
    assert not (tmp_path / "ran").exists()
