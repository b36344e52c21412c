"""Drafters with weights: a draft model, EAGLE, Medusa. What they guess changes how many tokens a step keeps, only."""

from itertools import product
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_flatten

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.pure.drafters.draft_model import draft_model
from purestep.pure.drafters.eagle import eagle
from purestep.pure.drafters.eagle3 import eagle3, tapped
from purestep.pure.drafters.joined import with_draft_params, with_drafter
from purestep.pure.drafters.medusa import medusa
from purestep.pure.errors import DrafterError
from purestep.pure.models.model import Model
from purestep.pure.record import replace
from purestep.pure.records.drafter import Drafter
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.step import execute, step
from tests.laws import assert_pure, equal
from tests.pure.drafters.driver import (
    GREEDY,
    PROMPTS,
    RANDOM,
    VOCAB,
    acceptance,
    begun,
    check_greedy,
    drafted_run,
    laid_out,
    small_config,
    small_model,
)
from tests.pure.test_step import WORLDS
from tests.speculation import history, prefilled, run_plain

TARGET, WEIGHTS = small_model(2)
Together = tuple[Model, Params, Drafter]


def joined(drafter: Drafter, draft: Params) -> Together:
    return with_drafter(TARGET, drafter), with_draft_params(WEIGHTS, draft), drafter


def eagle_weights() -> Params:
    _, params = small_model(1, seed=9)
    fc = torch.randn(8, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    return Params({"fc": fc, "layers": params.tree["layers"]})


def eagle3_weights(num_ids: int = VOCAB) -> Params:
    """A head that knows only some of the target's tokens, its own last one being the target's first."""
    tree = small_model(1, seed=9)[1].tree
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    (layer,) = tree["layers"]
    layer = layer | {"hidden_norm": draw(8), "qkv": draw(layer["qkv"].shape[0], 16)}
    own = {"fc": draw(8, 16), "layer": layer, "norm": draw(8), "head": draw(num_ids, 8)}
    return Params(own if num_ids == VOCAB else own | {"target_ids": torch.arange(num_ids).flip(0)})


def medusa_weights(num_drafts: int) -> Params:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return Params(
        tuple(
            {"layers": ({"weight": draw(8, 8), "bias": draw(8)},), "out": draw(VOCAB, 8)}
            for _ in range(num_drafts)
        )
    )


def of_kind(kind: str, num_drafts: int, *, draws: bool = False) -> Together:
    if kind == "draft model":
        draft, params = small_model(1, hidden=6, seed=5)
        return joined(draft_model(TARGET, draft, num_drafts=num_drafts, draws=draws), params)
    if kind == "eagle":
        return joined(eagle(TARGET, small_config(1), num_drafts=num_drafts, draws=draws), eagle_weights())
    if kind == "eagle-3":
        drafter = eagle3(TARGET, small_config(1), layers=(0, 1), num_drafts=num_drafts, draws=draws)
        _, params, _ = joined(drafter, eagle3_weights(VOCAB - 3))
        return with_drafter(tapped(TARGET, (0, 1)), drafter), params, drafter
    return joined(medusa(num_drafts=num_drafts), medusa_weights(num_drafts))


KINDS = ("draft model", "eagle", "eagle-3", "medusa")
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("num_drafts", [1, 3])
@each_kind
def test_greedy_tokens_are_those_of_plain_steps(kind: str, num_drafts: int) -> None:
    check_greedy(*of_kind(kind, num_drafts))


@each_kind
def test_drafts_are_a_function_of_the_history(kind: str) -> None:
    """Whatever stood or fell on the way, they are what a prefill of the same tokens gives: no key of it is missing."""
    model, params, drafter = of_kind(kind, 3)
    state = begun(model, params, drafter, PROMPTS)
    for _ in range(5):
        state, output = step(
            model, params, laid_out(state, drafter.num_drafts), kernels=reference, drafter=drafter
        )
        histories = [history(state, row) for row in range(len(PROMPTS))]
        anew = begun(model, params, drafter, [(own[:-1], GREEDY) for own in histories])
        assert [history(anew, row) for row in range(len(PROMPTS))] == histories
        assert output.draft_token_ids.tolist() == anew.ledger.drafts[:-1].tolist()
        assert (output.draft_token_ids >= 0).any()


def test_the_target_itself_as_draft_model_is_always_right() -> None:
    """So its keys and values, positions and slots are those of plain steps, whatever stood before."""
    for num_drafts in (1, 2, 4):
        drafter = draft_model(TARGET, TARGET, num_drafts=num_drafts)
        assert check_greedy(*joined(drafter, WEIGHTS)) == 1.0


@pytest.mark.parametrize("kind", ["draft model", "eagle", "eagle-3"])
def test_drawn_drafts_leave_the_distribution_alone(kind: str) -> None:
    """Chi-square over 600 streams: the third and fourth token of a request are as frequent as plain steps have it."""
    model, params, drafter = of_kind(kind, 2, draws=True)
    num, place = 600, 4
    requests = [((1, 2, 3), replace(RANDOM, max_tokens=4, temperature=0.6))] * num
    ours, _ = drafted_run(model, params, begun(model, params, drafter, requests), drafter)
    theirs = run_plain(model, params, prefilled(model, params, requests, num_drafts=0))
    for at in (place, place + 1):
        a, b = (torch.bincount(s.token_ids[:num, at], minlength=VOCAB).double() for s in (ours, theirs))
        both = (a + b).clamp(min=1)
        # Two samples of one distribution; 0.1 % of them lie above 29.6 at 10 degrees of freedom.
        assert ((a - b) ** 2 / both).sum() < 29.6


def test_what_draws_stands_more_often_where_requests_draw() -> None:
    """The target as its own draft model: p / q is 1, so that all that it draws stands, and not all best guesses do."""
    requests = [(prompt, RANDOM) for prompt, _ in PROMPTS]
    shares = []
    for draws in (True, False):
        model, params, drafter = joined(draft_model(TARGET, TARGET, num_drafts=3, draws=draws), WEIGHTS)
        start = begun(model, params, drafter, requests)
        _, outputs = drafted_run(model, params, start, drafter)
        shares.append(acceptance(start, outputs))
    assert shares[0] == 1.0 > shares[1]


@each_kind
def test_a_step_with_a_drafter_is_pure(kind: str) -> None:
    model, params, drafter = of_kind(kind, 2)
    state = laid_out(begun(model, params, drafter, PROMPTS), 2)
    assert_pure(step, model, params, state, kernels=reference, drafter=drafter)


@pytest.mark.parametrize(
    ("kind", "draws"), [*product(KINDS, [False]), ("draft model", True), ("eagle", True)]
)
def test_donating_kernels_make_the_same_step(kind: str, draws: bool) -> None:
    """What is kept from step to step stays where it is."""
    model, params, drafter = of_kind(kind, 2, draws=draws)
    requests = [(prompt, RANDOM if draws else GREEDY) for prompt, _ in PROMPTS]
    state = laid_out(begun(model, params, drafter, requests), 2)
    own = replace(donating, prepare=reference.prepare, linear=reference.linear)
    mine = torch.utils._pytree.tree_map(torch.clone, state)
    for _ in range(3):
        state, output = step(model, params, state, kernels=reference, drafter=drafter)
        after, told = step(model, params, mine, kernels=own, drafter=drafter)
        assert equal(told.draft_token_ids, output.draft_token_ids)
        assert equal(after.ledger.drafts[:-1], state.ledger.drafts[:-1])
        for name in ("kv", "token_ids", "ledger", *(["draft_probs"] if draws else [])):
            pairs = zip(*(tree_flatten(getattr(s, name))[0] for s in (mine, after)), strict=True)
            assert all(a.data_ptr() == b.data_ptr() for a, b in pairs)
        mine = after


@pytest.mark.parametrize("world", WORLDS)
@pytest.mark.parametrize(("kind", "draws"), [*product(KINDS, [False]), ("eagle", True)])
def test_a_step_with_a_drafter_in_four_worlds(
    world: str, kind: str, draws: bool, unchecked_records: None
) -> None:
    """Eager = vmap over a batch of one = a make_fx trace = one compiled graph."""
    model, params, drafter = of_kind(kind, 2, draws=draws)
    requests = [(prompt, RANDOM if draws else GREEDY) for prompt, _ in PROMPTS]
    state = laid_out(begun(model, params, drafter, requests), 2)

    def function(params: Params, state: Any) -> Any:
        return step(model, params, state, kernels=reference, drafter=drafter)

    with torch.no_grad():
        eager, other = function(params, state), WORLDS[world](function)(params, state)
    (leaves, structure), (others, other_structure) = tree_flatten(eager), tree_flatten(other)
    assert structure == other_structure
    for ours, theirs in zip(leaves, others, strict=True):
        torch.testing.assert_close(theirs, ours, rtol=1e-12, atol=1e-12)


@each_kind
def test_drafts_end_where_blocks_do(kind: str) -> None:
    """A drafter with keys of its own stops at the end of its blocks, and no step reads what lies behind."""
    model, params, drafter = of_kind(kind, 3)
    state = begun(model, params, drafter, PROMPTS)
    known = state.ledger.num_known_tokens
    full = replace(
        state,
        room=torch.where(torch.arange(4) < 3, known + 1, state.room).to(torch.int32),
        kv=tuple(torch.cat([kv[:1], torch.where(kv[1:] == 0, torch.nan, kv[1:])]) for kv in state.kv),
    )
    _, output = step(model, params, laid_out(full, 3), kernels=reference, drafter=drafter)
    assert (output.sampled_token_ids[:, 0] >= 0).all() and not output.has_nan.any()
    _, told = step(model, params, laid_out(state, 3), kernels=reference, drafter=drafter)
    stays = output.draft_token_ids >= 0
    same_history = (output.sampled_token_ids == told.sampled_token_ids).all(-1)
    assert (output.draft_token_ids == told.draft_token_ids)[stays & same_history[:, None]].all()
    assert (told.draft_token_ids >= 0).all()
    if kind != "medusa":
        assert not stays.all()


def test_unfitting_drafters_are_refused() -> None:
    other, _ = small_model(1, hidden=6)
    foreign = replace(other, vocab_size=12)
    wrong: list[Any] = [
        lambda: draft_model(TARGET, other, num_drafts=0),
        lambda: draft_model(TARGET, foreign, num_drafts=2),
        lambda: draft_model(TARGET, other, num_drafts=2, group=1),
        lambda: eagle(TARGET, small_config(1, hidden=16), num_drafts=2),
        lambda: eagle(TARGET, small_config(1), num_drafts=0),
        lambda: eagle(replace(TARGET, head=None), small_config(1), num_drafts=2),
        lambda: medusa(num_drafts=0),
        lambda: eagle3(TARGET, small_config(1), layers=(0, 2), num_drafts=2),
        lambda: eagle3(TARGET, small_config(2), layers=(0, 1), num_drafts=2),
        lambda: eagle3(TARGET, small_config(1), layers=(), num_drafts=2),
        lambda: tapped(TARGET, (0, 2)),
    ]
    for make in wrong:
        with pytest.raises(DrafterError):
            make()


def test_a_tapped_target_computes_what_it_did() -> None:
    """Its hidden states are followed by those that the layers were given; the first layer was given embeddings."""
    state = laid_out(begun(*of_kind("eagle-3", 2), PROMPTS), 2)
    plain = execute(TARGET, WEIGHTS, state, kernels=reference)
    ours = execute(tapped(TARGET, (0, 1)), WEIGHTS, state, kernels=reference)
    assert equal(ours.logits, plain.logits) and equal(
        ours.hidden_states[:, :8].contiguous(), plain.hidden_states
    )
    assert ours.hidden_states.shape[1] == 24
    embedded = WEIGHTS.tree["embed"][plain.inputs.input_ids.long()]
    assert equal(ours.hidden_states[:, 8:16].contiguous(), embedded)


def test_a_target_that_was_not_tapped_is_refused() -> None:
    _, params, drafter = of_kind("eagle-3", 2)
    with pytest.raises(DrafterError, match=r"8 columns.*tapped"):
        begun(with_drafter(TARGET, drafter), params, drafter, PROMPTS)


def test_a_state_that_was_not_made_for_the_drafter_is_refused() -> None:
    model, params, drafter = of_kind("eagle", 2, draws=True)
    state = begun(model, params, drafter, PROMPTS)
    with pytest.raises(DrafterError, match="2 tokens a request, and the state has places for 3"):
        wider = replace(state.ledger, drafts=state.ledger.drafts.new_full((4, 3), -1))
        step(model, params, laid_out(replace(state, ledger=wider), 2), kernels=reference, drafter=drafter)
    with pytest.raises(DrafterError, match="equip"):
        step(model, params, laid_out(replace(state, draft_probs=None), 2), kernels=reference, drafter=drafter)


def test_sampling_params_of_a_chunk_do_not_matter() -> None:
    """A prompt in chunks leaves the drafter where a whole one leaves it."""
    for kind in KINDS:
        model, params, drafter = of_kind(kind, 3)
        prompt = tuple((3 * i) % VOCAB for i in range(9))
        whole = begun(model, params, drafter, [(prompt, SamplingParams(temperature=0, ignore_eos=True))])
        chunked = in_chunks(model, params, drafter, prompt, 4)
        assert chunked.ledger.drafts[0].tolist() == whole.ledger.drafts[0].tolist()


def in_chunks(model: Model, params: Params, drafter: Drafter, prompt: tuple[int, ...], size: int) -> Any:
    from tests.speculation import limits_of
    from tests.tiny import Loop, cached_requests, new_request, scheduled

    loop = Loop(model, params, limits_of(model, 1, num_drafts=drafter.num_drafts), drafter=drafter)
    new = new_request("x", prompt, (tuple(range(1, 13)),), GREEDY)
    loop.step(scheduled(new, counts={"x": size}))
    done = size
    while done < len(prompt):
        count = min(size, len(prompt) - done)
        assert (loop.state.ledger.drafts[0] == -1).all()
        loop.step(scheduled(cached=cached_requests(loop.batch, "x"), counts={"x": count}))
        done += count
    return loop.state
