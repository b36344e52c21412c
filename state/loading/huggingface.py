"""A model from a Hugging Face folder: config.json, safetensors, tokenizer.json."""

import contextlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from purestep.pure.errors import ModelLoadError
from purestep.pure.models.llama import llama
from purestep.pure.models.names import check_shapes, fuse
from purestep.pure.records.params import Params
from purestep.state.loading.hf_config import as_ids, hf_model_config
from purestep.state.loading.loaded import LoadedModel
from purestep.state.loading.tokenizer import Tokenizer, tokenizer_from_file

FLOATS = ("F64", "F32", "F16", "BF16")
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}
# Names in generation_config.json, and ours.
GENERATION_KEYS = {
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "max_new_tokens": "max_tokens",
}
SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def load_folder(
    folder: Path, *, dtype: torch.dtype | None, device: torch.device, tokenizer: Tokenizer | None = None
) -> LoadedModel:
    """The model in a folder, in `dtype` (None: as its config says, else as stored); weights are mapped, then fused.

    Raises:
        ModelLoadError: an unknown architecture, a missing, unexpected or misshapen tensor, a damaged file, or
            weights that exist only as pickles, which are never read.
    """
    raw = read_json(folder / "config.json")
    config = hf_model_config(raw, source=str(folder / "config.json"))
    dtype = dtype or _config_dtype(raw, folder)
    generation = _read_if_there(folder / "generation_config.json")
    with contextlib.ExitStack() as stack:
        shapes, files, read = _open_weights(folder, stack)
        check_shapes(config, shapes, source=str(folder), files=files)
        tree = fuse(config, lambda name: read(name).to(device=device, dtype=dtype))
    eos = (*config.eos_token_ids, *as_ids(generation.get("eos_token_id")))
    return LoadedModel(
        name=folder.resolve().name,
        model=llama(config, name=folder.resolve().name),
        params=Params(tree=tree),
        tokenizer=tokenizer or folder_tokenizer(folder),
        chat_template=folder_chat_template(folder),
        special_tokens=folder_special_tokens(folder),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        generation_defaults={
            ours: generation[key] for key, ours in GENERATION_KEYS.items() if generation.get(key) is not None
        },
    )


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelLoadError: the file is absent, or no JSON object.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} does not exist") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelLoadError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: holds a {type(content).__name__}, an object is needed")
    return content


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _config_dtype(raw: dict[str, Any], folder: Path) -> torch.dtype | None:
    named = raw.get("dtype") or raw.get("torch_dtype")
    if named is not None and named not in DTYPES:
        raise ModelLoadError(
            f"{folder / 'config.json'}: dtype {named} is not supported; give another with dtype="
        )
    return None if named is None else DTYPES[named]


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, None if it has none."""
    path = folder / "tokenizer.json"
    return tokenizer_from_file(path) if path.is_file() else None


def folder_chat_template(folder: Path) -> str | None:
    """The folder's chat template (the one named default, if there are several), None if it has none."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return alone.read_text(encoding="utf-8")
    template = _read_if_there(folder / "tokenizer_config.json").get("chat_template")
    if isinstance(template, list):
        template = next((entry["template"] for entry in template if entry["name"] == "default"), None)
    return template


def folder_special_tokens(folder: Path) -> dict[str, str]:
    """The texts of the tokens that templates know by name: bos_token and its like."""
    known = _read_if_there(folder / "tokenizer_config.json")
    found = {key: known[key] for key in SPECIAL_TOKENS if known.get(key) is not None}
    return {key: token["content"] if isinstance(token, dict) else token for key, token in found.items()}


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files.

    Raises:
        ModelLoadError: there are none, or one that the index names is absent.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        files = [folder / name for name in sorted(set(read_json(index).get("weight_map", {}).values()))]
        for path in files:
            if not path.is_file():
                raise ModelLoadError(f"{path} does not exist, though {index.name} names it")
    else:
        single = folder / "model.safetensors"
        files = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if files:
        return files
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ModelLoadError(
            f"{folder}: its weights are pickled ({pickled[0]}), and a pickle can run any code. "
            "Convert them to safetensors"
        )
    raise ModelLoadError(f"{folder}: no *.safetensors file in it")


def _open_weights(
    folder: Path, stack: contextlib.ExitStack
) -> tuple[dict[str, tuple[int, ...]], dict[str, str], Callable[[str], Tensor]]:
    """The shape of every tensor, its file, and a function that reads one."""
    from safetensors import SafetensorError, safe_open

    shapes, owner, files = {}, {}, {}
    for path in weight_files(folder):
        try:
            handle = stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as error:
            raise ModelLoadError(f"{path}: truncated or damaged: {error}") from error
        for name in handle.keys():  # noqa: SIM118 (not a dict)
            if name in owner:
                raise ModelLoadError(f"{path}: tensor {name} is in another file as well")
            stored = handle.get_slice(name)
            if stored.get_dtype() not in FLOATS:
                raise ModelLoadError(
                    f"{path}: tensor {name} is stored as {stored.get_dtype()}, which is not supported"
                )
            owner[name], files[name], shapes[name] = handle, str(path), tuple(stored.get_shape())
    return shapes, files, lambda name: owner[name].get_tensor(name)
