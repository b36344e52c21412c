"""Going back: to the old record, all of it, and to nothing that came later."""

from purestep.pure.record import replace
from purestep.pure.records.sampling_params import SamplingParams
from tests.bugs.tiny_engine import GREEDY, alone, drained, engine

PROMPT = (40, 8, 22, 17, 5, 6, 30, 2, 9)
# What the discarded steps would leave: counted outputs, draws, stop ids until min_tokens, a shorter way to the limit.
PARAMS = SamplingParams(
    seed=3,
    max_tokens=12,
    frequency_penalty=0.6,
    repetition_penalty=1.2,
    min_tokens=6,
    stop_token_ids=range(0, 64, 5),
)


def test_steps_that_are_discarded_leave_nothing_behind() -> None:
    """Taken at any step, two or more later ones discarded: what follows is what follows without them."""
    expected = alone(PROMPT, PARAMS).token_ids
    for steps_ahead in (0, 1):
        for num_steps in range(1, 7):
            with engine(steps_ahead=steps_ahead) as own:
                own.add_request("r", PROMPT, PARAMS)
                for _ in range(num_steps):
                    own.step()
                with own.remember() as moment:
                    for num_discarded in (2, 4):
                        for _ in range(num_discarded):
                            own.step()
                        own.rewind(moment)
                    assert drained(own)["r"].token_ids == expected


def test_what_a_moment_refers_to_is_nobodys_to_overwrite() -> None:
    """Its request ends and all other blocks are written over: keys and values of the moment are still there."""
    params = replace(GREEDY, max_tokens=10)
    expected = alone(PROMPT, params).token_ids
    with engine(kv_cache_bytes=16 * 1024, enable_prefix_caching=False) as own:
        own.add_request("r", PROMPT, params)
        for _ in range(4):
            own.step()
        moment = own.remember()
        own.abort("r")
        for i in range(3):
            own.generate([range(i, 20 + i), range(i + 1, 16 + i)], GREEDY, progress=False)
        own.rewind(moment)
        assert drained(own)["r"].token_ids == expected


def test_two_histories_that_part_in_the_midst_of_a_block_do_not_meet_in_it() -> None:
    """A fork with draws of its own beside its parent, both behind one open block; then the moment before, again."""
    params = replace(PARAMS, stop_token_ids=(), min_tokens=0)
    expected = alone(PROMPT, params).token_ids
    with engine(enable_prefix_caching=False) as own:
        own.add_request("r", PROMPT, params, stream=0)
        for _ in range(3):
            own.step()
        moment = own.remember()
        for _ in range(2):
            own.fork("r", "other", stream=7)
            results = drained(own)
            assert results["r"].token_ids == expected
            assert results["other"].token_ids != expected
            own.rewind(moment)


def test_a_fork_gets_the_token_that_was_on_its_way_to_its_parent() -> None:
    for steps_ahead in (0, 1, 2):
        with engine(steps_ahead=steps_ahead) as own:
            own.add_request("r", PROMPT, PARAMS, stream=0)
            for _ in range(4):
                own.step()
            own.fork("r", "same", keep_stream=True)
            results = drained(own)
            assert results["same"].token_ids == results["r"].token_ids == alone(PROMPT, PARAMS).token_ids
