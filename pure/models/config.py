"""What a dense decoder of the Llama family is, as plain values."""

from purestep.kernels.record import record
from purestep.pure.errors import InvalidParameterError


@record(static=True)
class RopeScaling:
    """Llama 3's slowing of the low rotary frequencies. Source: transformers' `llama3` rope type."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@record(static=True)
class RopeConfig:
    """Rotary position embedding over the whole head."""

    theta: float = 10000.0
    scaling: RopeScaling | None = None


@record(static=True)
class AttentionConfig:
    """The shape of attention; the same in every layer but for the window."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    qkv_bias: bool = False
    out_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head's query and key, before rotation
    # one entry a layer, at least 1; None sees everything
    sliding_window: tuple[int | None, ...] | None = None

    def __attrs_post_init__(self) -> None:
        if any(window is not None and window < 1 for window in self.sliding_window or ()):
            raise InvalidParameterError(
                f"sliding_window={self.sliding_window}: a query sees itself at least, so 1 is the least; None sees all"
            )

    def window_of(self, layer: int) -> int | None:
        """How many positions a query of `layer` sees, itself included; None: all before it."""
        return None if self.sliding_window is None else self.sliding_window[layer]


@record(static=True)
class ModelConfig:
    """A dense decoder of the Llama family."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    attention: AttentionConfig
    rope: RopeConfig
    rms_norm_eps: float
    tied_embeddings: bool
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...] = ()
