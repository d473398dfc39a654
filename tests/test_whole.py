"""Targets whose files lack something: refused in one line that names it, where transformers would fill in noise."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from data.answers import target_identity
from models.streaming import stream_target
from models.target import load_target
from models.whole import load_whole
from tiny_tokenizer import save_tiny_target, tiny_tokenizer


@pytest.fixture
def folder(tmp_path):
    return save_tiny_target(tmp_path)


def change(folder, edit):
    path = Path(folder, "model.safetensors")
    tensors = load_file(path)
    edit(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    "name", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight", "model.embed_tokens.weight"]
)
@pytest.mark.parametrize("load", [load_target, stream_target], ids=["whole", "streamed"])
def test_a_missing_tensor_is_named(folder, name, load):
    change(folder, lambda tensors: tensors.pop(name))
    if load is stream_target:  # leaves it to load_target, which names the tensor
        assert stream_target(folder, torch.float32) is None
        return
    with pytest.raises(ValueError, match=f"^target: cannot load .*: the files lack the tensor {re.escape(name)}$"):
        load_target(folder, torch.float32)


def test_missing_tensors_are_counted(folder):
    change(folder, lambda tensors: [tensors.pop(name) for name in sorted(tensors) if "layers.1.mlp" in name])
    with pytest.raises(ValueError, match=r"lack the tensor model.layers.1.mlp.down_proj.weight and 2 more$"):
        load_target(folder, torch.float32)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder):
    name = "model.layers.1.mlp.up_proj.weight"
    rows, columns = load_file(Path(folder, "model.safetensors"))[name].shape
    change(folder, lambda tensors: tensors.update({name: tensors[name][:-2].clone()}))
    words = rf"tensor {re.escape(name)} has shape \[{rows - 2}, {columns}\] in the files, \[{rows}, {columns}\] in the"
    with pytest.raises(ValueError, match=words):
        load_target(folder, torch.float32)


def test_one_copy_of_tied_weights_suffices_and_none_does_not(tmp_path):
    sizes = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert torch.equal(load_whole(str(tmp_path)).lm_head.weight, model.lm_head.weight)
    change(tmp_path, lambda tensors: tensors.pop("model.embed_tokens.weight"))
    with pytest.raises(ValueError, match=r"lack the tensor model.embed_tokens.weight$"):
        load_whole(str(tmp_path))


def test_a_missing_expert_is_refused(tmp_path):
    """transformers fuses the experts of a layer into one tensor: the gap is a shape."""
    sizes = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=8)
    experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, intermediate_size=32)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=64, **sizes, **experts)).save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    load_target(str(tmp_path), torch.float32)
    change(tmp_path, lambda tensors: tensors.pop("model.layers.1.mlp.experts.3.down_proj.weight"))
    with pytest.raises(ValueError, match=r"tensor model.layers.1.mlp.experts.down_proj has shape \[3, .* \[4, "):
        load_target(str(tmp_path), torch.float32)


def test_a_missing_shard_is_named(tmp_path):
    target = load_target(save_tiny_target(tmp_path / "one"), torch.float32)
    target.model.save_pretrained(tmp_path / "many", max_shard_size="20KB")
    tiny_tokenizer().save_pretrained(tmp_path / "many")
    folder = str(tmp_path / "many")
    names = sorted(path.name for path in Path(folder).glob("*.safetensors"))
    before = target_identity(folder)
    assert len(names) > 3 and torch.equal(
        load_target(folder, torch.float32).model.lm_head.weight, target.model.lm_head.weight
    )
    Path(folder, names[1]).rename(tmp_path / "aside")
    for read in (target_identity, lambda p: load_target(p, torch.float32), lambda p: stream_target(p, torch.float32)):
        with pytest.raises(ValueError, match=f"many lacks {names[1]} of the {len(names)} files that model.safetensors"):
            read(folder)
    (tmp_path / "aside").rename(Path(folder, names[1]))
    assert target_identity(folder) == before


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"weight_map": []})])
def test_an_index_that_is_none_is_named(folder, content):
    Path(folder, "model.safetensors.index.json").write_text(content)
    with pytest.raises(ValueError, match=r"model.safetensors.index.json is no index of safetensors files"):
        target_identity(folder)
