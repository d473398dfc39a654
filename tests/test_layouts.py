"""Each (format, layout) pair end to end: a drafter that counts, written as each public writer would.

The target counts: after token t comes t + 1. The right layout is accepted in whole blocks; the other one, the same
weights with one key changed, is refused or accepts next to nothing (TRAPS 4 and 5).
"""

import json
import math
from pathlib import Path

import pytest
import torch

import public_checkpoints as public
from eval import inspection as inspect_stage
from eval.decoding.loop import generate
from eval.decoding.policy import TreeOptions
from eval.decoding.proposals import DraftProposer
from eval.decoding.request import Request
from eval.export import main as export_main
from models.checkpoint import load_drafter
from models.fitting import fit_to_target
from tiny import MASK, VOCAB, tiny_target
from tiny_tokenizer import tiny_tokenizer

BLOCK, FIRST, FREQUENCIES = 5, 3, (1.0, 3.0, 7.0, 17.0)
OPTIONS = TreeOptions(budget=16, width=3, candidates=8)


def code(token):
    """Eight numbers of a token such that counting is a rotation; the numbers FIRST .. LAST go round."""
    angles = 2 * math.pi * torch.tensor(FREQUENCIES) * token / (VOCAB - FIRST)
    return torch.cat([angles.cos(), angles.sin()])


def turned(steps):
    """The matrix with turned(n) @ code(t) == code(t + n)."""
    angles = 2 * math.pi * torch.tensor(FREQUENCIES) * steps / (VOCAB - FIRST)
    cos, sin = torch.diag(angles.cos()), torch.diag(angles.sin())
    return torch.cat([torch.cat([cos, -sin], dim=1), torch.cat([sin, cos], dim=1)])


def counting_target():
    """A Qwen3 whose layers add nothing; the head's row of t + 1 is the code of t, so that it counts, and goes round."""
    target = tiny_target()
    table, head = torch.zeros(VOCAB, 32), torch.zeros(VOCAB, 32)
    for token in range(FIRST, VOCAB):
        table[token, :8], head[token, :8] = code(token), 10 * code(token - 1)
    # Beside its code each token has a constant, which keys and queries are made of. The mask token has nothing else.
    table[FIRST:, 8], table[MASK, 8], table[MASK, 9] = 1, 1, 2
    with torch.no_grad():
        for layer in target.model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        target.model.get_input_embeddings().weight.copy_(table)
        target.model.get_output_embeddings().weight.copy_(head)
    return target


def counting_drafter(shift):
    """Weights of plain DFlash that count, made by hand: head h looks h slots back and turns what it finds there.

    The context is a constant, and only the anchor's slot has a code: slot j gets it from head j, turned j times
    (shifted, where the label is one further on) or j - 1 times; slot 0 keeps its own.
    """
    tensors = {n: torch.zeros_like(t) for n, t in public.backbone().items()}
    for name in tensors:
        if name.endswith("norm.weight"):
            tensors[name] += 1
    tensors["fc.weight"][8, 8] = 1
    first = "layers.0.self_attn."
    for norm in ("q_norm", "k_norm"):
        tensors[f"{first}{norm}.weight"] += 4  # sharp enough to see one slot only
    for head in range(4):
        back = head + 1
        rows = head * 8
        tensors[first + "q_proj.weight"][rows, 8] = math.cos(back)
        tensors[first + "q_proj.weight"][rows + 4, 8] = -math.sin(back)
        tensors[first + "o_proj.weight"][:8, rows : rows + 8] = turned(back if shift else back - 1)
    for head in range(2):
        tensors[first + "k_proj.weight"][head * 8, 8] = 1
        tensors[first + "v_proj.weight"][head * 8 : head * 8 + 8, :8] = torch.eye(8)
    return tensors


@pytest.fixture(scope="module")
def target():
    return counting_target()


def dress(made, shift, target):
    """The counting backbone in a checkpoint of its format; the head adds nothing, the tables are the target's."""
    own = counting_drafter(shift)
    for name in made.tensors:
        ours = name.removeprefix("logit_head.")
        if ours in own:
            made.tensors[name] = own[ours]
    for name in made.tensors:
        if name.endswith(("embed_proj.2.weight", "markov_w2.weight")):
            made.tensors[name] = torch.zeros_like(made.tensors[name])
    if "lm_head.weight" in made.tensors:
        made.tensors["embed_tokens.weight"] = target.model.get_input_embeddings().weight.detach().clone()
        made.tensors["lm_head.weight"] = target.model.get_output_embeddings().weight.detach().clone()
    return made


def shift_key(config, value):
    config["dflash_config"]["shift_label"] = value


def anchor_key(config, value):
    config["sample_from_anchor"] = value


# Format and layout -> (writer, shifted, what says the other layout; None when the format cannot say it)
PAIRS = {
    "zlab dflash, fill-in by default": (lambda: public.zlab(), False, shift_key),
    "zlab dflash, shifted": (lambda: public.zlab(shift=True), True, shift_key),
    "zlab domino, fill-in": (lambda: public.zlab("domino"), False, shift_key),
    "zlab domino, shifted": (lambda: public.zlab("domino", shift=True), True, shift_key),
    "deepspec dflash, shifted": (lambda: public.deepspec(None, None, block=BLOCK), True, None),
    "deepspec dspark, shifted": (lambda: public.deepspec("gated", block=BLOCK), True, None),
    "speculators dflash, fill-in by default": (lambda: public.speculators(), False, anchor_key),
    "speculators dflash, anchored": (lambda: public.speculators(anchor=True), True, anchor_key),
    "speculators dspark, anchored by default": (lambda: public.speculators("rnn"), True, anchor_key),
    "speculators dspark, fill-in": (lambda: public.speculators("vanilla", anchor=False), False, anchor_key),
    "modelopt dspark, shifted": (lambda: public.modelopt(), True, shift_key),
}


def rounds(drafter, target, method):
    answer = generate(target, DraftProposer(target, drafter, method, OPTIONS), [Request(list(range(10, 20)), 21)])[0]
    assert answer.tokens == list(range(20, 41))  # the target's own, whatever the drafter does
    return answer.rounds


@pytest.mark.parametrize("name", PAIRS)
def test_the_right_layout_accepts_whole_blocks_and_the_other_does_not(tmp_path, target, name):
    make, shifted, other = PAIRS[name]
    made = dress(make(), shifted, target)
    drafter = fit_to_target(load_drafter(made.save(tmp_path / "right")), target)
    proposals = BLOCK if shifted else BLOCK - 1
    assert drafter.spec.num_proposals == proposals and not drafter.own_tables
    chains = ["dflash_chain"] + {"d": ["domino_chain"], "m": ["markov_chain"]}.get(drafter.spec.head_type[0], [])
    for method in [*chains, "dartree_pruned"]:
        found = rounds(drafter, target, method)
        assert all(r.accepted == proposals for r in found), method
        assert len(found) == -(-20 // (proposals + 1))
        if method in chains:
            assert {r.proposed for r in found} == {proposals}

    if other is None:
        made.config.setdefault("dflash_config", {})["shift_label"] = False
        with pytest.raises(ValueError, match="always shifted"):
            load_drafter(made.save(tmp_path / "wrong"))
        return
    other(made.config, not shifted)
    wrong = fit_to_target(load_drafter(made.save(tmp_path / "wrong")), target)
    found = rounds(wrong, target, "dflash_chain")
    assert sum(r.accepted for r in found) <= 0.2 * sum(r.proposed for r in found)


# ---- the inspect and export stages ----


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(inspect_stage, "PROMPTS", 2)
    monkeypatch.setattr(inspect_stage, "TOKENS", 12)


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory, target):
    folder = tmp_path_factory.mktemp("counting")
    target.model.generation_config.eos_token_id = 1
    target.model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def inspect(capsys, *argv):
    """Exit code, stdout and stderr of the stage."""
    code = inspect_stage.main([str(word) for word in argv])
    said = capsys.readouterr()
    return code, said.out, said.err


def test_inspect_finds_a_drafter_that_fits(tmp_path, capsys, target, target_folder):
    folder = dress(public.zlab("domino"), False, target).save(tmp_path)
    code, out, _ = inspect(capsys, folder, "--target", target_folder, "--dtype", "fp32")
    assert code == 0
    assert "drafter: z-lab DFlash/Domino: fill-in layout, block 5 -> 4 proposals a round" in out
    assert "stock 0.5.14 ignores the Domino tensors WITHOUT A WARNING and serves plain DFlash; newer" in out
    assert "layers: 2 of hidden size 32, 4 heads of 8 (2 key/value), MLP 64, rope default theta 10000, float32" in out
    assert "parameters: 23,904 = context 2,080 + layers 18,592 + norm 32 + head 3,200" in out
    assert "verdict: it drafts for this target" in out and "| dartree_pruned |" in out


def test_inspect_tells_the_wrong_layout_and_exits_with_1(tmp_path, capsys, target, target_folder):
    made = dress(public.zlab(shift=True), True, target)
    shift_key(made.config, False)
    code, _, err = inspect(capsys, made.save(tmp_path), "--target", target_folder, "--dtype", "fp32")
    assert code == 1 and err.count("\n") == 1
    assert "likely a wrong layout" in err and "read as shifted its tau is" in err and "config.json is wrong" in err


def test_inspect_blames_something_else_when_no_layout_fits(tmp_path, capsys, target, target_folder):
    code, _, err = inspect(capsys, public.zlab().save(tmp_path), "--target", target_folder, "--dtype", "fp32")
    assert code == 1 and "the other layout gives no more: look at the target, the taps" in err


def test_inspect_without_a_target_only_tells(tmp_path, capsys):
    made = public.speculators("gated", draft_ids=list(range(3, 63, 4)))
    code, out, _ = inspect(capsys, made.save(tmp_path))
    assert code == 0 and "verdict" not in out
    assert "vLLM: reads this format (speculators)" in out and "own LM head 480" in out
    assert "vocabulary: 64 tokens, of which it proposes 15" in out
    assert "transformers 5.24: its loop" in out and "this drafter is shifted" in out
    code, _, err = inspect(capsys, tmp_path / "nothing")
    assert code == 2 and "holds no config.json" in err


@pytest.mark.parametrize("form", ["deepspec", "speculators"])
def test_export_of_a_foreign_drafter_keeps_its_tau(tmp_path, capsys, target, target_folder, form):
    """The command: z-lab in, another format out, the same rounds."""
    folder = dress(public.zlab(shift=True), True, target).save(tmp_path / "in")
    before = rounds(fit_to_target(load_drafter(folder), target), target, "dartree_pruned")
    words = [folder, "--format", form, "--output", str(tmp_path / "out"), "--target", target_folder]
    assert export_main(words) == 0
    assert "drafter: z-lab DFlash/Domino: shifted layout" in capsys.readouterr().out
    again = fit_to_target(load_drafter(str(tmp_path / "out")), target)
    assert not again.own_tables  # written from the target's, found equal to them
    after = rounds(again, target, "dartree_pruned")
    assert [r.accepted for r in after] == [r.accepted for r in before]
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    assert export_main([*words[:4], str(tmp_path / "other"), *words[5:]]) == 2
    assert "is not empty and not an export" in capsys.readouterr().err


def test_export_refuses_what_a_format_cannot_hold_before_the_target_is_read(tmp_path, capsys):
    folder = public.zlab("domino").save(tmp_path / "in")
    words = [folder, "--format", "deepspec", "--output", str(tmp_path / "out"), "--target", str(tmp_path / "none")]
    assert export_main(words) == 2
    err = capsys.readouterr().err
    assert "format deepspec cannot hold head 'domino'" in err and err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as stopped:
        export_main([folder, "--format", "zlab"])
    assert stopped.value.code == 2 and "give --output" in capsys.readouterr().err


def test_an_export_for_other_programs_holds_no_code(tmp_path, capsys):
    folder = public.zlab("domino").save(tmp_path / "in")
    assert export_main([folder, "--format", "zlab", "--output", str(tmp_path / "out")]) == 0
    names = {p.name for p in Path(tmp_path / "out").iterdir()}
    assert names == {"README.md", "config.json", "export.json", "model.safetensors"}
    assert "auto_map" not in json.loads((tmp_path / "out" / "config.json").read_text())
