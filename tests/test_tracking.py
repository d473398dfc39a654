"""Where wandb keeps a run, and that no account is needed."""

import os
from types import SimpleNamespace

import pytest
import wandb

from data.settings import RunConfig
from trainers import logged, make_trainer
from training.curves import PANELS, _matching
from training.evaluation import Example
from training.tracking import Tracking, prepare_wandb


@pytest.fixture
def bare(tmp_path, monkeypatch):
    """An environment that knows nothing of wandb."""
    for name in (
        "WANDB_MODE",
        "WANDB_API_KEY",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_DIR",
        "WANDB_PROJECT",
        "WANDB_BASE_URL",
    ):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return RunConfig(run_dir=str(tmp_path / "run")), monkeypatch, tmp_path


def mode(config) -> str | None:
    prepare_wandb(config)
    return os.environ.get("WANDB_MODE")


def test_without_an_account_the_run_stays_offline_in_its_folder(bare, capsys):
    config, _, folder = bare
    assert mode(config) == "offline" and os.environ["WANDB_DIR"] == str(folder / "run")
    assert f"kept offline in {folder}/run/wandb" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["key", "netrc", "mode", "other host"])
def test_an_account_or_a_mode_of_the_users_is_respected(bare, where):
    config, monkeypatch, folder = bare
    if where == "key":
        monkeypatch.setenv("WANDB_API_KEY", "x")
    elif where == "mode":
        monkeypatch.setenv("WANDB_MODE", "disabled")
    else:
        host = "api.wandb.ai" if where == "netrc" else "elsewhere.org"
        (folder / "netrc").write_text(f"machine {host} login user password x\n")
    assert mode(config) == {"key": None, "netrc": None, "mode": "disabled", "other host": "offline"}[where]


@pytest.mark.parametrize(
    "error", [wandb.errors.CommError("Run initialization has timed out\nafter 90 s"), ConnectionError("no route")]
)
def test_a_run_goes_on_where_wandb_cannot_start(bare, tmp_path, capsys, error):
    def refused(**options):
        raise error

    _, monkeypatch, _ = bare
    monkeypatch.setattr(wandb, "init", refused)
    monkeypatch.setenv("WANDB_LOG_MODEL", "checkpoint")
    evaluation = SimpleNamespace(examples=[Example(1, "a", 1, "b", "c", "d")])
    trainer = make_trainer(tmp_path, max_steps=3, save_strategy="steps", save_steps=2)
    trainer.add_callback(Tracking({}, evaluation))
    trainer.train()
    trainer.callback_handler.on_evaluate(trainer.args, trainer.state, trainer.control, {"eval_tau": 1.0})
    assert len(logged(trainer)) == 3
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "wandb" in line]
    assert line == f"train: wandb cannot start ({' '.join(str(error).split())}); the run goes on without it"


def test_curves_are_sorted_into_their_panels():
    names = ["loss", "kl_loss", "eval_tau_dartree_pruned", "eval_tau_rounds_dartree_pruned", "final_run", "recall"]
    found = {title: _matching(names, patterns) for title, patterns in PANELS.items()}
    assert [chosen for chosen in found.values() if chosen] == [
        ["loss", "kl_loss"], ["recall"], ["final_run"], ["eval_tau_dartree_pruned"],
    ]  # fmt: skip
