"""The benchmarks at tiny sizes: what they count and print. Times are not judged."""

import json
import time
from dataclasses import replace

import pytest
import torch

import eval.bench as bench
import eval.bench_data as bench_data
import training.bench as training_bench
from data.options import RunConfig
from data.settings import load_config
from eval.bench_tree import BATCHED, SERIAL, Bench, CountingHead, Sizes, tree_part
from eval.decoding.policy import TreeOptions
from eval.decoding.proposals import DraftProposer
from eval.measure import Stopwatch, interleave, ratios, spread
from eval.session import Session
from templates import characters_tokenizer
from tiny import tiny_drafter, tiny_target
from training.adapters import head_names
from training.forward import capture_taps
from training_runs import ROOT

CPU = torch.device("cpu")
TINY = Sizes("tiny", hidden=16, vocabulary=50, state=12, rank=4, draft_vocabulary=40)


def last_line(capsys):
    return json.loads(capsys.readouterr().out.strip().splitlines()[-1])


def test_arms_take_turns_and_each_begins_once_in_a_while():
    order = []
    arms = {name: lambda name=name: order.append(name) or len(order) for name in "abc"}
    results = interleave(arms, repeats=2, warm_up=1)
    assert "".join(order) == "abc" + "bca" + "cab"
    assert results == {"a": [6, 8], "b": [4, 9], "c": [5, 7]}
    assert spread([3, 1, 2], 10) == {"median": 20, "min": 10, "max": 30, "n": 3}
    assert ratios([6, 8], [2, 2]) == {"median": 3.5, "min": 3, "max": 4, "n": 2}


def test_a_stopwatch_counts_nested_calls_once_and_gives_the_methods_back():
    class Worker:
        def outer(self):
            time.sleep(0.01)
            return self.inner()

        def inner(self):
            time.sleep(0.02)
            return 5

    worker, watch = Worker(), Stopwatch(CPU)
    watch.watch(worker, "outer", "out")
    watch.watch(worker, "inner", "in")
    assert worker.outer() == 5
    assert watch.seconds["out"] >= 0.03 and watch.seconds["in"] == 0
    worker.inner()
    assert watch.seconds["in"] >= 0.02
    watch.reset()
    assert watch.seconds == {"out": 0, "in": 0}
    watch.release()
    assert not vars(worker)


def test_batched_building_calls_the_head_once_a_depth_and_the_heap_once_a_node():
    """Depth 1 is the prefix, which no head corrects; the heap expands every popped node above the last depth."""
    depths, options = 6, TreeOptions(budget=10, width=3, candidates=8)
    trees = Bench(TINY, torch.float32, CPU, depths)
    assert trees.calls(BATCHED, options) == depths - 1
    assert trees.calls(BATCHED, TreeOptions(budget=20, width=8, candidates=8)) == depths - 1
    assert trees.calls(BATCHED, options, depths=3) == 2
    serial = trees.build(SERIAL, options)
    # The last popped node is not expanded any more.
    assert trees.calls(SERIAL, options) == int((serial.depths_RN[0, :-1] < depths).sum())
    assert trees.build(BATCHED, options).sizes == [10]


@pytest.mark.parametrize("head", ["domino", "markov_rnn"])
@pytest.mark.parametrize("method", ["dartree_pruned", "dartree_fixed"])
def test_a_batch_of_requests_calls_the_head_as_often_as_one_request(method, head):
    """All requests' frontiers in one head call a depth, and each tree is the one that its request gets alone."""
    target = tiny_target()
    drafter = tiny_drafter(target, block_size=7, head_type=head)
    counting = CountingHead(drafter.model.head)
    object.__setattr__(drafter.model, "head", counting)
    proposer = DraftProposer(target, drafter, method, TreeOptions(budget=14, width=3, candidates=8))
    rows = [torch.arange(3, 12), torch.tensor([7, 5, 9, 5]), torch.arange(40, 20, -3)]

    def built(requests):
        """(Trees as lists of (token, parent), head calls) of these rows in one batch: the last token is the anchor."""
        lengths = [len(rows[i]) - 1 for i in requests]
        tokens = torch.nn.utils.rnn.pad_sequence([rows[i][:-1] for i in requests], batch_first=True)
        proposer.begin(len(requests), 64)
        proposer.join(capture_taps(target, tokens, drafter.spec.target_layer_ids), lengths)
        draft = proposer.draft(torch.stack([rows[i][-1] for i in requests]))
        counting.calls = 0
        tree = proposer.build(draft)
        pairs = zip(tree.tokens_RN.tolist(), tree.parents_RN.tolist(), tree.sizes, strict=True)
        return [list(zip(t[:size], p[:size], strict=True)) for t, p, size in pairs], counting.calls

    alone = [built([i]) for i in range(3)]
    together, calls = built([0, 1, 2])
    # Six proposals; depth 1 is the prefix, which no head corrects.
    assert [count for _, count in alone] == [5, 5, 5] and calls == 5
    assert together == [tree for (tree,), _ in alone] and len({str(tree) for tree in together}) == 3


def test_the_tree_part_reports_both_builders_and_the_growth():
    options = TreeOptions(budget=10, width=3, candidates=8)
    part = tree_part(options, torch.float32, CPU, repeats=2, all_sizes=(TINY,), depths=4)
    (row,) = part["compare"]
    assert row["batched_calls"] == 3 and row["serial_calls"] > 3
    assert all(row[name]["n"] == 2 and row[name]["min"] > 0 for name in ("batched_ms", "serial_ms", "serial/batched"))
    grown = [(r["depths"], r["width"], r["nodes"], r["head_calls"]) for r in part["growth"]]
    # No more than K = 8 nodes can stand at depth 1.
    assert grown == [(1, 3, 3, 0), (2, 3, 6, 1), (4, 3, 12, 3), (4, 2, 8, 3), (4, 6, 24, 3), (4, 24, 80, 3)]


@pytest.fixture
def session(monkeypatch):
    target = tiny_target()
    target.eos_ids = ()
    config = RunConfig(
        max_new_tokens=5, budget=8, width=4, candidates=16, bench_repeats=2, bench_concurrency=3, dtype="fp32"
    )
    made = Session(config, target, tiny_drafter(target), "here")
    monkeypatch.setattr(Session, "training_prompts", lambda self, n, seed: [[3 + i, 5, 7 + i] for i in range(n)])
    return made


def test_the_share_part_accounts_for_the_whole_round(session):
    rows = bench.share_part(session)
    assert [(row["method"], row["B"]) for row in rows] == [("ar", 0), ("dartree_pruned", 16), ("dartree_pruned", 8)]
    one = bench.one_share(session, ("dartree_pruned", 8), bench.requests_of(session, 2))
    outside = sum(value for name, value in one.items() if name.endswith(" outside"))
    assert outside + one["drafter"] + one["target"] == pytest.approx(one["round"])
    assert one["outside %"] == pytest.approx(100 * outside / one["round"])
    assert all(value > 0 for value in one.values())
    assert bench.one_share(session, ("ar", 0), bench.requests_of(session, 1))["drafter"] == 0
    assert "forward" not in vars(session.target) and "forward" not in vars(session.drafter.model)


def test_the_batch_part_compares_with_one_request_and_with_ar(session):
    rows = bench.batch_part(session)
    assert [(r["method"], r["B"], r["R"]) for r in rows] == [
        (method, budget, slots) for slots in (1, 3) for method, budget in bench.plans_of(session.config)
    ]
    for row in rows:
        assert row["tokens/s"]["n"] == 2
        if row["R"] == 1:
            assert row["gain over R=1"]["median"] == 1 and row["mean R"] == 1
        else:
            assert 1 < row["mean R"] <= 3
        if row["method"] == "ar":
            assert row["speed-up over AR"]["max"] == 1


def test_the_last_line_is_json_with_where_it_was_measured(session, monkeypatch, capsys):
    monkeypatch.setattr(bench, "load_session", lambda config, folder: session)
    monkeypatch.setattr(bench, "finished_drafter", lambda run_dir, given: "here")
    monkeypatch.setattr(bench, "share_part", lambda given: [{"R": 1, "of": given.drafter_folder}])
    bench.bench(RunConfig(**{**vars(session.config), "parts": ["share"]}))
    result = last_line(capsys)
    assert result["bench"] == "eval" and result["dtype"] == "float32" and result["repeats"] == 2
    assert {"hardware", "versions", "git_commit", "schema_version", "target"} <= result.keys()
    assert result["parts"] == {"share": [{"R": 1, "of": "here"}]} and result["target"] == "tiny"


def test_parts_are_checked_and_a_missing_run_is_known_before_anything_is_measured(tmp_path, monkeypatch):
    assert bench.chosen_parts(RunConfig(), ("tree", "share")) == ["tree", "share"]
    assert bench.chosen_parts(RunConfig(parts=["share"]), ("tree", "share")) == ["share"]
    with pytest.raises(ValueError, match="parts must be among loss, step, got 'tree'"):
        bench.chosen_parts(RunConfig(parts=["tree"]), ("loss", "step"))
    monkeypatch.setattr(bench, "tree_part", lambda *a: pytest.fail("measured before the run was looked for"))
    with pytest.raises(ValueError, match="no finished drafter"):
        bench.bench(RunConfig(run_dir=str(tmp_path)))


def test_the_loss_part_covers_every_slot():
    sizes = Sizes("tiny", hidden=16, vocabulary=5000, state=12, rank=4)
    config = RunConfig(bench_repeats=2)
    (row,) = training_bench.loss_part(config, torch.float32, CPU, all_sizes=(sizes,), anchors=20, slots=4)
    assert (row["V"], row["D"], row["anchors"], row["slots"], row["labels"]) == (5000, 16, 20, 4, 60)
    assert row["chunk"] == 64 * 2**20 // (4 * 5000) and row["s"]["n"] == 2


@pytest.mark.parametrize(
    ("name", "head", "confidence", "prefix"),
    [
        ("demo", "domino", False, 1),
        ("qwen3-4b-dflash", "none", False, 0),
        ("qwen3-4b-dspark", "markov_vanilla", True, 0),
    ],
)
def test_the_loss_part_builds_the_configs_own_heads(monkeypatch, capsys, name, head, confidence, prefix):
    config = load_config(str(ROOT / "configs" / f"{name}.yaml"), {"bench_repeats": 1})
    made, plain = [], training_bench.random_drafter
    monkeypatch.setattr(training_bench, "random_drafter", lambda *a, **k: made.append(plain(*a, **k)) or made[-1])
    sizes = Sizes("tiny", hidden=16, vocabulary=500, state=12, rank=4)
    (row,) = training_bench.loss_part(config, torch.float32, CPU, all_sizes=(sizes,), anchors=20, slots=4)
    spec = made[0].spec
    assert (spec.head_type, spec.confidence_head, spec.confidence_with_markov) == (head, confidence, confidence)
    assert spec.pure_draft_prefix_len == prefix and row["labels"] == 60
    heads, gradients = head_names(made[0]), {n: p.grad for n, p in made[0].named_parameters() if p.grad is not None}
    assert gradients.keys() == heads and all(g.abs().max() > 0 for g in gradients.values())
    words = f"The loss (head {head} and confidence head)," if confidence else f"The loss (head {head}),"
    assert words in capsys.readouterr().out


def test_a_step_trains_the_confidence_head_too(monkeypatch):
    base = training_bench.StepSizes(4, 32, 20, 2, 32, 4, 2, 48, 60)
    config = RunConfig(
        block_size=4, num_draft_layers=2, head="markov_gated", head_rank=4, mask_token_id=2, ce_weight=0.1,
        tv_weight=0.9, enable_confidence_head=True, confidence_head_with_markov=True, position_weights="dpace",
    )  # fmt: skip
    models, plain = [], training_bench.block_loss
    monkeypatch.setattr(training_bench, "block_loss", lambda *given: models.append(given[0]) or plain(*given))
    training_bench.step(config, base, torch.float32, CPU)()
    assert "confidence_head.proj.weight" in head_names(models[0])
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in models[0].parameters())


def test_the_step_part_varies_one_size_at_a_time_and_really_trains(monkeypatch, capsys):
    base = training_bench.StepSizes(4, 32, 20, 2, 32, 4, 2, 48, 60)
    options = dict(block_size=4, num_draft_layers=2, num_taps=2, head_rank=4, gru_hidden_dim=8, mask_token_id=2)
    config = RunConfig(bench_repeats=1, dtype="fp32", device="cpu", parts=["step"], **options)
    rows = training_bench.step_part(config, torch.float32, CPU, base)
    assert [(r["anchors"], r["length"], r["draft V"]) for r in rows] == [
        (4, 32, 20), (2, 32, 20), (8, 32, 20), (4, 16, 20), (4, 64, 20), (4, 32, 10), (4, 32, 60),
    ]  # fmt: skip
    losses, plain = [], training_bench.block_loss

    def noted(*args):
        sums = plain(*args)
        losses.append(float(sums.numerator.detach()))
        return sums

    monkeypatch.setattr(training_bench, "block_loss", noted)
    work = training_bench.step(config, base, torch.float32, CPU)
    for _ in range(20):
        work()
    assert losses[-1] < losses[0]
    monkeypatch.setattr(training_bench, "StepSizes", lambda anchors: base)
    training_bench.bench(config)
    assert list(last_line(capsys)["parts"]) == ["step"]


def test_bench_options_can_stand_in_a_config(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("parts: [tree]\nbench_repeats: 3\n")
    config = load_config(str(path))
    assert config.parts == ["tree"] and config.bench_repeats == 3
    with pytest.raises(ValueError, match="bench_repeats must be at least 1, got 0"):
        load_config(str(path), {"bench_repeats": "0"})


def test_conversations_a_minute_come_with_what_they_consist_of(tmp_path, monkeypatch, capsys):
    """In this process alone. A tokenizer of characters in a format of tags; the second conversation has no answer."""
    characters_tokenizer("marked").save_pretrained(tmp_path / "target")
    (tmp_path / "target" / "config.json").write_text("{}")
    said = [
        [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}],
        [{"role": "user", "content": "hi"}],
    ]
    monkeypatch.setattr(bench_data, "made_up", lambda count, seed: said)
    monkeypatch.setattr(bench_data, "ProcessPoolExecutor", Here)
    config = RunConfig(target=str(tmp_path / "target"), bench_processes=1, bench_repeats=2)
    bench_data.bench(config)
    result = last_line(capsys)
    (row,) = result["parts"]["masks"]
    assert (result["bench"], result["dtype"], row["processes"], row["without mask"]) == ("data", None, 1, 2)
    # <|im_start|>user\nhi<|im_end|>\n, <|im_start|>assistant\nyo<|im_end|>\n: 10 + 15 tokens, of which yo<|im_end|> are
    # supervised.
    assert row["tokens each"] == 25 / 2 and row["supervised %"] == pytest.approx(100 * 3 / 25)
    assert row["conversations/min"]["n"] == 2 and row["conversations/min"]["min"] > 0
    with pytest.raises(ValueError, match="parts must be among masks, got 'tree'"):
        bench_data.bench(replace(config, parts=["tree"]))


class Here:
    """A pool that works in this process."""

    def __init__(self, processes, context, start, arguments):
        start(*arguments)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    map = staticmethod(map)


def test_made_up_conversations_alternate_and_are_the_same_again():
    found = bench_data.made_up(40, 3)
    assert found == bench_data.made_up(40, 3) != bench_data.made_up(40, 4)
    assert {len(messages) for messages in found} == {2, 4, 6}
    assert all([m["role"] for m in messages] == ["user", "assistant"] * (len(messages) // 2) for messages in found)


def test_memory_is_seen_although_the_process_has_freed_more_before():
    """The C library keeps what is freed in small pieces: without giving it back, work that fits in there takes none."""
    pieces = [torch.ones(2_000) for _ in range(25_000)]  # 200 MB
    del pieces
    assert 0.045 < training_bench.memory_above(lambda: [torch.ones(2_000) for _ in range(7_500)], CPU) < 0.08  # 60 MB
