"""An engine whose tokens can be read, forms of text, and what each request gets alone."""

import json
import re
from functools import cache
from typing import Any

from purestep.pure.models.initialize import random_params
from purestep.pure.record import replace
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine
from purestep.state.loading.loaded import LoadedModel
from purestep.state.results import RequestOutput
from tests.bugs.tiny_engine import CONFIG, MODEL, Tokens, drained
from tests.grammars import EOS, small_tokenizer

VOCAB = MODEL.vocab_size
TOKENIZER = small_tokenizer()
LOADED = LoadedModel(
    "tiny", MODEL, random_params(CONFIG, seed=1, std=0.5), tokenizer=TOKENIZER, eos_token_ids=(EOS,)
)
SCHEMA = {
    "type": "object",
    "properties": {"ab": {"type": "integer"}, "no": {"type": "boolean"}},
    "required": ["ab"],
    "additionalProperties": False,
}
REGEX = r"(ab|cab)+[0-9]{2,4}"
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)
DRAWN = SamplingParams(seed=3, max_tokens=14, logprobs=1)
FORMS: dict[str, Any] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": REGEX},
    "choice": {"choice": ["null:null,", 'ab":c12', "ééé.", "no\n\nno\n"]},
    "grammar": {"grammar": 'root ::= "{" root "}" | "{{ef}}"'},
}
PLAIN = replace(GREEDY, max_tokens=6)
PROMPT: Tokens = (5, 9, 2, 7, 30)


def engine(**changes: Any) -> Engine:
    sizes = {"kv_cache_bytes": 40 * 1024, "block_size": 4, "max_model_len": 48, "max_num_reqs": 8}
    return Engine(LOADED, **(sizes | changes))


def shaped(form: str, params: SamplingParams = GREEDY) -> SamplingParams:
    return replace(params, structured_outputs=FORMS[form])


def is_allowed(form: str, text: str) -> bool:
    """Whether a whole text is one of the form's, by other means than xgrammar."""
    if form == "json":
        value = json.loads(text)
        types = {"ab": int, "no": bool}
        return "ab" in value and all(type(own) is types[name] for name, own in value.items())
    if form == "regex":
        return re.fullmatch(REGEX, text) is not None
    if form == "choice":
        return text in FORMS["choice"]["choice"]
    return re.fullmatch(r"(\{*)ef(\}*)", text) is not None and text.count("{") == text.count("}")


@cache
def alone(prompt: Tokens, params: SamplingParams) -> RequestOutput:
    with engine() as own:
        own.add_request("r", prompt, params, stream=0)
        return drained(own)["r"]
