"""Downloads of models and data sets from the Hugging Face hub."""

from collections.abc import Callable, Sequence
from pathlib import Path

from meshwright.errors import MeshwrightError, UnavailableError, by_class, reason_of

MODEL = "model"
DATASET = "dataset"
"""Kinds of repositories, as the hub's library names them."""
_PAGES = {MODEL: "https://huggingface.co/", DATASET: "https://huggingface.co/datasets/"}
_BUSY = 429
_SERVER_ERRORS = 500
"""HTTP status from which on the hub has failed, and not the request."""


def download_from_hub(
    name: str,
    repository: str,
    patterns: Sequence[str],
    refusal: Callable[[str, str], MeshwrightError],
    revision: str | None = None,
) -> Path:
    """Returns the folder of a repository in the hub's cache, with the files that match;
    downloads what is missing.

    name: OWNER/NAME.
    repository: `MODEL` or `DATASET`.
    patterns: globs of the wanted files.
    refusal: builds the caller's error from what is true and its fix. Raises that error where the
    hub has no such files for this user, and UnavailableError where the hub does not answer.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        truth = "`huggingface_hub`, which downloads from the hub, is not installed"
        fix = "pip install 'meshwright[hub]', or the path of a folder"
        raise refusal(truth, fix) from error
    try:
        folder = huggingface_hub.snapshot_download(
            name, repo_type=repository, revision=revision, allow_patterns=list(patterns)
        )
    except Exception as error:  # the library raises its own errors, and those of its HTTP client
        raise by_class(
            error, _download_error(error, name, repository, refusal, revision)
        ) from error
    return Path(folder)


def _download_error(
    error: Exception,
    name: str,
    repository: str,
    refusal: Callable[[str, str], MeshwrightError],
    revision: str | None,
) -> MeshwrightError:
    """Builds the error of a failed download: from whom the files are kept,
    or what does not answer."""
    from huggingface_hub import errors

    login = "`hf auth login`, or HF_TOKEN of an account that may read it"
    if isinstance(error, errors.GatedRepoError):
        truth = "its owner asks each reader to accept conditions"
        return refusal(truth, f"accept them on {_PAGES[repository]}{name}, then {login}")
    if isinstance(error, errors.RevisionNotFoundError):
        return refusal("the hub has no such revision of it", f"one of {_PAGES[repository]}{name}")
    if isinstance(error, errors.RepositoryNotFoundError):
        truth = f"the hub has no public {repository} of that name"
        return refusal(truth, f"the name as the hub writes it; for a private one {login}")
    if _is_outage(error):
        asked = refusal("", "").asked
        truth = f"the hub does not answer, and this machine has no copy: {reason_of(error)}"
        command = _download_command(name, repository, revision)
        fix = f"a network; or `{command}` elsewhere, and the path of that folder"
        return UnavailableError(asked, truth, fix)
    fix = f"the name as the hub writes it, {login}, or the path of a folder"
    return refusal(f"the hub does not give it: {reason_of(error)}", fix)


def _download_command(name: str, repository: str, revision: str | None) -> str:
    """Returns the command of the hub's own program that downloads the same:
    without a type it takes a model."""
    words = ["hf download", name]
    if repository != MODEL:
        words += ["--repo-type", repository]
    if revision is not None:
        words += ["--revision", revision]
    return " ".join(words)


def _is_outage(error: Exception) -> bool:
    """Whether the network or the hub failed, so that the same request may succeed later."""
    from huggingface_hub import errors

    response = getattr(error, "response", None)
    if response is not None:
        status = response.status_code
        return status == _BUSY or status >= _SERVER_ERRORS
    # The client's errors without an answer: no name, no connection, a time-out.
    transport: type[Exception] = errors.HTTPError  # type: ignore[attr-defined]  # of its client
    network = (transport, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)
    return isinstance(error, network)
