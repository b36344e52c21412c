"""The two ends of a step: its inputs out of the state, and the state once its tokens are known.

`ledger` is packed device state, int32 [columns, rows]: of every row the numbers of computed tokens, of known tokens
and of output tokens, the length limit, whether it is active, whether its logits were NaN once, and the steps taken.
Its last row is nobody's; padding runs it, idle.
"""

import torch
from torch import Tensor

from purestep.kernels.types import Kernels

COMPUTED, KNOWN, OUTPUTS, LIMIT, ACTIVE, HAS_NAN, STEP = range(7)


def lay_out(
    kernels: Kernels,
    row_of_index: Tensor,
    query_start_loc: Tensor,
    ledger: Tensor,
    token_ids: Tensor,
    block_tables: tuple[Tensor, ...],
    room: Tensor,
    *,
    block_sizes: tuple[int, ...],
    num_tokens: int,
    max_seq_len: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """What a step reads, from which rows run (row_of_index int32 [reqs]) and where their tokens lie.

    query_start_loc int32 [reqs+1]; token_ids int32 [rows, positions]; block_tables, one a group, int32 [rows,
    blocks]; room int32 [rows], tokens that each row's blocks can hold. A token's position is its row's computed length
    plus its place in the request. A row runs idle if it is not active, or if its length after the step would be more
    than its known tokens, its room or max_seq_len. Returns

        input_ids int32 [tokens], positions int64 [tokens],
        slot_mapping int64 [groups, tokens], in block 0 for padding and for rows that run idle,
        seq_lens int32 [reqs] after the step, 0 for rows that run idle,
        logits_indices int32 [reqs], each request's last token, and
        discard bool [reqs], for rows that run idle or whose known tokens will not all be computed.
    """
    index, offset = kernels.ragged_index(query_start_loc, num_tokens)
    row = row_of_index[index]
    position = (ledger[COMPUTED][row] + offset).clamp(max=token_ids.shape[1] - 1)
    token = torch.arange(num_tokens, device=query_start_loc.device)
    end, known = ledger[COMPUTED][row_of_index] + query_start_loc.diff(), ledger[KNOWN][row_of_index]
    most = torch.minimum(known, room[row_of_index]).clamp(max=max_seq_len)
    runs = (ledger[ACTIVE][row_of_index] > 0) & (end <= most)
    writes = runs[index] & (token < query_start_loc[-1])
    return (
        token_ids[row, position],
        position,
        slots(block_tables, block_sizes, row, position, writes),
        torch.where(runs, end, 0).to(torch.int32),
        (query_start_loc[1:] - 1).clamp(min=0),
        ~runs | (end < known),
    )


def slots(
    block_tables: tuple[Tensor, ...],
    block_sizes: tuple[int, ...],
    row: Tensor,
    position: Tensor,
    writes: Tensor,
) -> Tensor:
    """Where the keys and values of tokens go, per KV group: int64 [groups, tokens], in block 0 if it writes none."""
    found = []
    for table, size in zip(block_tables, block_sizes, strict=True):
        place = torch.clamp(position // size, max=table.shape[1] - 1)
        block = torch.where(writes, table[row, place], 0)
        found.append(block.to(torch.int64) * size + position % size)
    return torch.stack(found)


def advance(
    kernels: Kernels,
    ledger: Tensor,
    token_ids: Tensor,
    row_of_index: Tensor,
    seq_lens: Tensor,
    discard: Tensor,
    sampled: Tensor,
    stops: Tensor,
    has_nan: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The ledger and token_ids [rows, positions] after a step. Donates both.

    Of each request [reqs]: its row, its length after the step or 0 if it ran idle, whether its token is to be dropped,
    the token `sampled`, whether that stops it, whether its logits were NaN. A token is kept (appended and counted) if
    its row ran, it is not to be dropped and the logits were numbers. A row is active no longer after NaN, a token that
    stops it, or one that brings it to its limit; one that ran idle stays as it is. Returns the ledger, token_ids, and
    [reqs] each: the kept tokens, -1 for none; computed lengths; whether the row goes on; whether its logits were NaN
    now.
    """
    active = ledger[ACTIVE][row_of_index] > 0
    runs = active & (seq_lens > 0)
    has_nan = runs & has_nan
    kept = runs & ~discard & ~has_nan
    computed = torch.where(runs, seq_lens, ledger[COMPUTED][row_of_index])
    known, limit = ledger[KNOWN][row_of_index], ledger[LIMIT][row_of_index]
    stays = active & ~has_nan & ~(kept & (stops | (known + 1 >= limit)))
    counted = kept.to(torch.int32)
    changed = torch.stack(
        [
            computed,
            known + counted,
            ledger[OUTPUTS][row_of_index] + counted,
            limit,
            stays.to(torch.int32),
            ((ledger[HAS_NAN][row_of_index] > 0) | has_nan).to(torch.int32),
        ]
    )
    columns = torch.arange(len(changed), device=row_of_index.device)[:, None]
    table = kernels.write(ledger, (columns, row_of_index[None, :]), changed)
    table = kernels.write(table, (columns.new_full((), STEP),), ledger[STEP] + 1)
    # A token that is not kept is written where the last row begins, which nothing reads.
    place = torch.where(kept, known, 0)
    row = torch.where(kept, row_of_index, ledger.shape[1] - 1)
    token_ids = kernels.write(token_ids, (row, place), sampled)
    return table, token_ids, torch.where(kept, sampled, -1), computed, stays, has_nan
