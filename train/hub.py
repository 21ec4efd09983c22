"""Sending a finished folder to the Hugging Face hub: only ever at the user's word."""

from pathlib import Path

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, LocalTokenNotFoundError
from huggingface_hub.utils import disable_progress_bars, validate_repo_id

from recipes.errors import UserError


def check_name(repo: str) -> None:
    """Raise UserError where `repo` cannot be a repository's name: known before anything is computed."""
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise UserError(f"--push {repo}: not a repository's name; say NAMESPACE/NAME ({_line(error)})") from error


def push(folder: Path, repo: str) -> str:
    """Upload `folder` into the model repository `repo` in one go; returns the address of the commit.

    A repository that is not there yet is made private; one that is there stays as visible as it is. Raises UserError
    where there is no token, the hub refuses or cannot be reached; `folder` stays as it is.
    """
    disable_progress_bars()
    api = HfApi()
    try:
        api.create_repo(repo, private=True, exist_ok=True, token=True)
        commit = api.upload_folder(repo_id=repo, folder_path=folder, commit_message="Merged by headstart", token=True)
    except (HTTPError, OSError, RuntimeError) as error:  # RuntimeError: what hf_xet, which moves large files, raises
        raise UserError(
            f"--push {repo}: {_why(error)}; {folder} stays as it is, and the same command pushes it"
        ) from error
    return commit.commit_url


def _why(error: Exception) -> str:
    if isinstance(error, LocalTokenNotFoundError):
        return "there is no token; log in with `hf auth login`, or set HF_TOKEN"
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"the hub refuses; log in with a token that may write there ({_line(error)})"
    return f"the upload failed ({_line(error)})"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]
