"""What the host-written leaves of a state must hold for a batch, worked out without `plan_step`."""

from collections.abc import Iterable

import torch
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.pure.absorb import absorb
from purestep.pure.initial import initial_state
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import CachedRequestState, InputBatch
from purestep.pure.records.sampling_rows import MAX_STOP_IDS, TokenConstraints, packed_row, stop_ids_of
from purestep.pure.records.state import NUM_HOST_COLUMNS, StepState
from tests.schedules import LIMITS
from tests.tiny import tiny_llama

MODEL, _ = tiny_llama(groups=(0, 1))
EMPTY = InputBatch.make_empty(LIMITS)

Rule = tuple[object, ...]


def initial() -> StepState:
    """The state that reflects no request."""
    return initial_state(MODEL, LIMITS)


def absorbed(state: StepState, batch: InputBatch, base: InputBatch) -> StepState:
    """The state after the plan from `base`, which it reflects, to `batch`."""
    return absorb(replace(state, inbox=plan_step(batch, base).inbox.to("cpu")), kernels=reference)


def reflecting(batch: InputBatch) -> StepState:
    """A fresh state that reflects `batch`."""
    return absorbed(initial(), batch, EMPTY)


def requests(batch: InputBatch) -> dict[int, CachedRequestState]:
    """Who sits where."""
    return {row: request for row, request in enumerate(batch.rows.requests) if request is not None}


def assert_layout(state: StepState, batch: InputBatch) -> None:
    """The batch's own layout, to the last bound."""
    layout = batch.layout
    assert state.layout.row_of_index.tolist() == layout.row_of_index.tolist()
    assert state.layout.query_start_loc.tolist() == layout.query_start_loc.tolist()
    assert state.layout.bounds == layout.bounds


def assert_shared_leaves(state: StepState, batch: InputBatch) -> None:
    """Block tables, sampling rows, sparse rules and layout: what the host alone decides."""
    assert_layout(state, batch)
    for table, tapes in zip(state.block_tables, batch.rows.block_ids, strict=True):
        for row in requests(batch):
            assert table[row, : len(tapes[row])].tolist() == tapes[row].tolist()  # type: ignore[arg-type, union-attr]
    for row, request in requests(batch).items():
        assert state.room[row] == min(int(batch.columns.room[row]), batch.limits.max_model_len)
        bits = state.sampling.floats[row].view(torch.int32).tolist()
        assert bits + state.sampling.table[row].tolist() == sampling_row(request)
    assert rules_of(state.sampling.constraints) == expected_rules(batch)


def assert_admitted(state: StepState, batch: InputBatch, rows: Iterable[int]) -> None:
    """These rows of ledger and tokens say what the host knows: they were written anew."""
    columns = batch.columns
    for row in rows:
        request, tokens = batch.rows.requests[row], batch.rows.tokens[row]
        assert request is not None and tokens is not None
        params, prompt = request.sampling_params, request.num_prompt_tokens
        longest = LIMITS.max_model_len
        limit = longest if params.max_tokens is None else min(prompt + params.max_tokens, longest)
        computed = int(columns.num_computed_tokens_settled[row])
        expected = [computed, len(tokens), len(tokens) - prompt, limit, len(tokens) < limit, 0]
        assert state.ledger.table[:NUM_HOST_COLUMNS, row].tolist() == expected
        assert state.token_ids[row, : len(tokens)].tolist() == tokens.tolist()


def sampling_row(request: CachedRequestState) -> list[int]:
    """The packed sampling row of a request."""
    seed = request.sampling_params.seed
    return packed_row(
        request.sampling_params,
        seed=LIMITS.seed if seed is None else seed,
        stream=request.stream,
        eos_token_ids=LIMITS.eos_token_ids,
    )


def rules_of(rules: TokenConstraints | None) -> set[Rule]:
    """Sparse rules on the device as a set."""
    if rules is None:
        return set()
    words = [tuple(token for token in word if token >= 0) for word in rules.words.tolist()]
    return {
        *(("bias", *entry) for entry in _zip(rules.bias_row, rules.bias_ids, rules.bias_values)),
        *(("allowed", *entry) for entry in _zip(rules.allowed_row, rules.allowed_ids)),
        *(("word", row, word) for row, word in zip(rules.words_row.tolist(), words, strict=True)),
        *(("stop", *entry) for entry in _zip(rules.stop_row, rules.stop_ids)),
    }


def expected_rules(batch: InputBatch) -> set[Rule]:
    """Sparse rules that the batch's requests ask for."""
    rules: set[Rule] = set()
    for row, request in requests(batch).items():
        params = request.sampling_params
        rules |= {("bias", row, token, value) for token, value in params.logit_bias}
        rules |= {("allowed", row, token) for token in params.allowed_token_ids or ()}
        rules |= {("word", row, word) for word in params.bad_words_token_ids}
        if params.min_tokens:
            beyond = stop_ids_of(params, LIMITS.eos_token_ids)[0][MAX_STOP_IDS:]
            rules |= {("stop", row, token) for token in beyond}
    return rules


def _zip(*columns: Tensor) -> list[tuple[object, ...]]:
    return list(zip(*(torch.as_tensor(column).tolist() for column in columns), strict=True))
