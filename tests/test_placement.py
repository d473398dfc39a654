"""Targets spread over several devices: the option, and the same text, taps and features as on one."""

import pytest
import torch

from data import environment
from data.settings import load_config
from eval.decoding.cache import TreeCache
from eval.decoding.loop import generate
from eval.decoding.proposals import TreeOptions, available_methods, make_proposer
from eval.decoding.request import Request
from eval.session import load_session
from models import placement as module
from models.placement import placement
from models.target import load_target
from tiny import tiny_drafter
from tiny_tokenizer import save_tiny_target

GB = 10**9
# Every second layer is read from disk when it is called, as accelerate does beside layers in memory.
SPREAD = {"model.embed_tokens": "cpu", "model.rotary_emb": "cpu", "model.norm": "cpu", "lm_head": "cpu"}
SPREAD |= {f"model.layers.{layer}": ("cpu", "disk")[layer % 2] for layer in range(4)}


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setattr(module, "get_max_memory", lambda: {0: 10 * GB, 1: 20 * GB, 2: 30 * GB, "cpu": 99 * GB})


def test_the_option_becomes_what_transformers_takes(gpus):
    assert placement([]) == {}
    for name in ("auto", "balanced", "balanced_low_0", "sequential"):
        assert placement([name]) == {"device_map": name}
    expected = {"device_map": "auto", "max_memory": {0: 10 * GB, 2: 30 * GB}}
    assert placement(["cuda:0", "cuda:2"]) == placement(["0", "2"]) == expected


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["even"], "device_map must be auto, balanced, balanced_low_0, sequential or GPUs such as .*, got even"),
        ([""], "device_map must be auto, .* got nothing"),
        (["auto", "cuda:1"], "got auto cuda:1"),
        (["cuda:0", "cuda:3"], "device_map names cuda:3, torch sees the GPUs: cuda:0, cuda:1, cuda:2"),
    ],
)
def test_what_is_no_placement_is_refused(gpus, words, message):
    with pytest.raises(ValueError, match=message):
        placement(words)


def test_ranks_do_not_share_gpus(gpus, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(ValueError, match="device_map auto spreads the target over .* of one process, got 4 ranks"):
        placement(["auto"])
    assert placement([]) == {}


def test_the_launcher_starts_one_process(monkeypatch):
    monkeypatch.setattr(environment, "choose_device", lambda name: "cuda")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert environment.launcher(["eval", "--device_map", "auto"])[1:] == ["-m", "eval.run_eval"]
    assert "--nproc_per_node" in environment.launcher(["eval"])


@pytest.fixture(scope="module")
def targets(tmp_path_factory):
    path = save_tiny_target(tmp_path_factory.mktemp("spread"))
    return load_target(path, torch.float32), load_target(path, torch.float32, placed={"device_map": SPREAD}), path


def test_a_forward_is_the_same(targets):
    whole, spread, _ = targets
    assert [p.is_meta for p in (layer.mlp.up_proj.weight for layer in spread.decoder.layers)] == [False, True] * 2
    assert spread.layer_devices == [torch.device("cpu")] * 4
    ids = torch.arange(3, 21).view(2, 9)
    ours, theirs = (target.forward(ids, (0, 1, 2), with_final=True) for target in (spread, whole))
    for name in ("logits", "taps", "final"):
        assert torch.equal(getattr(ours, name), getattr(theirs, name)), name


def test_every_method_emits_the_same_tokens_in_the_same_rounds(targets):
    whole, spread, _ = targets
    drafter = tiny_drafter(whole)
    requests = [Request([5, 6, 7], 8), Request([9, 10, 11, 12, 13], 8), Request([20], 6)]
    options = TreeOptions(8, 3, 8, -0.2)
    for method in available_methods("domino"):
        ours, theirs = (
            generate(target, make_proposer(target, drafter, method, options), requests, slots=2)
            for target in (spread, whole)
        )
        assert [a.tokens for a in ours] == [a.tokens for a in theirs], method
        assert [[r.accepted for r in a.rounds] for a in ours] == [[r.accepted for r in a.rounds] for a in theirs]


def test_transformers_generates_the_same(targets):
    texts = [t.model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=6, do_sample=False) for t in targets[:2]]
    assert torch.equal(*texts)


def test_tables_must_be_in_the_memory_of_the_drafters_device(targets):
    for name, words in (("lm_head", "no room for its LM head"), ("model.embed_tokens", "no room for its embedding")):
        with pytest.raises(ValueError, match=f"device_map: the target does not fit on these GPUs: {words}"):
            load_target(targets[2], torch.float32, placed={"device_map": SPREAD | {name: "disk"}})


def test_a_stage_takes_the_option(targets, tmp_path, monkeypatch, capsys):
    """On a machine without GPUs `auto` is the CPU."""
    drafter = tmp_path / "drafter"
    tiny_drafter(targets[0]).model.save_pretrained(drafter)
    options = {"target": targets[2], "device_map": ["auto"], "device": "cpu", "run_dir": str(tmp_path)}
    session = load_session(load_config("configs/demo.yaml", options), str(drafter))
    assert "target: 4 layers on cpu" in capsys.readouterr().out
    ids = torch.arange(3, 9)[None]
    assert session.target.forward(ids, ()).logits.shape == (1, 6, 64)


def test_keys_and_values_lie_where_their_layer_computes():
    """A device without data (meta) stands for the second GPU: mixing devices is an error there too."""
    devices = [torch.device(name) for name in ("cpu", "meta", "cpu")]
    cache = TreeCache(2, 1, 6, 4, torch.float32, devices)
    alone = TreeCache(2, 1, 6, 4, torch.float32, [torch.device("cpu")] * 2)
    assert [tuple(store.shape) for store in cache.stores] == [(2, 2, 2, 1, 6, 4), (1, 2, 2, 1, 6, 4)]
    assert cache.nbytes == 3 * 2 * 2 * 6 * 4 * 4
    for columns in ([[0, 1], [0, 1]], [[2, 3], [1, 4]]):  # one run for all rows, and scattered columns
        width = cache.place(torch.tensor(columns))
        assert alone.place(torch.tensor(columns)) == width
        for layer, own in ((0, 0), (1, None), (2, 1)):
            keys = torch.randn(2, 1, 2, 4).to(devices[layer])
            seen = cache.update(keys, 2 * keys, layer)
            assert all(x.device == devices[layer] and x.shape == (2, 1, width, 4) for x in seen)
            if own is not None:
                assert all(torch.equal(a, b) for a, b in zip(seen, alone.update(keys, 2 * keys, own), strict=True))
    for store in (cache, alone):
        store.commit(0, [0, 3])
        store.commit(1, [0, 4])
        store.keep([1])
    assert torch.equal(cache.stores[0], alone.stores[0]) and cache.lengths == alone.lengths == [2, 0]
