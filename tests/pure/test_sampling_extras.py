"""Logits processors, chosen ids and kept mass: what requests ask of sampling beside the parameters that all have."""

from collections.abc import Callable, Sequence
from math import log

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from purestep.kernels.reference import reference
from purestep.pure.errors import ExtrasError, InvalidParameterError
from purestep.pure.record import replace
from purestep.pure.records.logits_processor import History, LogitsProcessor
from purestep.pure.records.sampling_extras import SamplingExtras
from purestep.pure.records.sampling_params import SamplingParams, validate
from purestep.pure.sampling import sample_tokens
from purestep.pure.sampling_extras import fold, grouped, sampling_extras, try_processors
from purestep.pure.step import sample
from tests.laws import assert_pure, equal
from tests.profiles import examples
from tests.pure.test_sampling import END, VOCAB, batches, row_of
from tests.sampling_stage import EVERY, Asker, batch_of, executed, final_logits, sampled

pytestmark = pytest.mark.usefixtures("unchecked_records")

INFINITY = float("inf")
WATCHED = SamplingParams(logprobs=EVERY, logprobs_mode="processed_logits", max_tokens=None)
TABLE = torch.tensor([[3.0, 1.0, 0.5, -2.0]])
TOKENS = st.lists(st.integers(0, VOCAB - 1), max_size=6)


def no_repeats(logits: Tensor, history: History, params: dict[str, Tensor]) -> Tensor:
    """Outputs cost so much each time that they were said."""
    said = history.is_output.to(logits.dtype) * params["cost"][:, None].to(logits.dtype)
    return logits.scatter_add(1, history.token_ids.long(), -said)


def stays_near(logits: Tensor, history: History, params: dict[str, Tensor]) -> Tensor:
    """Only ids not further than `distance` from the last known one."""
    last = history.token_ids.gather(1, history.lengths[:, None].long() - 1)
    far = (torch.arange(logits.shape[1]) - last).abs() > params["distance"][:, None]
    return logits.masked_fill(far, -INFINITY)


# The same, of one request, in plain Python.


def no_repeats_of_one(
    row: list[float], prompt: Sequence[int], outputs: Sequence[int], cost: float
) -> list[float]:
    return [value - cost * outputs.count(token) for token, value in enumerate(row)]


def stays_near_of_one(
    row: list[float], prompt: Sequence[int], outputs: Sequence[int], distance: float
) -> list[float]:
    last = [*prompt, *outputs][-1]
    return [value if abs(token - last) <= distance else -INFINITY for token, value in enumerate(row)]


KINDS: dict[str, tuple[Callable[..., Tensor], Callable[..., list[float]], list[float]]] = {
    "cost": (no_repeats, no_repeats_of_one, [0.0, 0.5, 3.0]),
    "distance": (stays_near, stays_near_of_one, [1, 2, VOCAB]),
}


@st.composite
def choices(draw: st.DrawFn) -> tuple[list[Asker], list[list[tuple[str, float]]], Tensor]:
    """Requests with histories, the processors that each of them chose, and logits."""
    chosen = draw(
        st.lists(
            st.lists(
                st.sampled_from([(name, value) for name, (*_, values) in KINDS.items() for value in values]),
                max_size=3,
            ),
            min_size=1,
            max_size=4,
        )
    )
    askers = [
        Asker(
            replace(WATCHED, logits_processors=[LogitsProcessor(KINDS[n][0], {n: v}) for n, v in own]),
            (draw(st.integers(0, VOCAB - 1)), *draw(TOKENS)),
            draw(TOKENS),
        )
        for own in chosen
    ]
    numbers = st.lists(st.integers(-40, 40), min_size=VOCAB, max_size=VOCAB)
    return askers, chosen, torch.tensor([draw(numbers) for _ in askers], dtype=torch.float64) / 4


@given(choices())
def test_a_processor_of_all_rows_is_one_of_each_request_in_python(
    batch: tuple[list[Asker], list[list[tuple[str, float]]], Tensor],
) -> None:
    """In the order that the request lists, whatever its neighbours chose."""
    askers, chosen, table = batch
    found = final_logits(sampled(askers, table)).tolist()
    for asker, own, row, result in zip(askers, chosen, table.tolist(), found, strict=True):
        for name, value in own:
            row = KINDS[name][1](row, asker.prompt, asker.outputs, value)
        assert result == row


@examples(0.5)
@given(batches(), st.data())
def test_rows_without_a_processor_are_unchanged_bit_for_bit(
    batch: tuple[list[Asker], Tensor], data: st.DataObject
) -> None:
    """Tokens and reports of every kind, beside neighbours with processors in both places."""
    askers, table = batch
    turned = LogitsProcessor(lambda logits, history, params: -logits * 7)
    doubled = LogitsProcessor(lambda logits, history, params: logits * 2, argmax_invariant=True)
    own = [data.draw(st.sampled_from([(), (turned,), (doubled, turned)])) for _ in askers]
    busy = [
        replace_params(asker, logits_processors=mine) if mine else asker
        for asker, mine in zip(askers, own, strict=True)
    ]
    together = sampled(busy, table, eos_token_ids=END)
    without = sampled(askers, table, eos_token_ids=END)
    for index, mine in enumerate(own):
        if not mine:
            width = askers[index].params.logprobs
            assert equal(row_of(together, index, width), row_of(without, index, width))


def replace_params(asker: Asker, **changes: object) -> Asker:
    return Asker(replace(asker.params, **changes), asker.prompt, asker.outputs, asker.stream)


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=3))
def test_state_is_a_fold_over_the_history(pairs: list[tuple[list[int], list[int]]]) -> None:
    """Of outputs, of all tokens; of states of one number or of several, in a tree."""
    seen: list[tuple[Tensor, ...]] = []

    def update(state: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
        counts = state["counts"].scatter_add(1, tokens[:, None].long(), torch.ones(len(tokens), 1))
        return {"hash": (state["hash"] * 31 + tokens) % 1009, "counts": counts}

    def remembering(logits: Tensor, history: History, params: dict[str, Tensor]) -> Tensor:
        begin = {
            "hash": torch.ones(len(logits), dtype=torch.int64),
            "counts": torch.zeros(len(logits), VOCAB),
        }
        for over in (history.is_output, history.is_known):
            state = assert_pure(fold, update, begin, history, over=over)
            seen.append((state["hash"], state["counts"]))
        return logits

    processor = LogitsProcessor(remembering)
    askers = [
        Asker(replace(WATCHED, logits_processors=processor), (1, *prompt), outputs)
        for prompt, outputs in pairs
    ]
    sampled(askers, torch.zeros(len(askers), VOCAB))
    for (hashes, counts), whole in zip(seen, (False, True), strict=True):
        for asker, found, counted in zip(askers, hashes.tolist(), counts.tolist(), strict=True):
            tokens, expected = [*(asker.prompt if whole else ()), *asker.outputs], 1
            for token in tokens:
                expected = (expected * 31 + token) % 1009
            assert found == expected
            assert counted == [tokens.count(token) for token in range(VOCAB)]


def test_processors_stand_behind_bias_before_penalties_and_before_the_cuts() -> None:
    """An id that is biased to the top is penalised there; a doubled distribution is cut as such; greedy skips that."""
    doubled = LogitsProcessor(lambda logits, history, params: logits * 2)
    penalised = replace(
        WATCHED, temperature=0.5, logit_bias={1: 1.0}, frequency_penalty=0.5, logits_processors=doubled
    )
    found = final_logits(sampled([Asker(penalised, (0,), (1, 1))], TABLE))
    torch.testing.assert_close(found, torch.tensor([[6.0, 2 * 2.0 - 2 * 0.5, 1.0, -4.0]]) / 0.5)

    late = replace(doubled, argmax_invariant=True)
    probabilities = torch.tensor([[0.5, 0.3, 0.2]])  # squared .25, .09, .04: of .38, .66, .24 and .1
    cut = replace(WATCHED, top_p=0.6, logits_processors=late)
    assert torch.isfinite(final_logits(sampled([Asker(cut)], probabilities.log()))).tolist() == [
        [True, False, False]
    ]
    greedy = replace(WATCHED, temperature=0.0, logits_processors=late)
    assert equal(final_logits(sampled([Asker(greedy), Asker(WATCHED)], TABLE.expand(2, -1)))[0], TABLE[0])


def test_requests_share_a_call_and_bring_their_own_numbers() -> None:
    """Whole numbers stay whole; another function, another place or other names make another call."""
    near = [LogitsProcessor(stays_near, {"distance": n}) for n in (1, 2)]
    cost = LogitsProcessor(no_repeats, [("cost", 0.5)])
    rows = assert_pure(grouped, [[near[0]], [], [near[1], cost], [cost, near[0]]], [False] * 4)
    assert [(r.apply, r.index.tolist()) for r in rows] == [
        (stays_near, [0, 2]),
        (no_repeats, [3]),
        (no_repeats, [2]),
        (stays_near, [3]),
    ]
    assert rows[0].params["distance"].dtype == np.int64 and rows[0].params["distance"].tolist() == [1, 2]
    assert rows[1].params["cost"].dtype == np.float32
    assert hash(near[0]) == hash(LogitsProcessor(stays_near, {"distance": 1})) and near[0] != near[1]


def test_a_batch_says_what_sampling_takes_beside_the_state() -> None:
    params = replace(
        WATCHED, logprob_token_ids=(5, 1), logits_processors=LogitsProcessor(stays_near, {"distance": 1})
    )
    batch = batch_of([Asker(WATCHED), Asker(params)], VOCAB)
    extras = assert_pure(sampling_extras, batch)
    assert batch.layout.bounds.sampler.extras
    assert extras.token_ids is not None and extras.token_ids.tolist() == [[-1, -1], [5, 1]]
    assert [rows.index.tolist() for rows in extras.processors] == [[1]]
    plain = batch_of([Asker(WATCHED)], VOCAB)
    assert not plain.layout.bounds.sampler.extras and equal(sampling_extras(plain), SamplingExtras())


def test_a_batch_with_processors_is_not_sampled_without_them() -> None:
    for changes in (
        {"logits_processors": LogitsProcessor(no_repeats, {"cost": 1})},
        {"logprob_token_ids": (1,)},
    ):
        given_logits = executed([Asker(replace(WATCHED, **changes))], TABLE)
        for stage in (sample_tokens, sample):
            with pytest.raises(ExtrasError, match="sampling_extras"):
                stage(given_logits, kernels=reference)


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda logits, history, params: params["missing"], "KeyError"),
        (lambda logits, history, params: logits[:, :2], r"shape \(1, 2\)"),
        (lambda logits, history, params: logits.double(), "float64"),
        (lambda logits, history, params: None, "AttributeError"),
    ],
)
def test_a_bad_processor_is_found_when_it_is_tried(bad: Callable[..., Tensor], says: str) -> None:
    on = {"vocab_size": VOCAB, "device": torch.device("cpu"), "dtype": torch.float32}
    good = SamplingParams(logits_processors=[LogitsProcessor(no_repeats, {"cost": 1.5})])
    assert_pure(try_processors, good, (1, 2), **on)
    with pytest.raises(InvalidParameterError, match=says):
        try_processors(replace(good, logits_processors=[LogitsProcessor(bad)]), (1, 2), **on)


def test_what_is_no_processor_is_refused() -> None:
    with pytest.raises(InvalidParameterError, match="names to numbers"):
        LogitsProcessor(no_repeats, {"cost": "much"})  # type: ignore[dict-item]
    for wrong in ([no_repeats], [LogitsProcessor(None)]):  # type: ignore[arg-type]
        with pytest.raises(InvalidParameterError, match="logits_processors"):
            validate(SamplingParams(logits_processors=wrong), VOCAB, 16)
    with pytest.raises(InvalidParameterError, match="a list"):
        SamplingParams(logits_processors=3)  # type: ignore[arg-type]


def test_gradients_and_vmap_go_through_a_processor() -> None:
    """Of its parameters: the same numbers for several at once, and how the result depends on them."""
    params = replace(WATCHED, logits_processors=LogitsProcessor(no_repeats, {"cost": 1.0}))
    askers = [Asker(WATCHED), Asker(params, (0,), (1, 1))]
    logits = TABLE.expand(2, -1)
    given_logits = executed(askers, logits)
    (rows,) = sampling_extras(batch_of(askers, 4)).to("cpu").processors

    def largest(cost: Tensor) -> Tensor:
        extras = SamplingExtras((replace(rows, params={"cost": cost}),))
        tokens = sample_tokens(given_logits, kernels=reference, extras=extras)
        assert tokens.logprobs_tensors is not None
        return tokens.logprobs_tensors.logprobs[1, 1:].sum()

    costs = torch.tensor([[0.0], [1.0], [2.5]])
    torch.testing.assert_close(
        torch.func.vmap(largest)(costs), torch.stack([largest(cost) for cost in costs])
    )
    assert torch.func.grad(largest)(costs[1]).tolist() == [-2.0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_processors_are_given_wide_logits(dtype: torch.dtype) -> None:
    """And the others keep the bits of narrow ones."""
    seen: list[torch.dtype] = []

    def remembering(logits: Tensor, history: History, params: dict[str, Tensor]) -> Tensor:
        seen.append(logits.dtype)
        return logits + 1

    askers = [Asker(replace(WATCHED, logits_processors=LogitsProcessor(remembering))), Asker(WATCHED)]
    logits = TABLE.expand(2, -1).to(dtype)
    found = final_logits(sampled(askers, logits))
    assert seen == [torch.promote_types(dtype, torch.float32)]
    assert equal(found, torch.stack([logits[0] + 1, logits[1]]))


def test_chosen_ids_are_told_of_in_the_mode_of_their_row() -> None:
    modes = ("raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits")
    params = SamplingParams(
        temperature=0.5, logit_bias={1: 1.0}, max_tokens=None, logprob_token_ids=(3, 0, 3)
    )
    askers = [Asker(replace(params, logprobs_mode=mode)) for mode in modes]
    tokens = sampled([*askers, Asker(replace(params, logprob_token_ids=None))], TABLE.expand(5, -1))
    processed = torch.tensor([3.0, 2.0, 0.5, -2.0]) / 0.5
    rows = [TABLE[0].log_softmax(-1), processed.log_softmax(-1), TABLE[0], processed]
    expected = torch.stack([*(row[[3, 0, 3]] for row in rows), torch.full((3,), -INFINITY)])
    assert tokens.logprobs_tensors is None and tokens.id_logprobs is not None
    torch.testing.assert_close(tokens.id_logprobs, expected)


def test_kept_mass_of_worked_numbers() -> None:
    """Of probabilities .5, .3, .2: two are kept by top-k, one by min-p, all without a cut, and all of a greedy row."""
    params = SamplingParams(kept_mass=True, max_tokens=None)
    changes = ({"top_k": 2}, {"min_p": 0.7}, {"top_p": 0.6}, {}, {"temperature": 0.0})
    probabilities = torch.tensor([[0.5, 0.3, 0.2]]).expand(len(changes), -1)
    tokens = sampled([Asker(replace(params, **own)) for own in changes], probabilities.log())
    found = tokens.kept_mass
    assert found is not None
    masses = torch.tensor([0.8, 0.5, 0.8, 1.0, 1.0])
    torch.testing.assert_close(found.log_mass, masses.log())
    drawn = probabilities.gather(1, tokens.token_ids[:, None].long())[:, 0] / masses
    torch.testing.assert_close(found.drawn_logprobs, drawn.log())
    assert found.log_mass[3:].tolist() == [0.0, 0.0] and found.log_mass[0] == pytest.approx(log(0.8))
    assert sampled([Asker(WATCHED)], TABLE).kept_mass is None


@examples(0.5)
@given(
    st.integers(0, 2**31),
    st.floats(0.05, 3.0),
    st.integers(0, 12),
    st.floats(0.1, 1.0),
    st.sampled_from([0.0, 0.1, 0.5]),
)
def test_a_trainer_can_correct_its_ratios(seed: int, temperature: float, k: int, p: float, m: float) -> None:
    """The law: processed log-probability = that of the whole distribution at temperature - log of the kept mass."""
    params = SamplingParams(
        temperature=temperature, top_k=k, top_p=p, min_p=m, logprobs=0, kept_mass=True, max_tokens=None
    )
    table = 4 * torch.randn(3, 12, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    modes = ("processed_logprobs", "raw_logprobs")
    processed, raw = (
        sampled([Asker(replace(params, logprobs_mode=mode), stream=i) for i in range(3)], table)
        for mode in modes
    )
    assert processed.kept_mass is not None and processed.logprobs_tensors is not None
    whole = (table / temperature).log_softmax(-1).gather(1, processed.token_ids[:, None].long())[:, 0]
    told = processed.logprobs_tensors.logprobs[:, 0]
    torch.testing.assert_close(told, whole - processed.kept_mass.log_mass, atol=1e-6, rtol=0)
    torch.testing.assert_close(told, processed.kept_mass.drawn_logprobs, atol=1e-12, rtol=0)
    assert equal(processed.kept_mass, raw.kept_mass) and (processed.kept_mass.log_mass <= 0).all()


def test_traced_and_compiled_sampling_runs_processors_too() -> None:
    """One graph without a break, of a batch in which some chose one; the same tokens and reports."""
    askers = [
        Asker(replace(WATCHED, kept_mass=True, top_k=3, logprob_token_ids=(2,)), (1,), (2, 2)),
        Asker(replace(WATCHED, logits_processors=LogitsProcessor(no_repeats, {"cost": 2.0})), (1,), (2, 2)),
    ]
    given_logits = executed(askers, TABLE.expand(2, -1))
    extras = sampling_extras(batch_of(askers, 4)).to("cpu")

    def stage(logits: Tensor) -> list[Tensor]:
        tokens = sample_tokens(replace(given_logits, logits=logits), kernels=reference, extras=extras)
        leaves: list[Tensor] = torch.utils._pytree.tree_leaves(tokens)
        return leaves

    expected = stage(TABLE.expand(2, -1))
    worlds = (make_fx(stage)(torch.zeros(2, 4)), torch.compile(stage, fullgraph=True, backend="eager"))
    for world in worlds:
        assert equal(world(TABLE.expand(2, -1)), expected)
