"""Reading checkpoints that somebody else wrote, and how a reader refuses them."""

from __future__ import annotations

from pathlib import Path

import pytest

from models.checkpoint import load_drafter

PUBLIC = ("zlab", "deepspec", "speculators", "modelopt")
# A case of each format with all that it can hold.
FULL = {"zlab": "zlab domino shifted", "deepspec": "deepspec vanilla", "speculators": "speculators vanilla",
        "modelopt": "modelopt vanilla"}  # fmt: skip


class Words:
    """As much of a tokenizer as `fit_to_target` asks for."""

    def __init__(self, count, mask_token_id=None):
        self.count, self.mask_token_id = count, mask_token_id

    def __len__(self):
        return self.count


def load(folder, made, **kwargs):
    return load_drafter(made.save(Path(folder)), dtype=None, **kwargs)


def refusal(folder, made, **kwargs):
    with pytest.raises(ValueError) as caught:
        load(folder, made, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)
