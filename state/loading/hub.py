"""A model by its id on a hub."""

from pathlib import Path

from purestep.pure.errors import ModelLoadError

WANTED = ["*.json", "*.safetensors", "*.jinja"]  # no pickles, no code


def fetch(model_id: str, *, revision: str | None = None) -> Path:
    """The local folder of a hub's model; what was fetched before is not fetched again.

    Raises:
        ModelLoadError: huggingface_hub is not installed, the hub can not be reached, or has no such model.
    """
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ModelLoadError(
            f"{model_id!r} is no file or folder here, and to look for it on a hub huggingface_hub is needed: "
            "pip install purestep[hub]"
        ) from error
    try:
        return Path(snapshot_download(model_id, revision=revision, allow_patterns=WANTED))
    except Exception as error:  # its own classes, requests', httpx', OSError: whichever the version uses
        raise ModelLoadError(
            f"{model_id!r} is no file or folder here, and could not be had from the hub: {_short(error)}"
        ) from error


def _short(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
