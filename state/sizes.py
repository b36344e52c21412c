"""How much an engine holds and does at once."""

import attrs
import torch

from purestep.pure.errors import InvalidParameterError, KVCacheConfigError
from purestep.pure.kv_config import FP8, kv_cache_dtype
from purestep.pure.records.dispatch import CUDAGraphMode
from purestep.pure.records.layout import SamplerShape

LEAST = {  # of the sizes that are whole numbers; a prompt and an output need 2 tokens
    "kv_cache_bytes": 1,
    "block_size": 1,
    "max_num_reqs": 1,
    "max_num_batched_tokens": 1,
    "block_horizon": 1,
    "max_model_len": 2,
    "steps_ahead": 0,
}


GREEDY_SHAPE = SamplerShape()
RANDOM_SHAPE = SamplerShape(random=True, truncated=True)
SAMPLERS = (  # what rollouts ask for: the log-probability of each token; and penalties, or a least length
    SamplerShape(random=True, truncated=True, num_logprobs=0, logprobs_modes=("raw_logprobs",)),
    SamplerShape(random=True, truncated=True, penalties=True, min_tokens=True),
)


@attrs.frozen(kw_only=True)
class Sizes:
    """How much an engine holds and does at once. None: as much as model and cache allow."""

    kv_cache_bytes: int | None = None  # None: what gpu_memory_utilization leaves; without a GPU 512 MiB
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory that may be in use, by anybody
    kv_cache_dtype: str = "auto"  # the model's own; or a name of KV_CACHE_DTYPES: fp8 takes a byte a number
    calculate_kv_scales: bool = False  # of fp8: by the first step; else what is beyond 448 is cut off there
    block_size: int = 16
    max_model_len: int | None = None
    max_num_reqs: int = 64
    max_num_batched_tokens: int = 2048
    enable_prefix_caching: bool = True
    block_horizon: int = 64  # tokens that running requests are given blocks for ahead of time
    steps_ahead: int | None = (
        None  # steps begun before the last one's tokens are known; None: 1 on a GPU, else 0
    )
    cudagraph_mode: CUDAGraphMode = CUDAGraphMode.FULL_DECODE_ONLY  # on a GPU
    capture_sizes: tuple[int, ...] | None = None  # numbers of tokens; None: up to max_num_reqs
    capture_samplers: tuple[SamplerShape, ...] = SAMPLERS  # beside greedy and random sampling
    capture_halves: bool = False  # graphs of half steps too: where requests have grammars or processors
    capture_progress: bool = True  # a bar while graphs are captured

    def __attrs_post_init__(self) -> None:
        for name, least in LEAST.items():
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < least):
                raise InvalidParameterError(f"{name}={value!r}: it must be a whole number, at least {least}")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise InvalidParameterError(
                f"gpu_memory_utilization={self.gpu_memory_utilization}: it is a share, above 0 and at most 1"
            )
        try:
            has_scales = kv_cache_dtype(self.kv_cache_dtype, torch.float32) == FP8
        except KVCacheConfigError as error:
            raise InvalidParameterError(str(error)) from error
        if self.calculate_kv_scales and not has_scales:
            raise InvalidParameterError(
                f"calculate_kv_scales with kv_cache_dtype={self.kv_cache_dtype!r}: only 'fp8' is stored by scales; ask "
                "for that type, or for no scales"
            )
