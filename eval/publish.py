"""Uploads an export to a repository on the Hub: `bash launch.sh export ... --push_to_hub OWNER/NAME [--private]`.

huggingface_hub does the work; an upload that was interrupted goes on when it is repeated, and one whose files are all
there already sends nothing.
"""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import validate_repo_id

from data.settings import StageError
from models.checkpoint import DRAFT_VOCABULARY
from models.formats.folder import INDEX, WEIGHTS

from .standalone import CUSTOM_GENERATE, DRAFTER, standalone

# A number of five digits, in the names of shards. `*` would match folders too.
_NUMBER = "[0-9]" * 5
_REFUSED = (401, 403)


def own_files() -> list[str]:
    """Patterns of the files that an export may hold, but for those that every export writes.

    An earlier upload may have left some that this one no longer has, and a stale draft vocabulary or module would be
    read with the new weights. What others put into the repository stays: no pattern reaches further than our names.
    """
    code = [*standalone(*DRAFTER), *(f"custom_generate/{name}" for name in standalone(*CUSTOM_GENERATE))]
    weights = [WEIGHTS, INDEX, f"model-{_NUMBER}-of-{_NUMBER}.safetensors", DRAFT_VOCABULARY]
    return [*weights, "provenance.json", "export.json", *code]


def check_access(repository: str) -> None:
    """Asks the Hub who we are, before any work is done.

    Raises ValueError without a valid token or repository name, StageError when the Hub cannot be reached.
    """
    try:
        validate_repo_id(repository)
        HfApi().whoami()
    except LocalTokenNotFoundError:
        raise ValueError("push_to_hub: no token; log in with `hf auth login` or set HF_TOKEN") from None
    except (HTTPError, OSError) as error:
        raise _in_one_line(error, "") from None


def push(folder: Path, repository: str, private: bool) -> str:
    """Creates the repository unless it is there, makes it hold the folder's files, and returns its address.

    Args:
        private: whether a new repository is private; one that exists stays as it is.

    Raises ValueError for a refusal and StageError for any other failure, both with the command that goes on: the folder
    stays as it is.
    """
    api = HfApi()
    try:
        url = api.create_repo(repository, private=private, exist_ok=True)
        api.upload_folder(
            repo_id=repository, folder_path=folder, commit_message="Upload drafter", delete_patterns=own_files()
        )
    except (HTTPError, OSError, RuntimeError) as error:
        again = f"hf upload {repository} {folder}" + (" --private" if private else "")
        raise _in_one_line(error, f"; {folder} is whole, go on with: {again}") from None
    return str(url)


def _in_one_line(error: Exception, then: str) -> Exception:
    """A refusal of the Hub as the user's mistake, anything else (no network, a full disk) as a failure."""
    reason = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, HfHubHTTPError) and error.response.status_code in _REFUSED:
        return ValueError(f"push_to_hub: the Hub refuses: {reason}{then}")
    return StageError(f"push_to_hub: the upload failed: {reason}{then}")
