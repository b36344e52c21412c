"""A tokenizer from a GGUF file's metadata."""

from typing import Any

from purestep.pure.errors import ModelLoadError
from purestep.state.loading.fields import FLAG, INTEGERS, TEXT, TEXTS, Fields, integer
from purestep.state.loading.tokenizer import Tokenizer, wrap

CONTROL, USER_DEFINED = 3, 4  # token types
# Each is the pattern of the tokenizer.json that the models' makers publish.
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_2 = LLAMA_3.replace(r"\p{N}{1,3}", r"\p{N}")
REMEDY = "pass tokenizer= the path of the model's tokenizer.json"


def gguf_tokenizer(fields: Fields) -> Tokenizer:
    """The byte-level BPE tokenizer that the metadata describes.

    Raises:
        ModelLoadError: another kind, a way of splitting text that is not known here, or tokens that make no tokenizer.
    """
    if fields.get("tokenizer.ggml.model", TEXT, None) != "gpt2":
        raise fields.refusal("tokenizer.ggml.model", f"only 'gpt2' can be built from a GGUF file; {REMEDY}")
    try:
        return wrap(_backend(fields))
    except ModelLoadError:
        raise
    except Exception as error:  # tokenizers raises bare Exception, and others
        reason = " ".join(str(error).split())
        raise ModelLoadError(
            f"{fields.place}tokenizer.ggml: the tokenizers package can not build it: {reason}; {REMEDY}"
        ) from error


def _backend(fields: Fields) -> Any:
    from tokenizers import AddedToken, decoders, models, normalizers, processors
    from tokenizers import Tokenizer as Backend

    split = fields.get("tokenizer.ggml.pre", TEXT, None)
    tokens = fields.get("tokenizer.ggml.tokens", TEXTS)
    types = fields.get("tokenizer.ggml.token_type", INTEGERS, (1,) * len(tokens))
    if len(types) != len(tokens):
        raise fields.refusal("tokenizer.ggml.token_type", f"one is needed for each of {len(tokens)} tokens")
    pairs = (merge.partition(" ") for merge in fields.get("tokenizer.ggml.merges", TEXTS))
    merges = [(left, right) for left, _, right in pairs]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocab, merges=merges, ignore_merges=split == "llama-bpe"))
    backend.pre_tokenizer = _pre_tokenizer(fields)
    if split == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    for wanted in (CONTROL, USER_DEFINED):
        chosen = [t for t, kind in zip(tokens, types, strict=True) if kind == wanted]
        added = [AddedToken(token, special=wanted == CONTROL, normalized=False) for token in chosen]
        (backend.add_special_tokens if wanted == CONTROL else backend.add_tokens)(added)
    if fields.get("tokenizer.ggml.add_bos_token", FLAG, False):
        bos = fields.get("tokenizer.ggml.bos_token_id", integer(least=0, most=len(tokens) - 1))
        backend.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]} $A", special_tokens=[(tokens[bos], bos)]
        )
    return backend


def gguf_special_tokens(fields: Fields) -> dict[str, str]:
    """The texts of the tokens that templates know by name: bos_token and its like.

    Raises:
        ModelLoadError: an id that is no whole number.
    """
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    tokens = fields.get("tokenizer.ggml.tokens", TEXTS, ())
    ids = {
        name: fields.get(f"tokenizer.ggml.{key}_token_id", integer(least=0, most=2**32 - 1), None)
        for key, name in names.items()
    }
    return {name: tokens[i] for name, i in ids.items() if i is not None and i < len(tokens)}


def _pre_tokenizer(fields: Fields) -> Any:
    from tokenizers import Regex, pre_tokenizers

    split = fields.get("tokenizer.ggml.pre", TEXT, None)
    if split == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    patterns = {"llama-bpe": LLAMA_3, "qwen2": QWEN_2}
    if split not in patterns:
        raise fields.refusal("tokenizer.ggml.pre", f"smollm, llama-bpe and qwen2 are known; {REMEDY}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(patterns[split]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
