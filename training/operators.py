"""`python -m training.operators` builds, or finds built, the shared-memory operator that DeepSpeed loads on a CPU.

launch.sh calls it while setting up, so that no training start has to wait for a compiler.
"""

import os


def build() -> None:
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.ops.op_builder.cpu import ShareMemCommBuilder  # chooses its accelerator when it is imported

    ShareMemCommBuilder().load(verbose=False)


if __name__ == "__main__":
    build()
