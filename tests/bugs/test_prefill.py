"""Where computing begins and when a token is kept: decided by what is computed, never by what was said before."""

from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.scheduler_output import CachedRequestData, SchedulerOutput
from purestep.pure.update import update_states
from tests.bugs.tiny_engine import BLOCK_SIZE, GREEDY, alone, drained, engine
from tests.tiny import Loop, column, new_request, scheduled, tiny_llama

PROMPT = (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8)


def test_a_fully_cached_prompt_computes_its_last_token_and_changes_no_cached_block() -> None:
    """A prompt of whole blocks, all of them cached: one token runs, and the shared blocks keep every bit."""
    for num_blocks in (1, 2, 3):
        prompt = PROMPT[: num_blocks * BLOCK_SIZE]
        with engine() as own:
            first = own.generate(prompt, GREEDY, progress=False)[0]
            cached = [block for block, _ in own._turns.now.queue.pools[0].key_of.items()]
            before = [kv[cached].clone() for kv in own._turns.now.leased.value.kv]

            own.add_request("again", prompt, GREEDY)
            own.step()
            batch = own._turns.now.batch

            assert batch.layout.bounds.num_tokens == 1
            assert batch.columns.num_computed_tokens_settled[batch.row_of["again"]] == len(prompt)
            again = drained(own)["again"]
            after = [kv[cached] for kv in own._turns.now.leased.value.kv]
        assert again.num_cached_tokens == len(prompt) - 1
        assert again.token_ids == first.token_ids
        assert len(cached) >= num_blocks
        assert all(bool((a == b).all()) for a, b in zip(after, before, strict=True))


def test_a_preempted_request_computes_its_whole_history_again() -> None:
    """Whatever prompt and wherever it is thrown out: its tokens are those of a run without interruption."""
    for num_prompt in (3, 4, 8):
        expected = alone(PROMPT[:num_prompt], GREEDY).token_ids
        for num_outputs in range(1, 5):
            with engine() as own:
                own.add_request("r", PROMPT[:num_prompt], GREEDY)
                for _ in range(num_outputs):
                    own.step()
                own.update_weights(own.params)  # keys and values are void, the tokens stay
                own.step()

                assert own._turns.now.batch.layout.bounds.num_tokens == num_prompt + num_outputs
                assert drained(own)["r"].token_ids == expected


def test_a_resumed_request_keeps_no_token_before_its_whole_history_is_computed() -> None:
    """Prompt of 6, 5 outputs, thrown out, back in chunks of 4, 4 and 3: only the last chunk's token counts."""
    model, params = tiny_llama()
    loop = Loop(model, params, BatchLimits(2, 32, 16, (4,), (20,)))
    loop.step(scheduled(new_request("r", PROMPT[:6], ((1, 2, 3, 4),)), counts={"r": 6}))
    for _ in range(4):
        loop.decode("r")
    loop.decode("r")
    expected = loop.tokens("r")

    for chunks in ((4, 4, 3), (6, 5), (11,), (1,) * 11):
        loop.batch = update_states(loop.batch, SchedulerOutput.make_empty())
        kept, start = [], 0
        for num_tokens in chunks:
            cached = CachedRequestData(("r",), column(start), column(5))
            if not start:
                blocks = {"r": ((5, 6, 7, 8),)}
                cached = replace(cached, new_block_ids=blocks, resumed_req_ids=frozenset(blocks))
            output = loop.step(scheduled(cached=cached, counts={"r": num_tokens}))
            kept.append(int(output.sampled_token_ids[0, 0]))
            start += num_tokens

        assert kept == [-1] * (len(chunks) - 1) + expected[-1:]
        assert loop.tokens("r") == expected
