"""What the machine can do: compiler, device, speed. launch.sh asks this module; the first checks need no packages.

python -m data.environment compiler          exit 2 and one line when DeepSpeed could not build its operator
python -m data.environment report ARGS       prints device, dtype and how long the demo should take
python -m data.environment launcher ARGS     prints the words that start the train or eval stage
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import sysconfig
import time

# The demo on the machine it was measured on: 2 cores with AMX, bf16, see README.
DEMO_MINUTES = 15
REFERENCE_SECONDS = 0.0048
# Below this slow-down nothing is cut: two measurements of one machine differ by as much.
_TOLERATED = 2.0


def check_compiler() -> None:
    """Raises ValueError naming the package that is missing: DeepSpeed compiles its CPU communication operator."""
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        raise ValueError(f"no C++ compiler ({compiler}); on Debian or Ubuntu: apt-get install g++")
    header = os.path.join(sysconfig.get_path("include"), "Python.h")
    if not os.path.isfile(header):
        raise ValueError(f"no Python headers ({header}); on Debian or Ubuntu: apt-get install python3-dev")


def choose_device(name: str) -> str:
    """`auto`: cuda when torch sees a GPU, else cpu. ValueError when a GPU is asked for or present but unusable."""
    import torch

    if name not in ("auto", "cpu", "cuda"):
        raise ValueError(f"device must be auto, cpu or cuda, got {name!r}")
    if name == "cpu":
        return "cpu"
    if torch.cuda.is_available():
        return "cuda"
    driver = gpu_driver()
    if driver is None and name == "auto":
        return "cpu"
    found = "no NVIDIA driver was found" if driver is None else f"NVIDIA driver {driver} is there"
    raise ValueError(
        f"device: torch {torch.__version__} sees no GPU, {found} and device is {name}; "
        "install a torch build that fits the driver, or go on with --device cpu"
    )


def gpu_driver() -> str | None:
    """The NVIDIA driver's version when nvidia-smi lists a GPU, else None."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return None
    query = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        result = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = result.stdout.split()
    return lines[0] if result.returncode == 0 and lines else None


def probe_seconds(dtype, limit: float = 2.0) -> float:
    """Seconds of some feed-forward layers of the demo target's size on one thread, times 1/cores.

    The best of many short passes, one thread each: other load on the machine must not make it look slow. Products alone
    would overstate the gap between CPUs; a third of a pass is element-wise work, as in the real model.
    """
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    x = torch.randn(256, 576).to(dtype)
    layers = [(torch.randn(576, 1536).to(dtype), torch.randn(1536, 576).to(dtype)) for _ in range(4)]
    best, end = float("inf"), time.perf_counter() + limit
    while time.perf_counter() < end:
        start = time.perf_counter()
        for up, down in layers:
            normed = x * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True)).to(dtype)
            x = x + (torch.nn.functional.silu(normed @ up) * (normed @ up)) @ down * 1e-3
        best = min(best, time.perf_counter() - start)
    torch.set_num_threads(threads)
    return best / len(os.sched_getaffinity(0))


def slow_down(device: str, dtype_name: str) -> float:
    """How many times longer than on the reference machine the demo's heavy parts take here; 1 on GPUs."""
    from models.target import choose_dtype

    if device != "cpu":
        return 1.0
    return max(1.0, probe_seconds(choose_dtype(dtype_name, device)) / REFERENCE_SECONDS)


def cut_for_speed(config, factor: float) -> dict[str, int]:
    """Fewer answers, steps and evaluated prompts for a machine that is `factor` times slower; {} when none is needed.

    The results stay what they are, from less training; below these sizes the table would say nothing.
    """
    if factor <= _TOLERATED:
        return {}
    steps = int(config.training.get("max_steps") or 0)
    sizes = {"num_prompts": (config.num_prompts, 192), "eval_prompts": (config.eval_prompts, 16)}
    if steps > 0:
        sizes["max_steps"] = (steps, 100)
    return {name: max(min(size, floor), round(size / factor)) for name, (size, floor) in sizes.items()}


def report(argv: list[str]) -> None:
    """Prints the choices for this machine. ValueError when a GPU is there but cannot be used."""
    from data.settings import parse_arguments
    from models.target import choose_dtype

    config = parse_arguments("setup", argv)
    device = choose_device(config.device)
    factor = slow_down(device, config.dtype)
    dtype = str(choose_dtype(config.dtype, device)).removeprefix("torch.")
    minutes = DEMO_MINUTES * min(factor, _TOLERATED)
    print(f"device {device}, dtype {dtype}; the demo takes about {minutes:.0f} minutes", end="")
    cut = cut_for_speed(config, factor)
    print(f" cut to {cut}, this machine being {factor:.1f} times slower than the reference" if cut else "")


def launcher(argv: list[str]) -> list[str]:
    """The command before a stage's own words: `train` through DeepSpeed's launcher, others on every GPU or one process.

    argv: the stage, then its arguments. On the CPU one rank has all cores. Exits as `parse_arguments` does.
    """
    import torch

    from data.engines import LOCAL, engine_name
    from data.settings import parse_arguments

    stage, *words = argv
    config = parse_arguments(stage, words)
    device = choose_device(config.device)
    count = torch.cuda.device_count() if device == "cuda" else 1
    if stage == "train":
        start = ["-m", "deepspeed.launcher.runner", "--num_gpus", str(count), "--master_port", str(free_port())]
        accelerator = [f"DS_ACCELERATOR={device}"]
        # A GPU that the CPU run must not see would still be counted by the launcher.
        accelerator += ["CUDA_VISIBLE_DEVICES="] if device == "cpu" else []
        return ["env", *accelerator, sys.executable, *start, "training/train_drafter.py"]
    module = {"eval": "eval.run_eval", "features": "data.make_features", "regenerate": "data.regenerate"}[stage]
    alone = stage == "regenerate" and engine_name(config) != LOCAL  # servers have the GPUs
    if count > 1 and not config.device_map and not alone:  # one target over all of them
        start = ["-m", "torch.distributed.run", "--nproc_per_node", str(count), "--master_port", str(free_port())]
        return [sys.executable, *start, "-m", module]
    return [sys.executable, "-m", module]


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def main(argv: list[str]) -> int:
    question, words = argv[0], argv[1:]
    try:
        if question == "compiler":
            check_compiler()
        elif question == "report":
            report(words)
        else:
            assert question == "launcher", question
            print("\n".join(launcher(words)))
    except ValueError as error:
        print(f"{'setup' if question != 'launcher' else words[0]}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
