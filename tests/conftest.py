import os

# Before torch is loaded, and for every process that a test starts: tiny tensors gain nothing from a second thread, and
# two that wait for each other beside other work cost tenfold. A measurement also belongs to its count of threads.
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)
    torch.set_num_threads(1)
