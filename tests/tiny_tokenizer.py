"""A tokenizer of single characters with a chat template, and a tiny target saved with it, for the data side."""

from __future__ import annotations

from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tiny import EOS, MASK, PAD, VOCAB, tiny_target

# Thinking is on unless the caller says otherwise, as in the templates of thinking models.
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['user', 'assistant'] %}{{ raise_exception('role ' + m.role) }}{% endif %}"
    "{% if 'forbidden' in m.content %}{{ raise_exception('bad words') }}{% endif %}"
    "{{ m.role[0] }}:{{ m.content }}/{% endfor %}"
    "{% if add_generation_prompt %}a:"
    "{% if enable_thinking is not defined or enable_thinking %}think.{% endif %}{% endif %}"
)


def tiny_tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    words = ["<pad>", "<eos>", "<mask>", "<unk>", *"abcdefghijklmnopqrstuvwxyz 0123456789.,?/:"]
    words += [f"<x{i}>" for i in range(VOCAB - len(words))]
    assert (words.index("<pad>"), words.index("<eos>"), words.index("<mask>")) == (PAD, EOS, MASK)
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", chat_template=template
    )


def save_tiny_target(folder: Path, eos: list[int] | None = None, template: str | None = TEMPLATE, seed: int = 0) -> str:
    """A folder that load_target reads. `eos` replaces the end tokens in generation_config."""
    target = tiny_target(seed=seed)
    if eos is not None:
        target.model.generation_config.eos_token_id = eos
    target.model.save_pretrained(folder)
    tiny_tokenizer(template).save_pretrained(folder)
    return str(folder)
