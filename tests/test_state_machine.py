"""Any order of arrivals, steps, late outputs, aborts, losses, forks and moments, in two worlds: `Worlds` has the laws.

Two machines do the same. One runs a toy model whose tokens are foretold in plain Python, so that integers are all that
can go wrong; the other runs a small Llama in float64 and compares each request with its run alone.
"""

from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    precondition,
    rule,
    run_state_machine_as_test,
)

from purestep.pure.models.model import Model
from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.params import Params
from purestep.pure.records.queue import Request, SchedulerConfig
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.sampling_rows import stop_ids_of
from purestep.pure.records.scheduler_output import SchedulerOutput
from purestep.pure.rows import with_entries
from purestep.pure.scheduler.rows import length_limit
from tests import toy_model
from tests.profiles import examples
from tests.tiny import Loop, new_request, scheduled, tiny_llama
from tests.worlds import Streams, Worlds

IDS = tuple("abcde")
EOS = (0,)
LONGEST_PROMPT, LONGEST = 12, 24
NAN = float("nan")

# Prompts are beginnings of these, so that they meet in the prefix cache.
TEXTS = (
    (3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8),
    (3, 1, 4, 1, 5, 9, 7, 7, 7, 7, 7, 7),
    (2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5),
)

GREEDY = (
    SamplingParams(temperature=0.0, max_tokens=1),
    SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
    SamplingParams(temperature=0.0, max_tokens=None),
    SamplingParams(temperature=0.0, max_tokens=12, min_tokens=3, stop_token_ids=(3, 5)),
    SamplingParams(
        temperature=0.0, max_tokens=6, stop_token_ids=tuple(range(1, 10)), min_tokens=2, logprobs=2
    ),
)
SAMPLED = (
    *GREEDY,
    SamplingParams(seed=3, temperature=0.8, top_k=5, max_tokens=8, logprobs=3),
    SamplingParams(
        seed=4, top_p=0.7, min_p=0.02, max_tokens=8, repetition_penalty=1.4, frequency_penalty=0.3
    ),
    SamplingParams(
        seed=5,
        max_tokens=10,
        ignore_eos=True,
        logit_bias={2: 4.0, 7: -3.0},
        bad_words_token_ids=((2, 2), (5,)),
        logprobs=0,
        logprobs_mode="processed_logprobs",
    ),
    SamplingParams(temperature=0.0, max_tokens=8, presence_penalty=0.5, allowed_token_ids=(1, 2, 3, 4, 9)),
)


@st.composite
def configs(draw: Any, num_groups: int, num_drafts: Sequence[int]) -> SchedulerConfig:
    """Small caches, so that they overflow, and small budgets, so that prompts come in chunks."""
    sizes = [draw(st.sampled_from([1, 2, 4])) for _ in range(num_groups)]
    tokens = draw(st.sampled_from([14, 10, 20, 32]))  # that the cache holds
    return SchedulerConfig(
        num_blocks=tuple(2 + tokens // size for size in sizes),
        block_sizes=tuple(sizes),
        max_num_reqs=draw(st.sampled_from([4, 3, 2])),
        max_num_batched_tokens=draw(st.sampled_from([6, 16, 9, 3])),
        max_model_len=LONGEST,
        enable_prefix_caching=draw(st.sampled_from([True, True, False])),
        block_horizon=draw(st.sampled_from([1, 4])),
        async_scheduling=(is_async := draw(st.booleans())),
        num_spec_tokens=(most := draw(st.sampled_from(num_drafts))),
        drafts_on_device=most > 0 and (is_async or draw(st.booleans())),
    )


def longest(config: SchedulerConfig) -> int:
    """Tokens that a request may grow to."""
    return min(config.max_model_len, config.capacity + 1)


def names_a_stranger(output: SchedulerOutput) -> SchedulerOutput:
    return replace(output, req_ids=("stranger", *output.req_ids[1:]))


def runs_past_the_end(output: SchedulerOutput) -> SchedulerOutput:
    first = np.arange(len(output.req_ids)) == 0
    return replace(
        output, num_scheduled_tokens=output.num_scheduled_tokens + (LONGEST * first).astype(np.int32)
    )


def goes_back_too_far(output: SchedulerOutput) -> SchedulerOutput:
    cached = output.scheduled_cached_reqs
    before = replace(cached, num_computed_tokens=cached.num_computed_tokens - LONGEST)
    new = tuple(replace(r, num_computed_tokens=-1) for r in output.scheduled_new_reqs)
    return replace(output, scheduled_cached_reqs=before, scheduled_new_reqs=new)


class Machine(RuleBasedStateMachine):
    """What happens; `Worlds` knows what must hold."""

    model: ClassVar[Model]
    params: ClassVar[Params]
    choices: ClassVar[tuple[SamplingParams, ...]]
    num_groups: ClassVar[int]
    num_drafts: ClassVar[Sequence[int]] = (0,)
    worlds: Worlds

    @abstractmethod
    def expected(self, request: Request, streams: Streams) -> tuple[int, ...]:
        """The outputs of a request that runs alone; those of a fork come from its ancestors' streams at first."""

    @initialize(
        data=st.data(), canary=st.sampled_from([NAN, 1e9]), lag=st.integers(2, 3), num_reqs=st.integers(2, 4)
    )
    def begin(self, data: st.DataObject, canary: float, lag: int, num_reqs: int) -> None:
        config = data.draw(configs(self.num_groups, self.num_drafts))
        self.worlds = Worlds(
            self.model,
            self.params,
            config,
            expected=self.expected,
            eos_token_ids=EOS,
            canary=canary,
            max_begun=lag if config.async_scheduling else 1,
        )
        self.num_added = 0
        for _ in range(num_reqs):
            self.arrives(data, reuses=False)

    def free_ids(self, *, reuses: bool) -> list[str]:
        """Ids not in use; only those that ended since the last step, if there are any and they are to be reused."""
        free = [req_id for req_id in IDS if req_id not in self.worlds.requests]
        ended = self.worlds.queue.news.finished_req_ids if reuses else ()
        return [req_id for req_id in free if req_id in ended] or free

    @precondition(lambda self: self.free_ids(reuses=False))
    @rule(data=st.data(), reuses=st.booleans())
    def arrives(self, data: st.DataObject, reuses: bool) -> None:
        """A request, under a new id or one that was used before."""
        most = min(LONGEST_PROMPT, self.worlds.config.capacity)
        self.num_added += 1
        self.worlds.add(
            Request(
                req_id=data.draw(st.sampled_from(self.free_ids(reuses=reuses))),
                prompt_token_ids=data.draw(st.sampled_from(TEXTS))[: data.draw(st.integers(1, most))],
                sampling_params=data.draw(st.sampled_from(self.choices)),
                priority=data.draw(st.sampled_from([0, 0, 1])),
                arrival=self.num_added,
                stream=data.draw(st.integers(0, 1)),
                eos_token_ids=EOS,
            )
        )

    @precondition(lambda self: self.worlds.requests and self.free_ids(reuses=False))
    @rule(data=st.data(), stream=st.sampled_from([None, 0, 1, 2]), reuses=st.booleans())
    def forks(self, data: st.DataObject, stream: int | None, reuses: bool) -> None:
        """A request goes on under a second id, from a random stream of its own or from its parent's."""
        parent = data.draw(st.sampled_from(sorted(self.worlds.requests)))
        self.num_added += 1
        req_id = data.draw(st.sampled_from(self.free_ids(reuses=reuses)))
        self.worlds.fork(parent, req_id, arrival=self.num_added, stream=stream)

    @precondition(lambda self: len(self.worlds.moments) < 3)
    @rule()
    def remembers(self) -> None:
        self.worlds.remember()

    @precondition(lambda self: self.worlds.moments)
    @rule(data=st.data())
    def goes_back(self, data: st.DataObject) -> None:
        self.worlds.go_back(data.draw(st.sampled_from(self.worlds.moments)))

    @precondition(lambda self: self.worlds.moments)
    @rule(data=st.data())
    def forgets(self, data: st.DataObject) -> None:
        self.worlds.let_go(data.draw(st.sampled_from(self.worlds.moments)))

    @rule(
        more_tokens=st.sampled_from([0, 0, 1, 5]),
        more_reqs=st.sampled_from([None, None, 1, 3]),
        n=st.integers(1, 6),
    )
    def runs(self, more_tokens: int, more_reqs: int | None, n: int) -> None:
        """Steps, padded by so much; outputs are as late as they may be."""
        for _ in range(n):
            if len(self.worlds.begun) == self.worlds.max_begun:
                self.worlds.settle()
            self.worlds.begin(more_tokens, more_reqs)

    @precondition(lambda self: self.worlds.requests)
    @rule(kind=st.sampled_from(["empty", "too long", "unknown token", "in use"]))
    def is_refused(self, kind: str) -> None:
        """A request that can not be served comes in between."""
        used = min(self.worlds.requests)
        prompts: dict[str, tuple[int, ...]] = {
            "empty": (),
            "too long": (1,) * longest(self.worlds.config),
            "unknown token": (1, self.model.vocab_size),
            "in use": (1,),
        }
        req_id = used if kind == "in use" else "refused"
        self.worlds.refuse(Request(req_id, prompts[kind], GREEDY[0]))

    @precondition(lambda self: self.worlds.requests)
    @rule(wrong=st.sampled_from([names_a_stranger, runs_past_the_end, goes_back_too_far]))
    def contradicts(self, wrong: Callable[[SchedulerOutput], SchedulerOutput]) -> None:
        """The scheduler says what can not be, and is refused."""
        self.worlds.contradict(wrong)

    @precondition(lambda self: self.worlds.begun)
    @rule()
    def learns(self) -> None:
        self.worlds.settle()

    @precondition(lambda self: len(self.worlds.requests) > 1)
    @rule(data=st.data(), is_stopped=st.booleans())
    def ends(self, data: st.DataObject, is_stopped: bool) -> None:
        """The caller stops a request: it is aborted, or its text holds a stop string."""
        req_id = data.draw(st.sampled_from(sorted(self.worlds.requests)))
        (self.worlds.finish if is_stopped else self.worlds.abort)(req_id)

    @precondition(lambda self: len(self.worlds.requests) > 2)
    @rule(die=st.integers(1, 6))
    def may_fail(self, die: int) -> None:
        """A step fails half-way, now and then."""
        if die == 6:
            self.worlds.lose_kv()

    def teardown(self) -> None:
        if hasattr(self, "worlds") and self.worlds.is_sound:
            self.worlds.drain()


class ToyMachine(Machine):
    """Two KV groups that must agree."""

    model, params = toy_model.toy_model((0, 1))
    choices, num_groups = GREEDY, 2

    def expected(self, request: Request, streams: Streams) -> tuple[int, ...]:
        return toy_model.foretold(request, longest(self.worlds.config))[0]


class SpeculatingMachine(ToyMachine):
    """The same with guesses, on the host or on the device, most of them right."""

    num_drafts = (1, 3)


class LlamaMachine(Machine):
    """Every kind of sampling."""

    model, params = tiny_llama(vocab_size=toy_model.VOCAB, groups=(0, 0))
    choices, num_groups = SAMPLED, 1

    def expected(self, request: Request, streams: Streams) -> tuple[int, ...]:
        params, num_prompt = request.sampling_params, len(request.prompt_token_ids)
        most = length_limit(params, num_prompt, longest(self.worlds.config)) - num_prompt
        return alone(request.prompt_token_ids, params, request.stream, streams)[:most]


@cache
def alone(
    prompt: tuple[int, ...], params: SamplingParams, stream: int, before: Streams = ()
) -> tuple[int, ...]:
    """The outputs of a request that has a device for itself, its prompt in one piece.

    Up to so many outputs it draws from the streams before, as the ancestors of a fork do.
    """
    limits = BatchLimits(1, LONGEST, toy_model.VOCAB, (8,), (1 + LONGEST // 8,), EOS)
    loop = Loop(LlamaMachine.model, LlamaMachine.params, limits)
    blocks = (tuple(range(1, 1 + LONGEST // 8)),)
    first = next((own for own, num_outputs in before if num_outputs > 0), stream)
    output = loop.step(
        scheduled(new_request("r", prompt, blocks, params, stream=first), counts={"r": len(prompt)})
    )
    stops, num_stops = stop_ids_of(params, EOS)
    outputs = loop.tokens("r")[len(prompt) :]
    while output.active[0] and not (outputs[-1] in stops[:num_stops] and len(outputs) >= params.min_tokens):
        draws_from = next((own for own, num_outputs in before if num_outputs > len(outputs)), stream)
        loop.batch = with_stream(loop.batch, "r", draws_from)
        output = loop.decode("r")
        outputs = loop.tokens("r")[len(prompt) :]
    return tuple(outputs)


def with_stream(batch: InputBatch, req_id: str, stream: int) -> InputBatch:
    """The batch in which a request draws from another stream from now on."""
    row = batch.row_of[req_id]
    request = batch.rows.requests[row]
    if request is None or request.stream == stream:
        return batch
    requests = with_entries(batch.rows.requests, {row: replace(request, stream=stream)})
    return replace(batch, rows=replace(batch.rows, requests=requests))


def test_a_shared_block_is_copied_and_written_in_one_step(unchecked_records: None) -> None:
    """Its other holder is preempted in that step: the row that shared it reads the copy."""
    config = SchedulerConfig(
        num_blocks=(4, 4), block_sizes=(2, 2), max_num_reqs=3, max_num_batched_tokens=8, max_model_len=LONGEST
    )

    def expected(request: Request, streams: Streams) -> tuple[int, ...]:
        return toy_model.foretold(request, longest(config))[0]

    worlds = Worlds(ToyMachine.model, ToyMachine.params, config, expected=expected)
    for arrival, req_id in enumerate("ab"):
        worlds.add(Request(req_id, TEXTS[0][: 1 + arrival], GREEDY[1], arrival=arrival))
    worlds.begin()
    worlds.settle()
    worlds.fork("a", "c", arrival=2, stream=None)
    worlds.begin()
    assert worlds.batch.block_copies == (((1, 3),), ((1, 3),))
    assert worlds.queue.running.residences[1].blocks[0].tolist() == [2, 1]
    worlds.drain()


@pytest.mark.slow
def test_foretold_tokens_come_in_both_worlds_whatever_happens(unchecked_records: None) -> None:
    run_state_machine_as_test(ToyMachine, settings=examples(1, stateful_step_count=18))


def test_foretold_tokens_come_whatever_is_guessed(unchecked_records: None) -> None:
    run_state_machine_as_test(SpeculatingMachine, settings=examples(0.3, stateful_step_count=25))


def test_every_request_gets_in_both_worlds_what_it_gets_alone(unchecked_records: None) -> None:
    run_state_machine_as_test(LlamaMachine, settings=examples(0.06, stateful_step_count=20))
