"""`Sizes`: how much an engine holds and does at once, judged when it is said."""

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any

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
    "unroll": 1,
}
FLAGS = ("enable_prefix_caching", "calculate_kv_scales", "capture_halves", "capture_progress")

GREEDY_SHAPE = SamplerShape()
RANDOM_SHAPE = SamplerShape(random=True, truncated=True)
SAMPLERS = (  # what rollouts ask for: the log-probability of each token; and penalties, or a least length
    SamplerShape(random=True, truncated=True, num_logprobs=0, logprobs_modes=("raw_logprobs",)),
    SamplerShape(random=True, truncated=True, penalties=True, min_tokens=True),
)


def as_cudagraph_mode(mode: Any) -> CUDAGraphMode | None:
    """The mode, which its name may stand for.

    Raises: InvalidParameterError for what is neither.
    """
    if isinstance(mode, str) and mode in CUDAGraphMode.__members__:
        return CUDAGraphMode[mode]
    if mode is None or isinstance(mode, CUDAGraphMode):
        return mode
    names = ", ".join(CUDAGraphMode.__members__)
    raise InvalidParameterError(f"cudagraph_mode={mode!r}: give a CUDAGraphMode or its name: {names}")


UNROLL = 4  # steps of a launch on a GPU
UNROLLED_REQS = 16  # in graphs of several steps: a step of more takes longer than what one more launch does


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
    unroll: int | None = (
        None  # decode steps in one replay where nobody waits; tokens come so many at a time; None: 4 on a GPU, else 1
    )
    cudagraph_mode: CUDAGraphMode | None = (
        attrs.field(  # its name will do; None: FULL_DECODE_ONLY where graphs are
            default=None, converter=as_cudagraph_mode
        )
    )
    capture_sizes: tuple[int, ...] | None = None  # numbers of tokens; None: up to max_num_reqs
    capture_samplers: tuple[SamplerShape, ...] = SAMPLERS  # beside greedy and random sampling
    capture_halves: bool = False  # graphs of half steps too: where requests have grammars or processors
    capture_progress: bool = True  # a bar while graphs are captured

    def __attrs_post_init__(self) -> None:
        for name, least in LEAST.items():
            value, default = getattr(self, name), getattr(attrs.fields(Sizes), name).default
            if not (value is default is None or (type(value) is int and value >= least)):
                raise InvalidParameterError(f"{name}={value!r}: it must be a whole number, at least {least}")
        for name in FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameterError(f"{name}={getattr(self, name)!r}: it must be True or False")
        samplers = self.capture_samplers
        if not isinstance(samplers, tuple) or not all(isinstance(shape, SamplerShape) for shape in samplers):
            raise InvalidParameterError(f"capture_samplers={samplers!r}: give a tuple of SamplerShape")
        share, sizes = self.gpu_memory_utilization, self.capture_sizes
        if not isinstance(share, int | float) or not 0 < share <= 1:
            raise InvalidParameterError(
                f"gpu_memory_utilization={share!r}: it is a share, above 0 and at most 1"
            )
        if sizes is not None and not (
            isinstance(sizes, tuple) and all(type(n) is int and n > 0 for n in sizes)
        ):
            raise InvalidParameterError(
                f"capture_sizes={sizes!r}: give a tuple of numbers of tokens, whole and ascending, or None"
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


def sizes_of(settings: Mapping[str, Any]) -> Sizes:
    """The sizes with these settings.

    Raises:
        InvalidParameterError: a name that is none of them, with the one that may be meant.
    """
    names = [field.name for field in attrs.fields(Sizes)]
    for name in settings:
        if name not in names:
            near = get_close_matches(name, names, n=1)
            hint = f"did you mean {near[0]}?" if near else f"they are {', '.join(names)}"
            raise InvalidParameterError(f"{name}={settings[name]!r}: an engine has no such setting; {hint}")
    return Sizes(**settings)
