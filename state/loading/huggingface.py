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
from purestep.state.loading.fields import INTEGERS, NAMES, TEXT, Fields, Kind, integer, real
from purestep.state.loading.hf_config import hf_model_config
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
# Names in generation_config.json, ours, and the kind of number; whether it makes sense is judged with a request.
GENERATION_KEYS = (
    ("temperature", "temperature", real()),
    ("top_k", "top_k", integer(least=-1)),
    ("top_p", "top_p", real()),
    ("min_p", "min_p", real()),
    ("repetition_penalty", "repetition_penalty", real()),
    ("max_new_tokens", "max_tokens", integer()),
)
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
    dtype = dtype or _config_dtype(Fields(raw, f"{folder / 'config.json'}: "))
    generation = _fields_if_there(folder / "generation_config.json")
    advice = {ours: generation.get(key, kind, None) for key, ours, kind in GENERATION_KEYS}
    with contextlib.ExitStack() as stack:
        shapes, files, read = _open_weights(folder, stack)
        check_shapes(config, shapes, source=str(folder), files=files)
        tree = fuse(config, lambda name: read(name).to(device=device, dtype=dtype))
    eos = (*config.eos_token_ids, *generation.get("eos_token_id", INTEGERS, ()))
    return LoadedModel(
        name=folder.resolve().name,
        model=llama(config, name=folder.resolve().name),
        params=Params(tree=tree),
        tokenizer=tokenizer or folder_tokenizer(folder),
        chat_template=folder_chat_template(folder),
        special_tokens=folder_special_tokens(folder),
        eos_token_ids=tuple(dict.fromkeys(eos)),
        generation_defaults={name: value for name, value in advice.items() if value is not None},
    )


def read_text(path: Path) -> str:
    """The text in a file.

    Raises:
        ModelLoadError: the file is absent, or not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise ModelLoadError(f"{path} does not exist") from error
    except UnicodeDecodeError as error:
        raise ModelLoadError(
            f"{path}: not UTF-8 from byte {error.start} on ({error.reason}); fetch the file again"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ModelLoadError: the file is absent, or no JSON object.
    """
    text = read_text(path)
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:  # besides its own errors: numbers too long, lists too deep
        raise ModelLoadError(f"{path}: not JSON: {error}; fetch the file again") from error
    if not isinstance(content, dict):
        raise ModelLoadError(f"{path}: holds a {type(content).__name__}, an object is needed")
    return content


def _fields_if_there(path: Path) -> Fields:
    return Fields(read_json(path) if path.is_file() else {}, f"{path}: ")


def _config_dtype(fields: Fields) -> torch.dtype | None:
    key = "torch_dtype" if fields.values.get("dtype") is None else "dtype"
    named = fields.get(key, TEXT, None)
    if named is not None and named not in DTYPES:
        raise fields.refusal(key, f"{', '.join(DTYPES)} are; give one of them with dtype=")
    return None if named is None else DTYPES[named]


def folder_tokenizer(folder: Path) -> Tokenizer | None:
    """The folder's tokenizer, None if it has none."""
    path = folder / "tokenizer.json"
    return tokenizer_from_file(path) if path.is_file() else None


def _token(value: Any) -> str | None:
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _templates(value: Any) -> dict[str, str] | None:
    """Templates by name; one alone is the default."""
    if isinstance(value, str):
        return {"default": value}
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        return None
    return NAMES.parse({str(entry.get("name")): entry.get("template") for entry in value})


TOKEN = Kind("a text, or an object whose content is one,", _token)
TEMPLATES = Kind("a text, or a list of objects with a name and a template,", _templates)


def folder_chat_template(folder: Path) -> str | None:
    """The folder's chat template (the one named default, if there are several), None if it has none."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        return read_text(alone)
    known = _fields_if_there(folder / "tokenizer_config.json")
    return known.get("chat_template", TEMPLATES, {}).get("default")


def folder_special_tokens(folder: Path) -> dict[str, str]:
    """The texts of the tokens that templates know by name: bos_token and its like."""
    known = _fields_if_there(folder / "tokenizer_config.json")
    found = {key: known.get(key, TOKEN, None) for key in SPECIAL_TOKENS}
    return {key: text for key, text in found.items() if text is not None}


def weight_files(folder: Path) -> list[Path]:
    """The folder's safetensors files.

    Raises:
        ModelLoadError: there are none, or one that the index names is absent.
    """
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = _fields_if_there(index).get("weight_map", NAMES)
        files = [folder / name for name in sorted(set(weight_map.values()))]
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
            raise ModelLoadError(f"{path}: truncated or damaged: {error}; fetch it again") from error
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
