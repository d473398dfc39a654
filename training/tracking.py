"""What wandb is told beyond transformers' own callback: the run's description, and a table of drafts in words."""

from __future__ import annotations

import netrc
import os
from dataclasses import asdict, fields
from urllib.parse import urlsplit

from transformers import TrainerCallback

from data.settings import RunConfig
from training.evaluation import Example, TrainingEvaluation


def prepare_wandb(config: RunConfig) -> None:
    """Files go into the run folder, and without an account the run is kept offline (`wandb sync` sends it later)."""
    os.environ.setdefault("WANDB_DIR", config.run_dir)
    os.environ.setdefault("WANDB_PROJECT", "dartree")
    os.makedirs(os.environ["WANDB_DIR"], exist_ok=True)
    if "WANDB_MODE" not in os.environ and not _has_account():
        os.environ["WANDB_MODE"] = "offline"
        print(f"train: no wandb account found; the run is kept offline in {config.path('wandb')}")


def _has_account() -> bool:
    """Whether wandb would find a login where it documents to look: the environment, or the netrc file."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    try:
        entries = netrc.netrc(os.environ.get("NETRC"))
    except (OSError, netrc.NetrcParseError):
        return False
    return (
        entries.authenticators(urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname) is not None
    )


class Tracking(TrainerCallback):
    """Runs after transformers' WandbCallback, which starts the run.

    Args:
        description: configuration, code version and library versions of the run.
        evaluation: its examples become a table at each evaluation; None when nothing is evaluated.
    """

    def __init__(self, description: dict, evaluation: TrainingEvaluation | None):
        self.description, self.evaluation, self.rows = description, evaluation, []

    def on_train_begin(self, args, state, control, **kwargs):
        import wandb  # imported late: it costs a second, and only runs that report to it need it

        if wandb.run is not None:
            wandb.config.update({"dartree": self.description}, allow_val_change=True)

    def on_evaluate(self, args, state, control, **kwargs):
        import wandb

        if wandb.run is None or self.evaluation is None:
            return
        self.rows += [list(asdict(example).values()) for example in self.evaluation.examples]
        # A table cannot be added to once it is logged: each one holds all rows so far.
        table = wandb.Table([f.name for f in fields(Example)], self.rows)
        wandb.log({"drafted_against_accepted": table, "train/global_step": state.global_step})
