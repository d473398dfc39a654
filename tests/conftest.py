import os

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
    # Tiny tensors gain nothing from a second thread, and two that wait for each other beside other work cost tenfold.
    torch.set_num_threads(1)
