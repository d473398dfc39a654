"""Correction heads against naive forwards written from the formulas of METHODS section 2."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from data.settings import load_config
from eval.decoding.proposals import DraftProposer, TreeOptions
from eval.export import export
from models.checkpoint import Drafter, load_drafter, save_draft_ids
from models.configuration import DrafterSpec, build_drafter_config
from models.drafter import DFlashDraftModel
from models.head import CorrectionHead
from models.head_confidence import build_confidence
from models.heads import HEADS, build_head
from tiny import MASK, VOCAB, tiny_drafter, tiny_target
from training.plan import build_spec
from training_runs import answer_rows

D, V, E, G, T = 6, 11, 4, 5, 4


def make(head_type, draft=None):
    torch.manual_seed(1)
    spec = DrafterSpec(5, 0, (0,), 4, head_type=head_type, head_rank=E, gru_hidden_dim=G, draft_vocab_size=draft)
    return build_head(spec, D, V)


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def naive_corrections(head, kind, anchor, tokens, table, hidden):
    """Corrections [T, V] of successive predictions, one position at a time."""
    state = dict(head.named_parameters())
    consumed = [anchor]
    rows = []
    if kind == "domino":
        w_ih, w_hh = state["prefix_gru.weight_ih_l0"], state["prefix_gru.weight_hh_l0"]
        w1, w2 = state["embed_proj.0.weight"], state["embed_proj.2.weight"]
    else:
        w1, w2 = state["markov_head.markov_w1.weight"], state["markov_head.markov_w2.weight"]
    memory = torch.zeros(E)
    for t in range(T):
        h = hidden[t]
        if kind == "domino":
            s = torch.zeros(G)
            for token in consumed:
                ri, zi, ni = (w_ih @ table[token]).chunk(3)
                rh, zh, nh = (w_hh @ s).chunk(3)
                r, z = sigmoid(ri + rh), sigmoid(zi + zh)
                s = (1 - z) * torch.tanh(ni + r * nh) + z * s
            x = w1 @ torch.cat([h, s])
            rows.append(w2 @ (x * sigmoid(x)))
        elif kind == "markov_vanilla":
            rows.append(w2 @ w1[consumed[-1]])
        elif kind == "markov_gated":
            weight, bias = state["markov_head.gate_proj.weight"], state["markov_head.gate_proj.bias"]
            row = w1[consumed[-1]]
            rows.append(w2 @ (sigmoid(weight @ torch.cat([h, row]) + bias) * row))
        else:
            weight, bias = state["markov_head.joint_proj.weight"], state["markov_head.joint_proj.bias"]
            g, c, o = (weight @ torch.cat([memory, w1[consumed[-1]], h]) + bias).chunk(3)
            rows.append(w2 @ torch.tanh(o))
            memory = sigmoid(g) * memory + (1 - sigmoid(g)) * torch.tanh(c)
        consumed.append(int(tokens[t]))
    return torch.stack(rows)


@pytest.mark.parametrize("kind", ["domino", "markov_vanilla", "markov_gated", "markov_rnn"])
def test_head_equals_the_formulas(kind):
    head, table, hidden = make(kind), torch.randn(V, D), torch.randn(T, D)
    tokens = torch.tensor([3, 9, 0, 7])
    expected = naive_corrections(head, kind, 5, tokens, table, hidden)
    codes = head.teacher_forced_codes(torch.tensor(5), tokens, lambda ids: table[ids], hidden)
    torch.testing.assert_close(codes @ head.rows().T, expected, atol=1e-5, rtol=1e-5)
    chosen = torch.tensor([2, 7])
    torch.testing.assert_close(codes @ head.rows(chosen).T, expected[:, chosen], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["domino", "markov_vanilla", "markov_gated", "markov_rnn"])
def test_many_blocks_at_once_equal_one_by_one(kind):
    """Heads accept any leading dimensions, and no block bleeds into another (TRAP 8)."""
    head, table = make(kind), torch.randn(V, D)
    anchors, tokens, hidden = torch.randint(0, V, (2, 3)), torch.randint(0, V, (2, 3, T)), torch.randn(2, 3, T, D)
    embed = lambda ids: table[ids]  # noqa: E731
    together = head.teacher_forced_codes(anchors, tokens, embed, hidden)
    for r in range(2):
        for n in range(3):
            alone = head.teacher_forced_codes(anchors[r, n], tokens[r, n], embed, hidden[r, n])
            torch.testing.assert_close(together[r, n], alone, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("kind", ["domino", "markov_rnn"])
def test_the_last_token_cannot_influence_its_own_prediction(kind):
    head, table, hidden = make(kind), torch.randn(V, D), torch.randn(T, D)
    embed = lambda ids: table[ids]  # noqa: E731
    a = head.teacher_forced_codes(torch.tensor(5), torch.tensor([3, 9, 0, 7]), embed, hidden)
    b = head.teacher_forced_codes(torch.tensor(5), torch.tensor([3, 9, 4, 1]), embed, hidden)
    assert torch.equal(a[:3], b[:3])
    assert not torch.equal(a[3], b[3])


def test_reduced_draft_vocabulary_has_fewer_output_rows_but_reads_all_tokens():
    head = make("markov_gated", draft=4)
    assert head.rows().shape == (4, E)
    assert head.markov_head.markov_w1.weight.shape == (V, E)


def test_no_head_is_none():
    assert make("none") is None


@pytest.mark.parametrize("kind", ["markov_vanilla", "markov_gated", "markov_rnn"])
def test_previous_rows_are_those_of_the_anchor_and_the_labels_before(kind):
    """TRAPS 8 for the confidence head: before prediction 0 comes the anchor, before t comes label t - 1."""
    options = dict(head_type=kind, head_rank=E, draft_vocab_size=4, confidence_head=True, confidence_with_markov=True)
    model = tiny_drafter(tiny_target(), **options).model
    hidden, tokens = torch.randn(T, 32), torch.tensor([3, 9, 0, 7])
    rows = model.markov_head.markov_w1.weight[torch.tensor([5, 3, 9, 0])]
    expected = model.confidence_head(hidden, rows)
    torch.testing.assert_close(model.confidence_logits(hidden, torch.tensor(5), tokens), expected)


def test_confidence_is_a_linear_map_of_state_and_previous_row():
    torch.manual_seed(1)
    spec = DrafterSpec(
        5, 0, (0,), 4, head_type="markov_rnn", head_rank=E, confidence_head=True, confidence_with_markov=True
    )
    confidence = build_confidence(spec, D, build_head(spec, D, V))
    hidden, row = torch.randn(2, D), torch.randn(2, E)
    weight, bias = confidence.proj.weight[0], confidence.proj.bias[0]
    expected = torch.stack([weight @ torch.cat([hidden[i], row[i]]) + bias for i in range(2)])
    torch.testing.assert_close(confidence(hidden, row), expected)
    alone = build_confidence(replace(spec, confidence_with_markov=False), D, None)
    assert alone.proj.weight.shape == (1, D)
    torch.testing.assert_close(alone(hidden, None), hidden @ alone.proj.weight[0] + alone.proj.bias[0])


@pytest.mark.parametrize("kind", ["none", "domino"])
def test_heads_without_a_table_of_tokens_cannot_give_it_to_the_confidence_head(kind):
    with pytest.raises(ValueError, match=f"confidence_head_with_markov needs a Markov head, the head is '{kind}'"):
        DrafterSpec(5, 0, (0,), 4, head_type=kind, confidence_head=True, confidence_with_markov=True)


def test_a_prefix_that_leaves_the_head_no_token_is_refused():
    with pytest.raises(ValueError, match="pure_draft_prefix_len 4 leaves the head none of the 4 predicted tokens"):
        DrafterSpec(5, 0, (0,), 4, head_type="markov_gated", pure_draft_prefix_len=4)


class CountingHead(CorrectionHead):
    """A head in a few lines: the correction is a learned vector for the number of tokens seen."""

    title, output_name = "a head that counts", "counting.weight"

    def __init__(self, rank, vocab_size):
        super().__init__()
        self.counting = torch.nn.Linear(rank, vocab_size, bias=False)
        self.rank = rank

    @classmethod
    def build(cls, spec, hidden_size, vocab_size):
        return cls(spec.head_rank, spec.draft_vocab_size or vocab_size)

    @property
    def output(self):
        return self.counting

    def prepare(self, hidden):
        return hidden[..., :0]

    def initial_state(self, anchor, embed):
        return torch.ones(*anchor.shape, self.rank)

    def code(self, state, slot):
        return state

    def advance(self, state, token, embed, slot):
        return state + 1


def test_a_new_head_is_a_class_and_a_name(monkeypatch, tmp_path):
    """From the option to an export's card, without a change elsewhere; a reduced vocabulary too."""
    monkeypatch.setitem(HEADS, "counting", CountingHead)
    target, config = tiny_target(layers=6), tmp_path / "c.yaml"
    config.write_text(
        "head: counting\nhead_rank: 3\nblock_size: 5\nnum_draft_layers: 2\nnum_taps: 2\ndraft_vocab_size: 16\n"
    )
    options = load_config(str(config), {"mask_token_id": MASK, "run_dir": str(tmp_path / "run")})
    draft_ids, spec = build_spec(options, target, answer_rows(8))
    assert (spec.head_type, spec.head_rank, spec.draft_vocab_size) == ("counting", 3, 16)
    torch.manual_seed(2)
    drafter = Drafter(DFlashDraftModel(build_drafter_config(target.config, spec, 2)).eval(), draft_ids)
    folder = tmp_path / "run" / "drafter"
    drafter.model.save_pretrained(folder)
    save_draft_ids(folder, draft_ids)
    exported = export(options)
    assert "with a head that counts for speculative decoding" in (exported / "README.md").read_text()
    assert load_file(exported / "model.safetensors")["counting.weight"].shape == (VOCAB, 3)
    with pytest.raises(ValueError, match="format zlab cannot hold head 'counting', only none, domino"):
        export(replace(options, format="zlab", output=str(tmp_path / "zlab")))
    again = load_drafter(str(exported))
    assert again.spec == drafter.spec and again.spec.head_type == "counting"
    assert torch.equal(again.model.counting.weight, drafter.model.counting.weight)
    proposer = DraftProposer(target, again, "dartree_fixed", TreeOptions(budget=8, candidates=4))
    proposer.begin(1, 32)
    proposer.join(torch.randn(1, 3, 64), [3])
    assert proposer.build(proposer.draft(torch.tensor([5]))).sizes == [8]
