"""What one forward pass reads, and what it is made of."""

from jaxtyping import Bool, Float, Int
from torch import Tensor

from purestep.kernels.record import record, static


@record
class StepInputs:
    """What one forward pass reads: the batch's query tokens laid end to end."""

    input_ids: Int[Tensor, " tokens"]
    positions: Int[Tensor, " tokens"]  # place of each token in its request's history
    slot_mapping: Int[Tensor, "groups tokens"]  # int64; where a token's KV goes; for padding the null block
    seq_lens: Int[Tensor, " reqs"]  # tokens in the cache after this pass; 0 for rows that run idle
    query_start_loc: Int[Tensor, " reqs+1"]
    logits_indices: Int[Tensor, " logits"]  # the tokens whose logits are wanted
    discard: Bool[Tensor, " reqs"]  # the row's history is not fully computed yet: its sample is not kept
    drafts: Int[Tensor, "reqs drafts"] | None = None  # those that are verified, -1 behind a request's last


@record
class GroupMetadata:
    """Where one KV group's layers find and put keys and values."""

    block_table: Int[Tensor, "reqs blocks"]
    slot_mapping: Int[Tensor, " tokens"]


@record
class AttentionMetadata:
    """What attention needs beside q, k, v and the cache; one entry of `groups` per KV group."""

    seq_lens: Int[Tensor, " reqs"]
    query_start_loc: Int[Tensor, " reqs+1"]
    groups: tuple[GroupMetadata, ...]
    max_query_len: int = static()  # bounds for shapes, never for results
    max_seq_len: int = static()
    kv_scales: Float[Tensor, "layers 2"] | None = None  # as in StepState

    def scales_of(self, layer: int) -> Float[Tensor, "2"] | None:
        """The scales of a layer's keys and values, as `attend` takes them."""
        return None if self.kv_scales is None else self.kv_scales[layer]


@record
class ModelInputs:
    """What `preprocess` hands to the model: token ids or embeddings, never both."""

    input_ids: Int[Tensor, " tokens"] | None
    positions: Int[Tensor, " tokens"]
    inputs_embeds: Tensor | None = None
    intermediate: "IntermediateTensors | None" = None
    wanted: Int[Tensor, " wanted"] | None = None  # the tokens whose hidden states are asked for; None: all


@record
class IntermediateTensors:
    """Named activations on their way between pipeline stages (usually hidden_states and residual).

    Source: vllm/sequence.py.
    """

    tensors: dict[str, Tensor]

    def __getitem__(self, rows: slice) -> "IntermediateTensors":
        """These rows of every one of them."""
        return IntermediateTensors({name: tensor[rows] for name, tensor in self.tensors.items()})


@record(static=True)
class BatchDescriptor:
    """The shape that a captured graph was made for. Source: vllm/forward_context.py."""

    num_tokens: int
    num_reqs: int | None = None  # None: any
    uniform: bool = False
    has_lora: bool = False
    num_active_loras: int = 0
