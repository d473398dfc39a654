"""Chains cut by the confidence head, and the calibration of that head."""

import json
import math
from dataclasses import replace

import pytest
import torch
import yaml

from data.options import RunConfig
from data.prompts import load_prompts
from eval import calibrate
from eval.calibration import Sighting, bins_of, by_depth, calibrate_on, errors_of, fit_temperature, read_temperature
from eval.decoding.confidence import cut_chain
from eval.decoding.loop import generate
from eval.decoding.policy import TreeOptions
from eval.decoding.proposals import DraftProposer, NoProposer
from eval.decoding.rejection import verify_rejection
from eval.decoding.request import Answer, Request
from eval.decoding.tree import Distributions, Draft, Tree, chain
from eval.records import RoundRecord
from eval.session import load_session
from models.target import load_target
from tiny import MASK, VOCAB, tiny_drafter, tiny_target
from tiny_tokenizer import save_tiny_target

CONFIDENCE = dict(confidence_head=True, confidence_with_markov=True)


def scripted(logits):
    """A draft and a drafter whose confidence logits at each depth are the given numbers."""
    drafter = tiny_drafter(tiny_target(), head_type="none", confidence_head=True)
    with torch.no_grad():
        drafter.model.confidence_head.proj.weight.zero_()[0, 0] = 1.0
        drafter.model.confidence_head.proj.bias.zero_()
    requests, depths = len(logits), len(logits[0])
    hidden = torch.randn(requests, depths, 32)
    hidden[..., 0] = torch.tensor(logits)
    return Draft(torch.full((requests,), 7), hidden, torch.randn(requests, depths, VOCAB)), drafter


@pytest.mark.parametrize(
    "threshold, temperature, sizes",
    [
        (0.0, 1.0, [4, 4, 4]),
        (0.5, 1.0, [2, 0, 4]),  # cut at the first logit below 0, whatever follows
        (0.9, 1.0, [1, 0, 4]),  # sigmoid(2.1) = 0.89
        (0.8, 4.0, [0, 0, 0]),  # sigmoid(4/4) = 0.73
        (0.6, 4.0, [2, 0, 4]),  # sigmoid(2.1/4) = 0.63
    ],
)
def test_a_chain_ends_before_its_first_token_of_low_confidence(threshold, temperature, sizes):
    draft, drafter = scripted([[3.0, 2.1, -1.0, 5.0], [-2.0, 4.0, 4.0, 4.0], [4.0, 4.0, 4.0, 4.0]])
    whole = chain(draft, drafter, None, use_head=False)
    options = TreeOptions(confidence_threshold=threshold, confidence_temperature=temperature)
    tree = cut_chain(whole, draft, drafter, options)
    assert tree.sizes == sizes and tree.width == max(sizes)
    assert torch.equal(tree.tokens_RN, whole.tokens_RN[:, : tree.width])
    assert tree.max_depths == sizes


def confident(target, **spec):
    """A random Markov drafter whose confidence logits spread around zero."""
    drafter = tiny_drafter(target, head_type="markov_gated", pure_draft_prefix_len=0, **CONFIDENCE, **spec)
    torch.nn.init.normal_(drafter.model.confidence_head.proj.weight, std=0.3)
    torch.nn.init.constant_(drafter.model.confidence_head.proj.bias, 1.0)
    return drafter


@pytest.mark.parametrize("temperature, acceptance", [(0.0, "sample-match"), (1.0, "sample-match"), (1.0, "rejection")])
def test_cut_chains_propose_less_and_change_no_token(temperature, acceptance):
    """Requests of a batch have chains of unequal length, some of them empty. Rejection draws its own samples, which
    depend on what is proposed, so that its texts are compared with those of one request at a time."""
    target = tiny_target()
    drafter = confident(target)
    requests = [Request([5 + r, 9, 3, 20 + r], 24, seed=r) for r in range(3)]

    def decode(threshold, asked):
        options = TreeOptions(confidence_threshold=threshold)
        proposer = DraftProposer(target, drafter, "markov_chain", options, acceptance=acceptance)
        return generate(target, proposer, asked, temperature)

    cut = decode(0.5, requests)
    proposed = [record.proposed for answer in cut for record in answer.rounds]
    assert 0 in proposed and drafter.spec.num_proposals in proposed and len(set(proposed)) > 2
    if acceptance == "rejection":
        expected = [decode(0.5, [request])[0] for request in requests]
    else:
        expected = generate(target, NoProposer(), requests, temperature)
    assert [answer.tokens for answer in cut] == [answer.tokens for answer in expected]


def test_rejection_of_cut_chains_equals_each_chain_alone():
    torch.manual_seed(3)
    probs, logits = torch.softmax(torch.randn(2, 3, VOCAB), -1), torch.randn(2, 4, VOCAB)
    tokens, order = probs.argmax(-1), torch.arange(3).expand(2, 3)
    accept, draw = torch.zeros(2, 4, dtype=torch.float64), torch.rand(2, 4, dtype=torch.float64)  # all accepted
    tree = Tree(tokens, order, order + 1, torch.zeros(2, 3), order, [3, 1], Distributions(probs, None))
    together = verify_rejection(logits, tree, 1.0, accept, draw)
    assert [len(path) for path in together.paths] == [3, 1]
    for r, size in enumerate([3, 1]):
        fields = {n: getattr(tree, n)[r : r + 1, :size] for n in ("tokens_RN", "parents_RN", "depths_RN", "scores_RN")}
        alone = replace(tree, **fields, sizes=[size], drawn_from=Distributions(probs[r : r + 1, :size], None))
        one = slice(r, r + 1)
        single = verify_rejection(logits[one, : size + 1], alone, 1.0, accept[one], draw[one])
        assert single.emitted[0] == together.emitted[r]


@pytest.mark.parametrize("method, head", [("markov_chain", "markov_rnn"), ("dflash_chain", "none")])
def test_a_threshold_without_a_confidence_head_is_refused(method, head):
    target = tiny_target()
    drafter = tiny_drafter(target, head_type=head)
    with pytest.raises(ValueError, match="confidence_threshold 0.4 needs a drafter that was trained with"):
        DraftProposer(target, drafter, method, TreeOptions(confidence_threshold=0.4))
    DraftProposer(target, drafter, "dartree_pruned", TreeOptions(confidence_threshold=0.4))  # trees are not cut


def made(temperature, per_logit=400):
    """Sightings whose acceptance rate is exactly sigmoid(logit / temperature), but for rounding."""
    found = []
    for logit in [x / 2 for x in range(-8, 9)]:
        accepted = round(per_logit / (1 + math.exp(-logit / temperature)))
        found += [Sighting(1, logit, i < accepted) for i in range(per_logit)]
    return found


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.5])
def test_the_temperature_of_made_up_tokens_is_found(temperature):
    assert fit_temperature(made(temperature)) == pytest.approx(temperature, rel=0.01)


def test_temperatures_stay_within_bounds():
    assert fit_temperature([Sighting(1, 2.0, True)]) == pytest.approx(0.05, abs=0.01)
    assert fit_temperature([Sighting(1, 2.0, False)]) == pytest.approx(20)


def test_ece_and_brier_by_hand():
    """Confidences .9 (accepted, accepted), .9 (rejected) and .1 (rejected): bins of 3 and 1."""
    logit = math.log(9)
    found = [Sighting(1, logit, True), Sighting(1, logit, True), Sighting(2, logit, False), Sighting(2, -logit, False)]
    errors = errors_of(found, 1.0)
    assert errors["ece"] == pytest.approx((3 * abs(0.9 - 2 / 3) + 1 * 0.1) / 4)
    assert errors["brier"] == pytest.approx((2 * 0.1**2 + 0.9**2 + 0.1**2) / 4)
    rows = by_depth(found, 1.0)
    assert [(r["depth"], r["tokens"], r["acceptance"]) for r in rows] == [(1, 2, 1.0), (2, 2, 0.0)]
    assert rows[0]["brier"] == pytest.approx(0.01) and rows[1]["brier"] == pytest.approx((0.81 + 0.01) / 2)
    assert [(b["tokens"], round(b["confidence"], 6)) for b in bins_of(found, 1.0)] == [(1, 0.1), (3, 0.9)]
    assert bins_of([Sighting(1, 800.0, True), Sighting(1, -800.0, False)], 1.0)[-1]["to"] == 1.0  # no overflow


def test_calibration_lowers_the_error_of_an_overconfident_head():
    report = calibrate_on(made(3.0), made(3.0, per_logit=200))
    assert report["temperature"] == pytest.approx(3.0, rel=0.01)
    assert report["uncalibrated"]["ece"] > 0.1 and report["calibrated"]["ece"] < 0.01
    assert report["calibrated"]["brier"] < report["uncalibrated"]["brier"]
    assert report["fitted_tokens"] == 2 * report["tested_tokens"] == 6800


def test_only_tokens_that_the_target_looked_at_are_seen():
    """Two of three accepted: two hits and a miss; all accepted: hits alone; nothing accepted: one miss."""
    rounds = [RoundRecord(3, 3, accepted, accepted + 1, 0.0, 0.0, 0.0, 0.0) for accepted in (2, 3, 0)]
    logits = [[0.1, 0.2, 0.3], [1.1, 1.2, 1.3], [2.1, 2.2, 2.3]]
    found = calibrate.sightings_of(Answer(rounds=rounds), logits)
    assert [(s.depth, s.logit, s.accepted) for s in found] == [
        (1, 0.1, True), (2, 0.2, True), (3, 0.3, False),
        (1, 1.1, True), (2, 1.2, True), (3, 1.3, True),
        (1, 2.1, False),
    ]  # fmt: skip


@pytest.mark.parametrize("emitted, depths", [(2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3])])
def test_tokens_behind_the_answers_end_are_not_seen(emitted, depths):
    """All three accepted: the end of the answer is the second of them, the third, or the token that follows."""
    rounds = [RoundRecord(3, 3, 3, emitted, 0.0, 0.0, 0.0, 0.0)]
    found = calibrate.sightings_of(Answer(rounds=rounds), [[0.1, 0.2, 0.3]])
    assert [(s.depth, s.accepted) for s in found] == [(depth, True) for depth in depths]


def save_run(folder, **spec):
    """A config with a saved target and a saved Markov drafter."""
    path = save_tiny_target(folder / "target")
    target = load_target(path, torch.float32)
    confident(target, **spec).model.save_pretrained(folder / "run" / "drafter")
    options = dict(
        run_dir=str(folder / "run"),
        target=path,
        device="cpu",
        dtype="fp32",
        mask_token_id=MASK,
        prompts=["builtin"],
        max_prompt_length=200,
        max_new_tokens=10,
        calibration_prompts=4,
    )
    (folder / "config.yaml").write_text(yaml.safe_dump(options))
    return str(folder / "config.yaml"), options


def test_the_stage_writes_a_report_that_evaluation_reads(tmp_path, capsys, monkeypatch):
    config, options = save_run(tmp_path)
    asked, seen_of = [], calibrate.sightings
    monkeypatch.setattr(calibrate, "sightings", lambda *given: asked.append(given[2]) or seen_of(*given))
    assert calibrate.main([config]) == 0
    report = json.loads((tmp_path / "run" / "calibration.json").read_text())
    assert report["method"] == "markov_chain" and report["prompts"] == 4
    assert report["fitted_tokens"] > 0 and 0.05 <= report["temperature"] <= 20
    assert sum(row["tokens"] for row in report["calibrated"]["by_depth"]) == report["tested_tokens"]
    assert (tmp_path / "run" / "plots" / "calibration.png").stat().st_size > 5000
    assert "calibrate: temperature" in capsys.readouterr().out
    drafter = str(tmp_path / "run" / "drafter")
    session = load_session(RunConfig(**options, confidence_threshold=0.3), drafter)
    # Beyond the prompts that are reported, and none that trains a drafter.
    encoded = [session.usable_ids(p.turns, []) for p in load_prompts("builtin", 40, 0, "eval")]
    fit = [ids for ids in encoded if ids is not None]
    assert asked == fit[session.config.eval_prompts :][:4]
    assert not any(ids in session.training_prompts(64, 0) for ids in asked)
    chosen = session.proposer("markov_chain").options
    assert (chosen.confidence_threshold, chosen.confidence_temperature) == (0.3, report["temperature"])
    off = load_session(RunConfig(**options), drafter).proposer("markov_chain").options
    assert (off.confidence_threshold, off.confidence_temperature) == (0.0, 1.0)
    with pytest.raises(ValueError, match="was measured for drafter"):
        confident(session.target, seed=9).model.save_pretrained(drafter)
        read_temperature(options["run_dir"], drafter)
    assert read_temperature(str(tmp_path), drafter) == 1.0


def test_calibrating_a_drafter_without_a_confidence_head_is_an_error(tmp_path, capsys):
    config, _ = save_run(tmp_path)
    target = load_target(str(tmp_path / "target"), torch.float32)
    tiny_drafter(target).model.save_pretrained(tmp_path / "run" / "drafter")
    assert calibrate.main([config]) == 2
    error = capsys.readouterr().err.split("\r")[-1]  # behind the bar of loading
    assert "has no confidence head; train with --enable_confidence_head" in error and error.endswith("\n")
