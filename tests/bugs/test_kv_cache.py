"""What lies in the KV cache: written by who owns it, made by the weights in use."""

import torch

from purestep.kernels.donating import donating
from purestep.kernels.reference import reference
from purestep.pure.models.initialize import random_params
from purestep.pure.padding import pad_batch
from purestep.pure.plan import plan_step
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.dispatch import CUDAGraphMode
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.settle import settle
from purestep.pure.step import execute, sample, unroll
from purestep.pure.update import update_states
from purestep.state.profile import dummy_run
from tests.bugs.tiny_engine import CONFIG, GREEDY, alone, drained, engine
from tests.laws import assert_frame, with_canary, written_slots
from tests.state.fake_graphs import FakeGraphs
from tests.tiny import Loop, cached_requests, decode, new_request, scheduled, tiny_llama


def test_padding_writes_no_block_that_a_request_holds() -> None:
    """5 tokens padded to 8, while a request holds the cache's last block: no slot but those 5 changes."""
    model, params = tiny_llama()
    limits = BatchLimits(3, 32, 16, (4,), (8,))
    for kernels in (reference, donating):
        loop = Loop(model, params, limits, kernels=kernels)
        loop.state = with_canary(loop.state, 1e9)
        loop.step(scheduled(new_request("owner", (1, 2, 3, 4, 5), ((6, 7),)), counts={"owner": 5}))
        batch = update_states(
            loop.batch,
            scheduled(
                new_request("b", (4, 3, 2, 1), ((1,),)),
                cached=cached_requests(loop.batch, "owner"),
                counts={"b": 4, "owner": 1},
            ),
        )
        padded = pad_batch(batch, BatchDescriptor(num_tokens=8, num_reqs=3))
        plan = plan_step(padded, loop.absorbed)
        before = replace(loop.state, kv=tuple(kv.clone() for kv in loop.state.kv))

        executed = execute(model, params, replace(loop.state, inbox=plan.inbox.to("cpu")), kernels=kernels)
        after, output = sample(executed, kernels=kernels)

        slots = written_slots(after, executed.inputs)
        assert [len(group) for group in slots] == [5]
        assert_frame(before, after, slots)
        assert (settle(batch, batch, output).columns.num_computed_tokens_settled[[0, 1]] == [6, 4]).all()


def test_a_row_that_outruns_its_blocks_writes_no_block_of_another_request() -> None:
    """Its row had more blocks when another request sat there, and they are its neighbour's now: it idles."""
    model, params = tiny_llama()
    limits = BatchLimits(2, 32, 16, (4,), (8,))
    for kernels in (reference, donating):
        loop = Loop(model, params, limits, kernels=kernels)
        loop.step(scheduled(new_request("before", (1, 2, 3, 4, 5), ((1, 2, 3, 4),)), counts={"before": 5}))
        new = new_request("a", (1, 2, 3), ((5,),)), new_request("b", (4, 3, 2, 1), ((2, 3, 4),))
        loop.step(scheduled(*new, counts={"a": 3, "b": 4}, finished=("before",)))
        batch = decode(loop.batch, "a", "b")
        state = replace(loop.state, inbox=plan_step(batch, loop.absorbed).inbox.to("cpu"))
        full = [kv[2].clone() for kv in state.kv]  # b's first block

        with torch.no_grad():
            after, outputs = unroll(model, params, state, 6, kernels=kernels)

        assert [output.sampled_token_ids[0].item() >= 0 for output in outputs] == [True] + [False] * 5
        assert all(torch.equal(kv[2], old) for kv, old in zip(after.kv, full, strict=True))
        assert after.ledger.num_computed_tokens.tolist()[:2] == [4, 10]


def test_new_weights_never_meet_keys_and_values_of_old_ones() -> None:
    """The same prompt again after an update, and one that runs on: log-probabilities of a fresh engine."""
    prompt = tuple(range(16))
    other = random_params(CONFIG, seed=2, std=0.5)
    wanted = replace(GREEDY, logprobs=5)
    with engine() as own:
        own.generate(prompt, wanted, progress=False)
        own.add_request("running", prompt[:9], wanted)
        own.step()
        (before,) = own.step()
        own.update_weights(other)
        again = own.generate(prompt, wanted, progress=False)[0]
        running = drained(own)["running"]

    fresh = alone(prompt, wanted, params=other)
    rest = alone(prompt[:9] + before.token_ids, replace(wanted, max_tokens=4), params=other)
    assert again.num_cached_tokens == 0
    assert again.token_ids == fresh.token_ids
    assert again.logprobs is not None and fresh.logprobs is not None
    torch.testing.assert_close(
        torch.from_numpy(again.logprobs.logprobs),
        torch.from_numpy(fresh.logprobs.logprobs),
        rtol=0,
        atol=1e-4,
    )
    assert running.token_ids == before.token_ids + rest.token_ids
    assert alone(prompt, wanted).token_ids != fresh.token_ids, "these weights are no others"


def test_scales_are_made_of_the_first_real_step_and_never_again() -> None:
    """Behind captures and made-up batches, before graphs: those of an engine that did nothing else before."""
    prompts, how = ((5, 9, 2, 7, 1), (1, 2)), {"kv_cache_dtype": "fp8", "calculate_kv_scales": True}
    found = []
    for warmed in (False, True):
        api = FakeGraphs() if warmed else None
        graphs = {"cudagraph_mode": CUDAGraphMode.FULL, "capture_sizes": (1, 2, 8), "graph_api": api}
        with engine(**how, **(graphs if warmed else {})) as own:
            if warmed:
                dummy_run(own.turns.bound, 4, context=3)
            results = [own.generate(prompt, GREEDY, progress=False)[0].token_ids for prompt in prompts]
            assert api is None or api.num_replays == 2 * GREEDY.max_tokens - 1  # every step but the first
            found.append((results, own.turns.now.leased.value.kv_scales.tolist()))
        with engine(**how) as other:
            other.generate(prompts[0], GREEDY, progress=False)
            alone_first = other.turns.now.leased.value.kv_scales.tolist()
        assert found[-1][1] == alone_first
    assert found[0] == found[1]
    assert all(scale not in (0.0, 1.0) for layer in found[0][1] for scale in layer)
