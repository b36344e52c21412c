"""Steps with a drafter, driven without a host: one layout that may verify all drafts, run until all have ended."""

from collections.abc import Sequence

import torch

from purestep.kernels.reference import reference
from purestep.kernels.types import Kernels
from purestep.pure.models.config import AttentionConfig, ModelConfig, RopeConfig
from purestep.pure.models.llama import llama
from purestep.pure.models.model import Model
from purestep.pure.models.names import from_hf_names, hf_shapes
from purestep.pure.record import replace
from purestep.pure.records.drafter import Drafter
from purestep.pure.records.layout import Layout, LayoutBounds, bucket
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.params import Params
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.state import StepState
from purestep.pure.step import step
from tests.speculation import history, prefilled, run_plain

VOCAB = 11
GREEDY = SamplingParams(temperature=0, ignore_eos=True, max_tokens=17)
RANDOM = SamplingParams(seed=3, temperature=0.8, ignore_eos=True, max_tokens=17)

Requests = Sequence[tuple[Sequence[int], SamplingParams]]
PROMPTS: Requests = [((1, 2, 3, 1, 2), GREEDY), ((4, 5), GREEDY), ((7,), GREEDY)]


def small_config(num_layers: int, *, hidden: int = 8, vocab: int = VOCAB) -> ModelConfig:
    return ModelConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=12,
        num_layers=num_layers,
        attention=AttentionConfig(num_heads=2, num_kv_heads=1, head_dim=4),
        rope=RopeConfig(),
        rms_norm_eps=1e-6,
        tied_embeddings=False,
        max_position_embeddings=64,
    )


def small_model(num_layers: int, *, hidden: int = 8, seed: int = 0, std: float = 0.7) -> tuple[Model, Params]:
    """A random model in float64."""
    config, generator = small_config(num_layers, hidden=hidden), torch.Generator().manual_seed(seed)
    shapes = hf_shapes(config)
    tensors = {n: torch.randn(s, generator=generator, dtype=torch.float64) * std for n, s in shapes.items()}
    return llama(config, name=f"small {seed}"), Params(from_hf_names(config, tensors))


def laid_out(state: StepState, num_drafts: int) -> StepState:
    """All rows run, each with as many drafts as it has."""
    reqs = state.token_ids.shape[0] - 1
    longest = int(state.ledger.num_known_tokens.max()) + num_drafts
    bounds = LayoutBounds(
        num_reqs=reqs,
        num_tokens=reqs * (1 + num_drafts),
        max_query_len=1 + num_drafts,
        max_seq_len=bucket(longest),
        sampler=state.layout.bounds.sampler,
        num_drafts=num_drafts,
    )
    starts = torch.arange(reqs + 1, dtype=torch.int32) * (1 + num_drafts)
    return replace(state, layout=Layout(torch.arange(reqs, dtype=torch.int32), starts, bounds))


def begun(
    model: Model, params: Params, drafter: Drafter, requests: Requests, *, max_model_len: int = 48
) -> StepState:
    """Requests whose prompts are computed, with their first drafts."""
    return prefilled(
        model, params, requests, num_drafts=drafter.num_drafts, max_model_len=max_model_len, drafter=drafter
    )


def drafted_run(
    model: Model, params: Params, state: StepState, drafter: Drafter, *, kernels: Kernels = reference
) -> tuple[StepState, list[StepOutput]]:
    """The state once no row is active, and the outputs on the way."""
    outputs, rows = list[StepOutput](), state.token_ids.shape[0] - 1
    while bool(state.ledger.active[:rows].any()):
        assert len(outputs) < 60, "nothing goes on"
        state, output = step(
            model, params, laid_out(state, drafter.num_drafts), kernels=kernels, drafter=drafter
        )
        outputs.append(output)
    return state, outputs


def check_greedy(model: Model, params: Params, drafter: Drafter, requests: Requests = PROMPTS) -> float:
    """Tokens of plain steps come out; the share of drafts that stood."""
    start = begun(model, params, drafter, requests)
    end, outputs = drafted_run(model, params, start, drafter)
    truth = run_plain(model, params, prefilled(model, params, requests, num_drafts=0))
    for row in range(len(requests)):
        assert history(end, row) == history(truth, row)
    return acceptance(start, outputs)


def acceptance(start: StepState, outputs: Sequence[StepOutput]) -> float:
    """The share of drafts that stood, over a run that began with the drafts of `start`."""
    assert start.ledger.drafts is not None
    given = int((start.ledger.drafts[:-1] >= 0).sum())
    stood = 0
    for output in outputs:
        stood += int((output.sampled_token_ids >= 0).sum() - (output.sampled_token_ids[:, 0] >= 0).sum())
        given += int((output.draft_token_ids >= 0).sum())
    return stood / max(given, 1)
