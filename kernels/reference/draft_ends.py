"""The two ends of a step that verifies drafts; the ledger's columns are those of `ends`.

A request with n drafts runs its last known token and those, and gets 1 to n + 1 tokens.
"""

import torch
from torch import Tensor

from purestep.kernels.reference.ends import ACTIVE, COMPUTED, HAS_NAN, KNOWN, LIMIT, OUTPUTS, STEP, slots
from purestep.kernels.types import Kernels


def lay_out_drafts(
    kernels: Kernels,
    row_of_index: Tensor,
    query_start_loc: Tensor,
    ledger: Tensor,
    drafts: Tensor,
    token_ids: Tensor,
    block_tables: tuple[Tensor, ...],
    room: Tensor,
    *,
    block_sizes: tuple[int, ...],
    num_tokens: int,
    max_seq_len: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`lay_out` where a row's known tokens may be followed by drafts, int32 [rows, k], -1 behind a row's last.

    A request verifies as many drafts as its row has, its query tokens reach, and its room and max_seq_len leave. What
    it has been given beyond them runs nothing: the tokens of later requests move up, and padding is at the end. A row
    runs idle if it is not active, or if its length after the step would be more than its known tokens and k, or, but
    for drafts, more than its room or max_seq_len. Returns input_ids, positions and slot_mapping of `lay_out`, then

        query_start_loc int32 [reqs+1] of what runs,
        seq_lens int32 [reqs] after the step, drafts included, 0 for rows that run idle,
        logits_indices int64 [reqs * (k+1)]: of each request its last known token and its drafts, the last one repeated,
        discard bool [reqs], as `lay_out`, and
        the drafts that are verified, int32 [reqs, k], -1 behind a request's last.
    """
    own, num_places = drafts[row_of_index], drafts.shape[1]
    computed, known = ledger[COMPUTED][row_of_index], ledger[KNOWN][row_of_index]
    asked = computed + query_start_loc.diff()
    most = room[row_of_index].clamp(max=max_seq_len)
    given = (own >= 0).to(torch.int32).cumprod(-1).sum(-1)
    count = torch.minimum(torch.minimum(asked, most) - known, given).clamp(min=0)
    end = torch.minimum(asked, known + count)
    runs = (ledger[ACTIVE][row_of_index] > 0) & (asked <= known + num_places) & (end <= most)
    count = torch.where(runs, count, 0)

    lens = torch.where(runs, end - computed, query_start_loc.diff())
    starts = torch.nn.functional.pad(lens.cumsum(0), (1, 0)).to(torch.int32)
    index, offset = kernels.ragged_index(starts, num_tokens)
    row = row_of_index[index]
    position = (computed[index] + offset).clamp(max=token_ids.shape[1] - 1)
    guess = position - known[index]
    is_draft = (guess >= 0) & (guess < count[index])
    draft = own[index, guess.clamp(0, num_places - 1)]
    token = torch.arange(num_tokens, device=query_start_loc.device)
    writes = runs[index] & (token < starts[-1])
    place = torch.arange(num_places + 1, device=query_start_loc.device)
    behind = (count[:, None] - place).clamp(min=0)  # tokens behind the one whose logits are wanted
    return (
        torch.where(is_draft, draft, token_ids[row, position]),
        position,
        slots(block_tables, block_sizes, row, position, writes),
        starts,
        torch.where(runs, end, 0).to(torch.int32),
        (starts[1:, None] - 1 - behind).clamp(min=0).flatten().to(torch.int64),
        ~runs | (end < known),
        torch.where(place[:-1] < count[:, None], own, -1),
    )


def advance_drafts(
    kernels: Kernels,
    ledger: Tensor,
    drafts: Tensor,
    token_ids: Tensor,
    row_of_index: Tensor,
    seq_lens: Tensor,
    discard: Tensor,
    sampled: Tensor,
    stops: Tensor,
    has_nan: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`advance` with several tokens a request: `sampled` int32 [reqs, width], -1 behind the last, `stops` likewise.

    All of them but the last are drafts that were found right, so that their keys and values are in the cache. They are
    kept up to the first one that stops the row or brings it to its limit. NaN, unless tokens end before it, stands
    where the token behind the last would be. The drafts int32 [rows, width - 1] of a row that keeps a token are gone:
    what they guessed is known. Returns the ledger, the drafts, and all else as `advance`; kept tokens are
    [reqs, width], -1 behind the last. Donates ledger, drafts and token_ids.
    """
    active = ledger[ACTIVE][row_of_index] > 0
    runs = active & (seq_lens > 0)
    known, limit = ledger[KNOWN][row_of_index], ledger[LIMIT][row_of_index]
    place = torch.arange(sampled.shape[1], device=sampled.device)
    exists = (runs & ~discard)[:, None] & (sampled >= 0)
    ends = exists & (stops | (known[:, None] + place + 1 >= limit[:, None]))
    num_ends = ends.to(torch.int32).cumsum(-1)
    kept = exists & (num_ends - ends.to(torch.int32) == 0)
    ended = num_ends[:, -1] > 0
    has_nan = runs & has_nan & ~ended
    count = kept.to(torch.int32).sum(-1, dtype=torch.int32)
    # The last kept token is not computed; where NaN took its place, every known one is.
    told = torch.where(discard, seq_lens, known + count - 1 + has_nan.to(torch.int32))
    computed = torch.where(runs, told, ledger[COMPUTED][row_of_index]).to(torch.int32)
    stays = active & ~has_nan & ~ended
    changed = torch.stack(
        [
            computed,
            known + count,
            ledger[OUTPUTS][row_of_index] + count,
            limit,
            stays.to(torch.int32),
            ((ledger[HAS_NAN][row_of_index] > 0) | has_nan).to(torch.int32),
        ]
    )
    columns = torch.arange(len(changed), device=row_of_index.device)[:, None]
    table = kernels.write(ledger, (columns, row_of_index[None, :]), changed)
    table = kernels.write(table, (columns.new_full((), STEP),), ledger[STEP] + 1)
    # A token that is not kept is written where the last row begins, which nothing reads.
    position = torch.where(kept, known[:, None] + place, 0)
    row = torch.where(kept, row_of_index[:, None], ledger.shape[1] - 1)
    token_ids = kernels.write(token_ids, (row, position), torch.where(kept, sampled, 0))
    left = torch.where(kept[:, :1], -1, drafts[row_of_index])
    drafts = kernels.write(drafts, (row_of_index,), left)
    return table, drafts, token_ids, torch.where(kept, sampled, -1), computed, stays, has_nan


def put_drafts(
    kernels: Kernels,
    ledger: Tensor,
    drafts: Tensor,
    row_of_index: Tensor,
    seq_lens: Tensor,
    sampled: Tensor,
    proposed: Tensor,
    *,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """The drafts int32 [rows, k] with those of a step's requests, and the latter int32 [reqs, k], -1 behind the last.

    They are `proposed` int [reqs, k] up to the first that is none (below 0) or one too many: a request that has kept a
    token (sampled int32 [reqs, width], -1 where it has none) may have one draft fewer than it may still say, by its
    limit in the ledger and by `longest`, the tokens that a tape holds. Others get none. A row that ran idle, with
    seq_lens 0, keeps what it has. Donates drafts.
    """
    limit = ledger[LIMIT][row_of_index].clamp(max=longest)
    budget = limit - ledger[KNOWN][row_of_index] - 1
    place = torch.arange(drafts.shape[1], device=drafts.device)
    stands = (proposed >= 0) & (place < budget[:, None]) & (sampled[:, :1] >= 0)
    told = torch.where(stands.to(torch.int32).cumprod(-1) > 0, proposed, -1).to(torch.int32)
    written = torch.where(seq_lens[:, None] == 0, drafts[row_of_index], told)
    return kernels.write(drafts, (row_of_index,), written), told
