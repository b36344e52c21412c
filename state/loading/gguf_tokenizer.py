"""A tokenizer from a GGUF file's metadata."""

from typing import Any

from purestep.pure.errors import ModelLoadError
from purestep.state.loading.tokenizer import Tokenizer, wrap

CONTROL, USER_DEFINED = 3, 4  # token types
# Each is the pattern of the tokenizer.json that the models' makers publish.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")


def gguf_tokenizer(metadata: dict[str, Any], *, source: str) -> Tokenizer:
    """The byte-level BPE tokenizer that the metadata describes.

    Raises:
        ModelLoadError: another kind, or a way of splitting text that is not known here.
    """
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Backend

    kind, split = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise ModelLoadError(
            f"{source}: its tokenizer is of kind {kind!r}; only 'gpt2' can be built from a GGUF file. "
            "Pass tokenizer= the path of the model's tokenizer.json"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=split == "llama-bpe"))
    backend.pre_tokenizer = _pre_tokenizer(split, source)
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    for wanted in (CONTROL, USER_DEFINED):
        chosen = [t for t, kind in zip(tokens, types, strict=True) if kind == wanted]
        added = [AddedToken(token, special=wanted == CONTROL, normalized=False) for token in chosen]
        (backend.add_special_tokens if wanted == CONTROL else backend.add_tokens)(added)
    if metadata.get("tokenizer.ggml.add_bos_token"):
        bos = metadata["tokenizer.ggml.bos_token_id"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return wrap(backend)


def gguf_special_tokens(metadata: dict[str, Any]) -> dict[str, str]:
    """The texts of the tokens that templates know by name: bos_token and its like."""
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for key, name in names.items()}
    return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}


def _pre_tokenizer(split: str | None, source: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if split == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    patterns = {"llama-bpe": LLAMA_3, "qwen2": QWEN_2}
    if split not in patterns:
        raise ModelLoadError(
            f"{source}: its tokenizer splits text in the way {split!r}; known are smollm, llama-bpe, qwen2. "
            "Pass tokenizer= the path of the model's tokenizer.json"
        )
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(patterns[split]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
