"""Sampling parameters packed into rows of words, and read back on the device."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from purestep.kernels.reference import reference
from purestep.pure.record import replace
from purestep.pure.records.layout import Layout, LayoutBounds
from purestep.pure.records.sampling_params import SamplingParams, normalize
from purestep.pure.records.sampling_rows import (
    FLOATS,
    INTS,
    MAX_STOP_IDS,
    NUM_FLOATS,
    NUM_WORDS,
    SamplingRows,
    packed_row,
    split64,
    stop_ids_of,
)
from purestep.pure.sampling import batch_params
from tests.leaves import initial

words = st.integers(-(2**63), 2**63 - 1)

requests = st.builds(
    SamplingParams,
    temperature=st.floats(0, 5, width=32),
    top_p=st.floats(0.015625, 1, width=32),
    min_p=st.floats(0, 1, width=32),
    top_k=st.integers(-1, 100),
    repetition_penalty=st.floats(0.015625, 4, width=32),
    frequency_penalty=st.floats(-2, 2, width=32),
    presence_penalty=st.floats(-2, 2, width=32),
    min_tokens=st.integers(0, 5),
    stop_token_ids=st.lists(st.integers(0, 99), max_size=12),
    ignore_eos=st.booleans(),
    logprobs_mode=st.sampled_from(["raw_logprobs", "processed_logits"]),
)


@given(words)
def test_a_64_bit_number_is_two_words(value: int) -> None:
    """The low word and the high word, bit for bit."""
    low, high = split64(value)
    assert -(2**31) <= low < 2**31 and -(2**31) <= high < 2**31
    assert ((high & 0xFFFFFFFF) << 32 | low & 0xFFFFFFFF) == value & 0xFFFFFFFFFFFFFFFF


@given(requests, words, words, st.lists(st.integers(0, 99), max_size=3, unique=True))
def test_what_is_packed_is_what_the_device_reads(
    params: SamplingParams, seed: int, stream: int, eos: list[int]
) -> None:
    """Every parameter comes back as it was, floats to the last bit, in the order of the batch."""
    row = packed_row(params, seed=seed, stream=stream, eos_token_ids=tuple(eos))
    assert len(row) == NUM_WORDS
    state = initial()
    words = torch.tensor(row, dtype=torch.int32)
    floats, table = state.sampling.floats.clone(), state.sampling.table.clone()
    floats[2], table[2] = words[:NUM_FLOATS].view(torch.float32), words[NUM_FLOATS:]
    layout = Layout(
        torch.tensor([0, 2], dtype=torch.int32),
        torch.tensor([0, 1, 2], dtype=torch.int32),
        LayoutBounds(2, 2),
    )
    read = batch_params(
        replace(state, sampling=SamplingRows(floats, table), layout=layout), kernels=reference
    )
    expected = normalize(params)
    for name in FLOATS:
        assert read[name][1].item() == torch.tensor(getattr(expected, name), dtype=torch.float32).item()
        assert read[name][0] == 0
    assert read["top_k"][1] == expected.top_k
    assert read["min_tokens"][1] == params.min_tokens
    assert (read["seed_low"][1], read["seed_high"][1]) == split64(seed)
    assert (read["stream_low"][1], read["stream_high"][1]) == split64(stream)
    stops, num_stops = stop_ids_of(params, tuple(eos))
    kept = list(stops[:MAX_STOP_IDS])
    assert read.banned_ids[1].tolist() == kept + [-1] * (MAX_STOP_IDS - len(kept))
    assert read["num_stop_ids"][1] == min(num_stops, MAX_STOP_IDS)
    assert len(INTS) == len({*INTS})


def test_stop_ids() -> None:
    """The request's own come first; end-of-sequence ids end it unless ignored, and are banned anyway."""
    params = SamplingParams(stop_token_ids=(5, 6, 5))
    assert stop_ids_of(params, (9, 6)) == ((5, 6, 9), 3)
    assert stop_ids_of(replace(params, ignore_eos=True), (9, 6)) == ((5, 6, 9), 2)
    assert stop_ids_of(SamplingParams(ignore_eos=True), (9,)) == ((9,), 0)
    assert stop_ids_of(SamplingParams(), ()) == ((), 0)
