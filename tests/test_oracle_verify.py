"""Steps that verify drafts against what upstream's rejection sampler and index vectors were for the same inputs."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from purestep.kernels.reference import reference
from purestep.pure.record import replace
from purestep.pure.records.noise import ACCEPT, DRAW, RECOVER
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.sampling import sample_tokens
from purestep.pure.spec_decode import spec_decode_metadata
from tests.laws import assert_pure
from tests.sampling_stage import Asker, executed
from tests.test_oracle_sampling import oracle_case

Case = dict[str, Any]
VECTORS = (
    *("draft_token_ids", "cu_num_draft_tokens", "cu_num_sampled_tokens"),
    *("target_logits_indices", "bonus_logits_indices", "logits_indices"),
)


def test_spec_decode_metadata(oracle_dir: Path) -> None:
    cases = json.loads((oracle_dir / "spec_decode_metadata.json").read_text())
    assert len(cases) == 72
    for case in cases:
        counts, ends = (np.array(case[n], np.int32) for n in ("num_draft_tokens", "cu_num_scheduled_tokens"))
        found = assert_pure(
            spec_decode_metadata, counts, ends, np.arange(5000, 5000 + ends[-1], dtype=np.int32)
        )
        assert {name: getattr(found, name).tolist() for name in VECTORS} == case["out"]
        assert found.num_draft_tokens == tuple(case["num_draft_tokens"])
        assert found.max_spec_len == max(case["num_draft_tokens"])


def recorded_noise(case: Case) -> dict[int, Tensor]:
    """Uniform noise by purpose, in upstream's order of draws: bonus tokens, acceptance, recovered tokens."""
    torch.manual_seed(case["global_seed"])
    counts, num_reqs, vocab = case["num_draft_tokens"], case["B"], case["V"]
    generators = {int(row): torch.Generator().manual_seed(seed) for row, seed in case["seeds"].items()}

    def exponential(rows: list[int], *, always: bool) -> Tensor:
        values = torch.empty(num_reqs, vocab)
        if always or len(generators) != num_reqs:
            values.exponential_()
        for row in rows:
            values[row].exponential_(generator=generators[row])
        return values

    bonus = exponential(list(generators), always=False)
    accept = torch.rand(sum(counts), dtype=torch.float64)
    for row, own in enumerate(accept.split(counts)):
        if counts[row] and row in generators:
            own.uniform_(generator=generators[row])
    recover = exponential([row for row in generators if counts[row]], always=True)
    assert torch.equal(accept, case["uniform"])
    padded = torch.full((num_reqs, max(counts, default=0)), 0.5, dtype=torch.float64)
    for row, own in enumerate(accept.split(counts)):
        padded[row, : len(own)] = own
    noise = {DRAW: bonus, RECOVER: recover}
    return {ACCEPT: padded.reshape(-1, 1)} | {p: (-own.to(torch.float64)).exp() for p, own in noise.items()}


def params_of(case: Case, row: int) -> SamplingParams:
    cuts = {name: case[name][row].item() for name in ("top_k", "top_p") if name in case}
    return SamplingParams(
        temperature=case["temperature"][row],
        logprobs=case["num_logprobs"],
        ignore_eos=True,
        max_tokens=None,
        **cuts,
    )


@pytest.mark.parametrize("index", range(36))
def test_rejection_sampler(oracle_dir: Path, index: int) -> None:
    """From raw logits, with the recorded noise: the recorded tokens, and what is told of them."""
    case = oracle_case(oracle_dir, "rejection_forward", index, 36)
    counts, most = case["num_draft_tokens"], max(case["num_draft_tokens"])
    starts = np.cumsum([0, *(count + 1 for count in counts)])
    rows = [
        start + min(place, count)
        for start, count in zip(starts, counts, strict=False)
        for place in range(most + 1)
    ]
    drafts = torch.full((case["B"], most), -1, dtype=torch.int32)
    for row, own in enumerate(case["draft_token_ids"].split(counts)):
        drafts[row, : len(own)] = own
    given = executed([Asker(params_of(case, row)) for row in range(case["B"])], case["logits"][: case["B"]])
    layout = given.state.layout
    bounds = replace(layout.bounds, num_drafts=most)
    # Stated probabilities have drafts judged by chance, as it was recorded: these are certain.
    probs = torch.zeros(given.state.token_ids.shape[0], most, case["logits"].shape[-1])
    row, place = torch.nonzero(drafts >= 0, as_tuple=True)
    probs[layout.row_of_index[row], place, drafts[row, place].long()] = 1.0
    given = replace(
        given,
        state=replace(given.state, layout=replace(layout, bounds=bounds), draft_probs=probs),
        inputs=replace(given.inputs, drafts=drafts),
        logits=case["logits"][rows],
    )
    kernels = reference
    if not all(temperature < 1e-5 for temperature in case["temperature"]):
        noise = recorded_noise(case)
        kernels = replace(reference, uniforms=lambda *args, purpose, width: noise[purpose])
    tokens = sample_tokens(given, kernels=kernels)
    assert torch.equal(tokens.token_ids, case["out"])
    assert not tokens.has_nan.any()
    told = tokens.logprobs_tensors
    assert (told is None) == (case["num_logprobs"] is None)
    if told is not None:
        kept = (tokens.token_ids >= 0).flatten()
        torch.testing.assert_close(told.logprobs[kept], case["out_lp"], rtol=1e-6, atol=2e-6)
        assert torch.equal(told.selected_token_ranks[kept], case["out_ranks"])
        assert torch.equal(told.logprob_token_ids[kept], case["out_lp_ids"])
