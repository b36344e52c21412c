"""A model whose every token can be foretold: the next one is a function of the history that it finds in the cache.

Its KV cache holds token ids. So a block that was shared, copied, padded into or handed out wrongly changes a token.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from purestep.kernels.types import Kernels
from purestep.pure.models.model import KVLayerSpec, Model, Piece
from purestep.pure.records.inputs import AttentionMetadata, ModelInputs
from purestep.pure.records.params import Params
from purestep.pure.records.queue import Request

VOCAB = 11
MODULUS, BASE = 1_000_003, 9_176
MAX_LEN = 64
WEIGHTS = torch.tensor([pow(BASE, place, MODULUS) for place in range(2 * MAX_LEN)])

Carried = tuple[Tensor, ...]


def toy_model(groups: tuple[int, ...] = (0,)) -> tuple[Model, Params]:
    """A model with a layer for each entry of `groups`; the layers must find the same history."""
    layers = tuple(
        Piece(name=f"layers.{i}", function=look_back, layers=(i,), group=group)
        for i, group in enumerate(groups)
    )
    model = Model(
        name="toy",
        pieces=(Piece(name="embed", function=begin), *layers, Piece(name="logits", function=say)),
        head=None,
        kv_layers=tuple(KVLayerSpec(num_kv_heads=1, head_dim=1, group=group) for group in groups),
        vocab_size=VOCAB,
        max_position_embeddings=MAX_LEN,
    )
    return model, Params({"norm": torch.zeros(1, dtype=torch.float64)})


def next_token(history: Sequence[int], banned: Sequence[int] = ()) -> int:
    """What the model likes best after this history; where that is banned, the first id behind it that is not."""
    total = sum((token + 1) * pow(BASE, place, MODULUS) for place, token in enumerate(history)) % MODULUS
    best = total % VOCAB
    return next(token % VOCAB for token in range(best, best + VOCAB) if token % VOCAB not in banned)


def foretold(request: Request, longest: int) -> tuple[tuple[int, ...], str, int | None]:
    """Outputs, finish reason and stop reason of a greedy request that may grow to `longest` tokens."""
    params, outputs = request.sampling_params, list[int]()
    stops = (*params.stop_token_ids, *request.eos_token_ids)
    while True:
        is_short = len(outputs) < params.min_tokens
        outputs.append(next_token((*request.prompt_token_ids, *outputs), stops if is_short else ()))
        if len(outputs) >= params.min_tokens:
            if outputs[-1] in request.eos_token_ids and not params.ignore_eos:
                return tuple(outputs), "stop", None
            if outputs[-1] in params.stop_token_ids:
                return tuple(outputs), "stop", outputs[-1]
        if len(outputs) == params.max_tokens or len(request.prompt_token_ids) + len(outputs) >= longest:
            return tuple(outputs), "length", None


def begin(piece: Piece, weights: Any, carried: Carried, inputs: ModelInputs, *, kernels: Kernels) -> Carried:
    """Nothing is known yet."""
    assert inputs.input_ids is not None
    return (torch.full_like(inputs.input_ids, -1, dtype=torch.int64),)


def look_back(
    piece: Piece,
    weights: Any,
    carried: Carried,
    inputs: ModelInputs,
    kv: tuple[Tensor, ...],
    metadata: AttentionMetadata,
    *,
    kernels: Kernels,
) -> tuple[Carried, tuple[Tensor, ...]]:
    """A hash of each token's history as it lies in the cache; -2 where this layer finds another one than the last."""
    assert inputs.input_ids is not None
    (before,), (cache,), group = carried, kv, metadata.groups[piece.group]
    size, ids = cache.shape[2], inputs.input_ids
    block, offset = group.slot_mapping // size, group.slot_mapping % size
    plane = torch.arange(2)
    values = ids.to(cache.dtype)[:, None, None, None].expand(-1, 2, 1, 1)
    cache = kernels.write(cache, (block[:, None], plane, offset[:, None]), values)
    index, _ = kernels.ragged_index(metadata.query_start_loc, len(ids))
    found = cache[group.block_table.long()][:, :, 0].flatten(1)[index]  # [tokens, places]
    place = torch.arange(found.shape[1])
    seen = (place <= inputs.positions[:, None]) & (place < metadata.seq_lens[index][:, None])
    total = (torch.where(seen, found + 1, 0).to(torch.int64) * WEIGHTS[: len(place)]).sum(-1) % MODULUS
    agrees = (before == -1) | (before == total)
    return (torch.where(agrees, total, -2),), (cache,)


def say(piece: Piece, weights: Any, carried: Carried, inputs: ModelInputs, *, kernels: Kernels) -> Carried:
    """Logits: the best token, then those behind it, in a circle; token 0 for what is no hash."""
    (total,) = carried
    best = torch.where(total < 0, 0, total % VOCAB)
    return (-((torch.arange(VOCAB) - best[:, None]) % VOCAB).to(torch.float64),)
