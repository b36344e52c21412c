"""Padding changes nothing for real rows, whatever shape it pads to."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.pure.dispatch import determine_batch_execution_and_padding, dispatch_keys
from purestep.pure.errors import DispatchError
from purestep.pure.initial import initial_state
from purestep.pure.models.config import AttentionConfig, ModelConfig, RopeConfig
from purestep.pure.models.llama import llama
from purestep.pure.padding import (
    capture_layout,
    dummy_layout,
    dummy_query_lens,
    fill_batch,
    pad_batch,
    pad_layout,
)
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.dispatch import CUDAGraphMode, DispatchConfig
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.layout import Layout, LayoutBounds, SamplerShape, bucket
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from purestep.pure.records.state import StepState
from purestep.pure.settle import settle
from purestep.pure.step import step
from purestep.pure.update import update_states
from tests.laws import assert_pure, digest
from tests.profiles import examples

BLOCK_SIZES = (2, 3)
LIMITS = BatchLimits(4, 18, 11, BLOCK_SIZES, (40, 30), seed=5)
PARAMS = (
    SamplingParams(temperature=0, max_tokens=6, logprobs=2),
    SamplingParams(temperature=0.9, seed=3, top_k=7, max_tokens=6),
    SamplingParams(temperature=1.1, repetition_penalty=1.3, max_tokens=2),
    SamplingParams(temperature=0, min_tokens=3, stop_token_ids=(1, 2, 3, 4), max_tokens=6),
)
NUM_STEPS = 4
Padding = tuple[
    int, int | None
]  # tokens more than the batch has, and requests more; None: those of the batch
CONFIG = ModelConfig(
    11,
    8,
    12,
    2,
    AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4, sliding_window=(None, 3)),
    RopeConfig(),
    1e-5,
    True,
    32,
)
MODEL = llama(CONFIG, groups=(0, 1))


def _params() -> Params:
    generator = torch.Generator().manual_seed(1)

    def random(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, dtype=torch.float64)

    layer = {
        "input_norm": (8,),
        "qkv": (16, 8),
        "o": (8, 8),
        "post_norm": (8,),
        "gate_up": (24, 8),
        "down": (8, 12),
    }
    layers = tuple({name: random(*size) for name, size in layer.items()} for _ in range(CONFIG.num_layers))
    return Params({"embed": random(11, 8), "layers": layers, "norm": random(8)})


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A product whose every row is computed alike, however many rows there are: then equality can be exact."""
    return (x[..., None, :] * weight).sum(-1)


KERNELS = replace(reference, linear=_linear)
WEIGHTS = _params()


class Run:
    """A few requests from arrival on, every step padded as told; what each step gave is kept."""

    def __init__(self, prompts: list[list[int]], paddings: list[Padding]) -> None:
        self.prompts, self.paddings = prompts, paddings
        self.batch = self.absorbed = InputBatch.make_empty(LIMITS)
        state = initial_state(MODEL, LIMITS, dtype=torch.float64)
        self.state = replace(state, kv=tuple(torch.full_like(kv, torch.nan) for kv in state.kv))
        self.running = list(range(len(prompts)))
        self.outputs: list[StepOutput] = []

    def run(self, chunks: list[list[int]]) -> "Run":
        """`chunks[step][request]` tokens are wanted of prompts; a request whose prompt is done decodes.

        The last layout is run once more without a plan if all are decoding: rows that stopped in it run idle.
        """
        for wanted in chunks:
            if self.running:
                batch = update_states(self.batch, self.scheduled(wanted))
                self._step(batch, *self.paddings[len(self.outputs)])
        if self.absorbed.layout.bounds.max_query_len == 1:
            _, again = step(MODEL, WEIGHTS, self.state, kernels=KERNELS)
            self.outputs.append(_first(again, len(self.absorbed.req_ids)))
        return self

    def scheduled(self, wanted: list[int]) -> SchedulerOutput:
        """The next step of the requests that have not stopped."""
        ids, finished = tuple(f"r{i}" for i in self.running), self.batch.row_of.keys()
        if not self.outputs:
            counts = [min(n, len(self.prompts[i])) for i, n in enumerate(wanted)]
            new = tuple(
                NewRequestData(ids[i], tuple(self.prompts[i]), PARAMS[i], _blocks(i)) for i in self.running
            )
            cached = CachedRequestData.make_empty()
            return SchedulerOutput(new, cached, ids, np.array(counts, np.int32))
        rows, columns = [self.batch.row_of[req_id] for req_id in ids], self.batch.columns
        computed, known = columns.num_computed_tokens_settled[rows], columns.num_tokens[rows]
        cached = CachedRequestData(ids, computed, known - columns.num_prompt_tokens[rows])
        counts = np.minimum([wanted[i] for i in self.running], known - computed).astype(np.int32)
        return SchedulerOutput((), cached, ids, counts, finished_req_ids=frozenset(finished - set(ids)))

    def _step(self, batch: InputBatch, more_tokens: int, more_reqs: int | None) -> None:
        bounds = batch.layout.bounds
        num_reqs = None if more_reqs is None else min(bounds.num_reqs + more_reqs, LIMITS.max_num_reqs)
        descriptor = BatchDescriptor(bounds.num_tokens + more_tokens, num_reqs)
        padded = assert_pure(pad_batch, batch, descriptor, before=self.absorbed.layout)
        state = replace(self.state, inbox=plan_step(padded, self.absorbed).inbox.to("cpu"))
        self.state, output = step(MODEL, WEIGHTS, state, kernels=KERNELS)
        self._check_frame(state, batch)
        self.outputs.append(_first(output, bounds.num_reqs))
        self.running = [i for i, active in zip(self.running, output.active.tolist(), strict=False) if active]
        self.absorbed = padded
        self.batch = settle(batch, padded, torch.utils._pytree.tree_map(np.asarray, output))

    def _check_frame(self, before: StepState, batch: InputBatch) -> None:
        """The frame rule: of blocks other than the null block only the batch's own slots were written."""
        counts = np.diff(batch.layout.query_start_loc).tolist()
        ends = batch.columns.num_computed_tokens_bound[batch.layout.row_of_index].tolist()
        for layer, (old, new) in enumerate(zip(before.kv, self.state.kv, strict=True)):
            group = MODEL.kv_layers[layer].group
            size = BLOCK_SIZES[group]
            allowed = torch.zeros(len(old) * size, dtype=torch.bool)
            allowed[:size] = True
            for index, count, end in zip(self.running, counts, ends, strict=True):
                blocks = _blocks(index)[group]
                for position in range(end - count, end):
                    allowed[blocks[position // size] * size + position % size] = True
            same = (old.view(torch.int64) == new.view(torch.int64)).permute(0, 2, 1, 3, 4).flatten(0, 1)
            assert bool((same.flatten(1).all(-1) | allowed).all())


def _blocks(index: int) -> tuple[tuple[int, ...], ...]:
    """Blocks enough for the longest history, scattered."""
    widths = [-(-LIMITS.max_model_len // size) for size in BLOCK_SIZES]
    return tuple(tuple(1 + index + len(PARAMS) * place for place in range(width)) for width in widths)


def _first(output: StepOutput, num_reqs: int) -> StepOutput:
    return torch.utils._pytree.tree_map(lambda leaf: leaf[:num_reqs], output)


def _real(state: StepState) -> tuple[Any, ...]:
    """All that real rows and held blocks are, apart from the null row and the null block."""
    tables = tuple(table[:-1] for table in state.block_tables)
    cache = tuple(kv[1:] for kv in state.kv)
    sampling = state.sampling.floats[:-1], state.sampling.table[:-1]
    return state.ledger.table[:, :-1], state.token_ids[:-1], sampling, state.room[:-1], tables, cache


prompts = st.lists(st.lists(st.integers(0, 10), min_size=1, max_size=7), min_size=1, max_size=4)
paddings = st.tuples(st.integers(0, 9), st.none() | st.integers(0, 3))


@examples(0.1)  # an example runs up to ten steps
@given(prompts, st.data())
def test_padding_changes_nothing_for_real_rows(prompts: list[list[int]], data: st.DataObject) -> None:
    """Tokens, log-probabilities, ledger, tapes and held blocks are bit for bit those of the run without padding.

    The cache starts full of NaN, the null block too; chunks of prompts, decodes and stopped rows are mixed.
    """
    counts = st.lists(st.integers(1, 5), min_size=len(prompts), max_size=len(prompts))
    chunks = data.draw(st.lists(counts, min_size=NUM_STEPS, max_size=NUM_STEPS))
    padded = Run(prompts, data.draw(st.lists(paddings, min_size=NUM_STEPS, max_size=NUM_STEPS))).run(chunks)
    plain = Run(prompts, [(0, None)] * NUM_STEPS).run(chunks)
    assert digest(padded.outputs) == digest(plain.outputs)
    assert digest(_real(padded.state)) == digest(_real(plain.state))
    assert not bool(padded.state.ledger.active[-1])
    assert int(padded.state.ledger.num_known_tokens[-1]) == 0


@given(st.lists(st.integers(1, 9), max_size=6), st.integers(0, 9), st.none() | st.integers(0, 5))
def test_a_padded_layout_is_the_layout_and_null_rows_without_tokens(
    counts: list[int], more_tokens: int, more_reqs: int | None
) -> None:
    """Real entries first, then the null row; query_start_loc flat from there on; bounds on lengths untouched."""
    layout = _layout(counts)
    num_reqs = None if more_reqs is None else len(counts) + more_reqs
    descriptor = BatchDescriptor(sum(counts) + more_tokens, num_reqs)
    padded = assert_pure(pad_layout, layout, descriptor, null_row=77)
    added = more_reqs or 0
    assert padded.row_of_index.tolist() == [*range(len(counts)), *[77] * added]
    assert np.diff(padded.query_start_loc).tolist() == [*counts, *[0] * added]
    assert padded.row_of_index.dtype == padded.query_start_loc.dtype == np.int32
    size = {"num_reqs": len(counts) + added, "num_tokens": descriptor.num_tokens}
    assert padded.bounds == replace(layout.bounds, **size)
    assert (padded is layout) == (more_tokens == 0 and added == 0)
    for array in (padded.row_of_index, padded.query_start_loc):
        assert not array.flags.writeable


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 3), st.integers(0, 3))
def test_what_the_device_has_already_is_shared(counts: list[int], tokens: int, reqs: int) -> None:
    """Padding an equal layout to the same shape gives the very object; another bound shares the arrays."""
    descriptor = BatchDescriptor(sum(counts) + tokens, len(counts) + reqs)
    before = pad_layout(_layout(counts), descriptor, null_row=77)
    assert pad_layout(_layout(counts), descriptor, null_row=77, before=before) is before
    longer = _layout(counts)
    longer = replace(longer, bounds=replace(longer.bounds, max_seq_len=128))
    other = pad_layout(longer, descriptor, null_row=77, before=before)
    assert other is not before
    assert other.row_of_index is before.row_of_index and other.query_start_loc is before.query_start_loc
    assert other.bounds == replace(before.bounds, max_seq_len=128)
    turned = pad_layout(_layout(counts[::-1]), descriptor, null_row=77, before=before)
    assert np.diff(turned.query_start_loc).tolist() == counts[::-1] + [0] * reqs
    assert (turned is before) == (counts == counts[::-1])
    full = _layout(counts)  # the last request leaves, and padding takes its place
    fewer = pad_layout(
        _layout(counts[:-1]), BatchDescriptor(sum(counts), len(counts)), null_row=77, before=full
    )
    assert fewer.row_of_index.tolist() == [*range(len(counts) - 1), 77]


def test_the_plan_of_a_steady_padded_step_is_empty() -> None:
    """Nothing to say while the same rows decode in the same shape, though every layout is padded anew."""
    run = Run([[1, 2], [3]], [(3, 1)] * 2).run([[2, 1], [1, 1]])
    batch = update_states(run.batch, run.scheduled([1, 1]))
    padded = pad_batch(batch, BatchDescriptor(5, 3), before=run.absorbed.layout)
    assert padded.layout is run.absorbed.layout
    assert plan_step(padded, run.absorbed).inbox.is_empty
    assert batch.layout.bounds.num_tokens == 2  # the next step goes on from the batch without padding


def test_a_batch_that_needs_no_padding_is_the_same_object() -> None:
    """NONE pads nothing."""
    run = Run([[1, 2], [3]], [(0, None)]).run([[2, 1]])
    assert pad_batch(run.batch, BatchDescriptor(3)) is run.batch


@pytest.mark.parametrize("descriptor", [BatchDescriptor(5), BatchDescriptor(8, 2), BatchDescriptor(5, 3)])
def test_a_shape_that_does_not_hold_the_batch_is_refused(descriptor: BatchDescriptor) -> None:
    """Too few tokens, or too few requests."""
    with pytest.raises(
        DispatchError, match="a batch of 3 requests with 6 tokens does not fit a descriptor of"
    ):
        pad_layout(_layout([1, 2, 3]), descriptor, null_row=9)


def test_more_requests_than_there_are_rows_are_refused() -> None:
    """The null row is the one behind them; up to there a batch may be padded."""
    assert pad_layout(_layout([1, 2, 3]), BatchDescriptor(6, 4), null_row=4).bounds.num_reqs == 4
    with pytest.raises(DispatchError, match="a descriptor of 5 requests, and there are 4 rows"):
        pad_layout(_layout([1, 2, 3]), BatchDescriptor(6, 5), null_row=4)


@given(st.integers(1, 3), st.sampled_from(CUDAGraphMode), st.lists(st.integers(1, 3), min_size=1, max_size=6))
def test_the_layout_of_capture_bounds_every_batch_that_runs_in_the_graph(
    query_len: int, mode: CUDAGraphMode, counts: list[int]
) -> None:
    """Same shapes as any padded batch of the graph, bounds at least as large, and no request that runs."""
    sampler = SamplerShape(random=True)
    limits = BatchLimits(6, 100, 11, (4,), (9,))
    keys = dispatch_keys(DispatchConfig(tuple(query_len * n for n in (1, 2, 4, 6)), 6), mode, query_len)
    layout = _layout(counts)
    chosen = determine_batch_execution_and_padding(keys, layout.bounds)
    if chosen.cudagraph_mode is not CUDAGraphMode.FULL:
        return
    captured = assert_pure(capture_layout, chosen.descriptor, limits, sampler=sampler)
    padded = pad_layout(layout, chosen.descriptor, null_row=limits.null_row)
    assert captured.row_of_index.tolist() == [limits.null_row] * len(padded.row_of_index)
    assert captured.query_start_loc.tolist() == [0] * len(padded.query_start_loc)
    fits, own = captured.bounds, padded.bounds
    assert (fits.num_reqs, fits.num_tokens) == (own.num_reqs, own.num_tokens)
    assert fits.max_query_len >= own.max_query_len and fits.max_seq_len >= own.max_seq_len
    assert fits.max_query_len == (query_len if chosen.descriptor.uniform else own.num_tokens)
    assert fits.sampler == sampler


@given(
    st.sampled_from(list(CUDAGraphMode)),
    st.integers(1, 4),
    st.lists(st.integers(1, 6), min_size=1, max_size=6),
)
def test_graphs_of_uniform_batches_hold_those_whose_requests_run_less(
    mode: CUDAGraphMode, query_len: int, counts: list[int]
) -> None:
    """With bounds as if all had their drafts, and rows and counts as they are; any other batch is left as it is."""
    keys = dispatch_keys(DispatchConfig(tuple(query_len * n for n in (1, 2, 4, 6)), 6), mode, query_len)
    batch = replace(InputBatch.make_empty(replace(LIMITS, max_num_reqs=6)), layout=_layout(counts))
    filled = assert_pure(fill_batch, batch, keys)
    if filled is batch:
        is_full = counts == [query_len] * len(counts) and batch.layout.bounds.num_drafts == query_len - 1
        assert is_full or query_len == 1 or not mode.separate_routine or max(counts) > query_len
        return
    assert filled.layout.row_of_index is batch.layout.row_of_index
    assert filled.layout.query_start_loc is batch.layout.query_start_loc
    every = LayoutBounds(len(counts), len(counts) * query_len, query_len, 64, num_drafts=query_len - 1)
    assert filled.layout.bounds == every
    chosen = determine_batch_execution_and_padding(keys, filled.layout.bounds)
    assert chosen.cudagraph_mode is CUDAGraphMode.FULL and chosen.descriptor.uniform
    padded = pad_batch(filled, chosen.descriptor).layout
    assert padded.query_start_loc.tolist() == [
        *batch.layout.query_start_loc, *[sum(counts)] * (chosen.num_reqs - len(counts)),
    ]  # fmt: skip
    assert assert_pure(fill_batch, filled, keys) is filled


@given(st.integers(1, 60), st.integers(1, 20), st.integers(1, 5))
def test_a_made_up_batch_has_the_tokens_and_at_most_the_requests_asked_for(
    num_tokens: int, max_num_reqs: int, query_len: int
) -> None:
    """In all three forms, with no request empty."""
    forms: list[dict[str, Any]] = [{}, {"mixed": True}]
    if num_tokens <= query_len * max_num_reqs:
        forms.append({"uniform_query_len": query_len})
    for form in forms:
        lens = dummy_query_lens(num_tokens, max_num_reqs, **form)
        assert sum(lens) == num_tokens and len(lens) <= max_num_reqs and min(lens) >= 1


def test_table_of_made_up_batches() -> None:
    """10 tokens in at most 4 requests."""
    assert dummy_query_lens(10, 4) == (2, 2, 2, 4)
    assert dummy_query_lens(10, 4, uniform_query_len=3) == (3, 3, 3, 1)
    assert dummy_query_lens(10, 4, mixed=True) == (1, 1, 1, 7)
    with pytest.raises(
        DispatchError, match="13 tokens with 3 a request needs more than 4 requests: at most 12"
    ):
        dummy_query_lens(13, 4, uniform_query_len=3)
    with pytest.raises(DispatchError, match="0 tokens in at most 4 requests"):
        dummy_query_lens(0, 4)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(1, 400))
def test_the_layout_of_a_made_up_batch_names_the_null_row_alone(lens: list[int], longest: int) -> None:
    """Its tokens end to end; bounds are those of a batch of such requests."""
    limits = BatchLimits(6, 400, 11, (4,), (9,))
    sampler = SamplerShape(random=True)
    layout = assert_pure(dummy_layout, lens, limits, sampler=sampler, max_seq_len=longest)
    assert layout.row_of_index.tolist() == [limits.null_row] * len(lens)
    assert np.diff(layout.query_start_loc).tolist() == lens and layout.query_start_loc[0] == 0
    assert layout.bounds == LayoutBounds(len(lens), sum(lens), max(lens), bucket(longest), sampler)


def _layout(counts: list[int]) -> Layout:
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    rows = np.arange(len(counts), dtype=np.int32)
    for array in (starts, rows):
        array.flags.writeable = False
    return Layout(rows, starts, LayoutBounds(len(counts), sum(counts), max(counts, default=0), 64))
