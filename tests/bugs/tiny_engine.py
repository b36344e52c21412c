"""A tiny engine for re-told failures. It is given this module's `donating`, so that a mutant can take its place."""

from typing import Any

from purestep.kernels.donating import donating
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine
from purestep.state.loading.loaded import LoadedModel
from purestep.state.results import RequestOutput

CONFIG = tiny_config()
MODEL = llama(CONFIG)
PARAMS = random_params(CONFIG, seed=1, std=0.5)
GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
BLOCK_SIZE = 4

Tokens = tuple[int, ...]


def engine(*, params: Params = PARAMS, eos_token_ids: Tokens = (), **changes: Any) -> Engine:
    """Blocks of 4 tokens, 39 of them."""
    loaded = LoadedModel("tiny", MODEL, params, eos_token_ids=eos_token_ids)
    sizes = {
        "kv_cache_bytes": 40 * 1024,
        "block_size": BLOCK_SIZE,
        "max_model_len": 48,
        "max_num_reqs": 8,
        "kernels": donating,
    }
    return Engine(loaded, **(sizes | changes))


def alone(prompt: Tokens, sampling_params: SamplingParams, **changes: Any) -> RequestOutput:
    """What a prompt gets in an engine of its own."""
    with engine(**changes) as own:
        return own.generate(prompt, sampling_params, progress=False)[0]


def drained(own: Engine) -> dict[str, RequestOutput]:
    """The results of everything that was submitted."""
    results = {}
    while own.has_unfinished():
        results |= {output.req_id: output for output in own.step()}
    return results
