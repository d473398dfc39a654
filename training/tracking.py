"""What wandb is told beyond transformers' own callback: the run's description, and a table of drafts in words."""

from __future__ import annotations

import netrc
import os
from dataclasses import asdict, fields
from urllib.parse import urlsplit

from transformers.integrations import WandbCallback

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


class Tracking(WandbCallback):
    """transformers' callback, with a table of drafts, for a run that goes on without wandb when that cannot start.

    Args:
        description: configuration, code version and library versions of the run.
        evaluation: its examples become a table at each evaluation; None when nothing is evaluated.
    """

    def __init__(self, description: dict, evaluation: TrainingEvaluation | None):
        super().__init__()  # imports wandb, which costs a second: only runs that report to it need it
        self.description, self.evaluation, self.rows = description, evaluation, []

    def setup(self, args, state, model, **kwargs):
        """Starts the run on the first rank; called once, by the first event."""
        try:
            super().setup(args, state, model, **kwargs)
        except (self._wandb.errors.Error, OSError) as error:
            reason = " ".join(str(error).split())
            print(f"train: wandb cannot start ({reason}); the run goes on without it")
            self._wandb, self._initialized = None, False
            return
        if self._wandb.run is not None:
            self._wandb.config.update({"dartree": self.description}, allow_val_change=True)

    def on_evaluate(self, args, state, control, **kwargs):
        if self._wandb is None or self._wandb.run is None or self.evaluation is None:
            return
        self.rows += [list(asdict(example).values()) for example in self.evaluation.examples]
        # A table cannot be added to once it is logged: each one holds all rows so far.
        table = self._wandb.Table([f.name for f in fields(Example)], self.rows)
        self._wandb.log({"drafted_against_accepted": table, "train/global_step": state.global_step})
