"""A logits processor knows the prompt and the accepted outputs, and a rollout says what its cuts left."""

from itertools import product

import numpy as np
import torch
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.pure.record import replace
from purestep.pure.records.logits_processor import History, LogitsProcessor
from purestep.pure.records.sampling_params import SamplingParams
from tests.bugs.tiny_engine import GREEDY, alone, drained, engine
from tests.sampling_stage import Asker, sampled
from tests.state.fake_graphs import FakeGraphs

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5)
FORCED = 33


def forces(logits: Tensor, history: History, params: dict[str, Tensor]) -> Tensor:
    """One token and no other at one place of the outputs."""
    now = history.lengths - history.prompt_lengths == params["place"]
    others = torch.arange(logits.shape[1], device=logits.device) != params["token"][:, None]
    return logits.masked_fill(now[:, None] & others, float("-inf"))


def forcing(place: int, token: int = FORCED) -> SamplingParams:
    processor = LogitsProcessor(forces, {"place": place, "token": token})
    return replace(GREEDY, logits_processors=[processor])


def forced_in_python(place: int) -> tuple[int, ...]:
    """What greedy decoding gives if it is begun again behind the forced token."""
    before = alone(PROMPT, replace(GREEDY, max_tokens=max(place, 1))).token_ids[:place]
    said = (*before, FORCED)
    rest = GREEDY.max_tokens or 0
    rest -= len(said)
    return said + (alone(PROMPT + said, replace(GREEDY, max_tokens=rest)).token_ids if rest else ())


def test_a_processor_counts_accepted_outputs_and_nothing_else() -> None:
    """Chunks whose token is thrown away, preemption after 2 outputs, a step ahead: the same place is forced."""
    for place, budget, thrown_out, ahead in product((0, 2, 3), (4, 64), (None, 2), (0, 1)):
        with engine(max_num_batched_tokens=budget, steps_ahead=ahead) as own:
            own.add_request("plain", PROMPT, GREEDY)
            own.add_request("forced", PROMPT, forcing(place))
            outputs, results = 0, {}
            while own.has_unfinished():
                for result in own.step():
                    results[result.req_id] = result
                outputs = len(results["forced"].token_ids) if "forced" in results else 0
                if outputs == thrown_out:
                    own.update_weights(own.params)  # keys and values are void, the tokens stay
                    thrown_out = None
        assert results["forced"].token_ids == forced_in_python(place)
        assert results["plain"].token_ids == alone(PROMPT, GREEDY).token_ids


def test_a_fork_and_a_moment_know_their_own_outputs() -> None:
    expected = forced_in_python(3)
    with engine() as own:
        own.add_request("r", PROMPT, forcing(3))
        own.step()
        own.step()
        own.fork("r", "twin")
        moment = own.remember()
        for _ in range(2):
            assert {name: result.token_ids for name, result in drained(own).items()} == {
                "r": expected,
                "twin": expected,
            }
            own.rewind(moment)


def test_processors_run_behind_captured_executions() -> None:
    """Padded, beside requests that have none and others: each gets what it gets alone."""
    with engine(graph_api=FakeGraphs(), capture_progress=False) as own:
        results = own.generate([PROMPT] * 3, [forcing(2), GREEDY, forcing(1, token=7)], progress=False)
    assert results[0].token_ids == forced_in_python(2)
    assert results[1].token_ids == alone(PROMPT, GREEDY).token_ids
    assert results[2].token_ids[1] == 7


def test_the_kept_mass_is_what_separates_a_rollout_from_its_trainer() -> None:
    """Random logits: processed - raw at temperature = -log(mass); and an engine tells of the same step."""
    params = SamplingParams(
        temperature=0.7, top_k=9, top_p=0.8, min_p=0.02, logprobs=0, logprobs_mode="processed_logprobs",
        kept_mass=True, max_tokens=None,
    )  # fmt: skip
    table = 3 * torch.randn(16, 40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    tokens = sampled([Asker(params, stream=i) for i in range(16)], table, kernels=reference)
    assert tokens.kept_mass is not None and tokens.logprobs_tensors is not None
    whole = (table / 0.7).log_softmax(-1).gather(1, tokens.token_ids[:, None].long())[:, 0]
    processed = tokens.logprobs_tensors.logprobs[:, 0]
    assert (tokens.kept_mass.log_mass < 0).all()
    assert (processed - whole + tokens.kept_mass.log_mass).abs().max() < 1e-6
    assert (tokens.kept_mass.drawn_logprobs - processed).abs().max() < 1e-6

    rollout = replace(params, max_tokens=5, seed=3)
    told = alone(PROMPT, rollout)
    whole_only = replace(rollout, top_k=0, top_p=1.0, min_p=0.0, logprob_token_ids=told.token_ids)
    scored = [
        alone(PROMPT + told.token_ids[:i], replace(whole_only, max_tokens=1)).id_logprobs for i in range(5)
    ]
    own = np.array([row[0, i] for i, row in enumerate(scored) if row is not None])
    assert told.kept_mass is not None and told.logprobs is not None
    np.testing.assert_allclose(told.kept_mass.drawn_logprobs + told.kept_mass.log_mass, own, atol=1e-5)
    np.testing.assert_allclose(told.logprobs.logprobs[:, 0], told.kept_mass.drawn_logprobs, atol=1e-6)
