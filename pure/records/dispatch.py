"""How a batch is run: CUDA graph modes, the graphs that exist, and the choice made for one batch."""

from collections.abc import Mapping
from enum import Enum, IntEnum

from purestep.kernels.record import record
from purestep.pure.records.inputs import BatchDescriptor


class CUDAGraphMode(Enum):
    """Whether graphs are replayed, and whose. A batch runs in one of the first three; the pairs are configuration.

    A pair names the mode of uniform decode batches first and that of all others second.
    Source: vllm/config/compilation.py CUDAGraphMode.
    """

    NONE = 0
    PIECEWISE = 1  # one graph per piece of the model; attention runs eagerly between them
    FULL = 2  # one graph around everything
    FULL_DECODE_ONLY = (FULL, NONE)
    FULL_AND_PIECEWISE = (FULL, PIECEWISE)

    @property
    def decode_mode(self) -> "CUDAGraphMode":
        """The mode of uniform decode batches."""
        return CUDAGraphMode(self.value[0]) if isinstance(self.value, tuple) else self

    @property
    def mixed_mode(self) -> "CUDAGraphMode":
        """The mode of all other batches."""
        return CUDAGraphMode(self.value[1]) if isinstance(self.value, tuple) else self

    @property
    def separate_routine(self) -> bool:
        """Whether uniform decode batches have graphs of their own."""
        return isinstance(self.value, tuple)

    def has_mode(self, mode: "CUDAGraphMode") -> bool:
        """Whether some batches run in `mode`, one of the first three."""
        return mode in (self.decode_mode, self.mixed_mode)

    def __bool__(self) -> bool:
        return self is not CUDAGraphMode.NONE


class AttentionCGSupport(IntEnum):
    """Which batches attention kernels can run inside a full graph; each level includes those below it.

    Source: vllm/v1/attention/backend.py AttentionCGSupport.
    """

    NEVER = 0
    UNIFORM_SINGLE_TOKEN_DECODE = 1  # one token a request
    UNIFORM_BATCH = 2  # equally many tokens a request
    ALWAYS = 3


@record(static=True)
class LoRACapture:
    """For how many active adapters graphs are captured."""

    max_loras: int
    cudagraph_specialize_lora: bool = True  # graphs without any adapter beside those with
    specialize_active_lora: bool = False  # graphs for powers of two of them beside the one for all


@record(static=True)
class DispatchConfig:
    """What graphs are to be captured for."""

    capture_sizes: tuple[int, ...]  # numbers of tokens, ascending
    max_num_reqs: int
    lora: LoRACapture | None = None
    compile_sizes: tuple[int, ...] = ()  # numbers of tokens with code of their own, which must not be padded
    max_capture_size: int | None = None  # None: the last capture size

    @property
    def largest_size(self) -> int:
        """The most tokens that a graph may hold; 0: there are no graphs."""
        if self.max_capture_size is not None:
            return self.max_capture_size
        return self.capture_sizes[-1] if self.capture_sizes else 0


@record
class DispatchKeys:
    """Every graph that is captured, by what is known of a batch; made by `dispatch_keys`."""

    mode: CUDAGraphMode
    config: DispatchConfig
    uniform_query_len: int  # tokens of each request in a uniform decode batch: 1 and the number of drafts
    pad_table: tuple[int, ...]  # by number of tokens
    lora_cases: tuple[int, ...]  # by number of active adapters: how many the graph is captured for
    piecewise: Mapping[tuple[int, int], BatchDescriptor]  # by padded tokens and adapters
    full: Mapping[tuple[int, bool, int], BatchDescriptor]  # by padded tokens, uniform, adapters


@record(static=True)
class Coordination:
    """What data-parallel ranks agreed on for one step. Without counts, every rank keeps its own choice."""

    cudagraph_mode: CUDAGraphMode
    should_ubatch: bool = False
    num_tokens_across_dp: tuple[int, ...] | None = None  # padded tokens of each rank
    rank: int = 0  # whose count is ours


@record(static=True)
class BatchExecution:
    """How one batch is run, and to what it is padded."""

    cudagraph_mode: CUDAGraphMode
    descriptor: BatchDescriptor
    num_tokens: int  # before padding
    num_reqs: int  # after padding
    should_ubatch: bool = False
    num_tokens_across_dp: tuple[int, ...] | None = None

    @property
    def num_paddings(self) -> int:
        """Tokens that run for nothing."""
        return self.descriptor.num_tokens - self.num_tokens
