"""Random legal schedules, and beside them plain lists that say what the batch must hold.

`Schedule` plays the scheduler and the device at once. What the scheduler assumes and what the device does are kept
apart: steps may be begun before the outputs of those before them are known. Where the limits have drafts, they come in
any number, from the host or the device, right or wrong.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random

import attrs
import numpy as np
from hypothesis import strategies as st

from purestep.pure.record import replace
from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from purestep.pure.settle import settle
from purestep.pure.update import update_states
from tests.lives import Begun, Life, NextToken, toy

LIMITS = BatchLimits(
    max_num_reqs=4,
    max_model_len=24,
    vocab_size=16,
    block_sizes=(4, 2),
    num_blocks=(64, 128),
    eos_token_ids=(0,),
)
DRAFTED = replace(LIMITS, num_drafts=3)
MAX_LIVES = 7

# A number and no `st.randoms()`: schedules are long, and shrinking them draw by draw takes minutes.
seeds = st.integers(0, 2**32 - 1).map(Random)

Update = Callable[[InputBatch, SchedulerOutput], InputBatch]
Settle = Callable[[InputBatch, InputBatch, StepOutput], InputBatch]

PARAMS = (
    SamplingParams(temperature=0, max_tokens=None),
    SamplingParams(temperature=0, max_tokens=5, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=3, top_k=5, max_tokens=12, logprobs=2),
    SamplingParams(temperature=1, stop_token_ids=(3, 4), repetition_penalty=1.5, max_tokens=9),
    SamplingParams(logit_bias={1: 2.0, 5: -1.0}, bad_words_token_ids=((2, 3), (7,)), max_tokens=None),
    SamplingParams(
        min_tokens=3, stop_token_ids=tuple(range(1, 12)), allowed_token_ids=(1, 2, 13), max_tokens=8
    ),
)


class Schedule:
    """Draws steps. `begin` gives the next one, `settle` learns the output of the oldest that is unsettled.

    Without `hits` no request arrives or comes back with tokens that other blocks than its own have in the cache.
    """

    def __init__(
        self, rng: Random, limits: BatchLimits = LIMITS, *, next_token: NextToken = toy, hits: bool = True
    ) -> None:
        self.rng, self.limits, self.next_token, self.hits = rng, limits, next_token, hits
        self.lives: dict[str, Life] = {}
        self.free = [list(range(1, n)) for n in limits.num_blocks]
        self.begun: list[Begun] = []
        self.num_begun = self.num_settled = 0
        self.released: list[int] = []  # per row that was given up: steps begun by then

    def begin(self) -> SchedulerOutput:
        """The next step, carried out on the device at once."""
        rng = self.rng
        finished = [life for life in self.lives.values() if life.is_over or rng.random() < 0.08]
        for life in finished:
            self._give_up(life, frees=True)
            del self.lives[life.req_id]
        running = [life for life in self.lives.values() if life.in_batch]
        preempted = [life for life in running if rng.random() < 0.07]
        for life in preempted:
            self._give_up(life, frees=True)
        staying = [life for life in running if life not in preempted and self._stays(life)]
        resumed, returning = self._bring_back()
        room = min(rng.randrange(3), self._num_free_rows(), MAX_LIVES - len(self.lives))
        new = [self._arrive() for _ in range(room)]
        for life in new:
            life.admit(min(rng.choice((0, 0, 2)), len(life.prompt) - 1) if self.hits else 0)
        cached = staying + returning + resumed
        starts = {life.req_id: (life.computed, life.known - len(life.prompt)) for life in cached}
        counts = {life.req_id: self._draw_count(life) for life in cached + new}
        drafts = {life.req_id: self._draw_drafts(life, counts[life.req_id]) for life in cached}
        counts = {req_id: count + len(drafts.get(req_id, ())) for req_id, count in counts.items()}
        given, column = self._as_scheduled(drafts, order := self._draw_order(counts))
        grown = {life.req_id: self._grow(life, counts[life.req_id]) for life in cached + new}
        output = SchedulerOutput(
            scheduled_new_reqs=tuple(_new_data(life) for life in new),
            scheduled_cached_reqs=CachedRequestData(
                req_ids=tuple(starts),
                num_computed_tokens=_column(computed for computed, _ in starts.values()),
                num_output_tokens=_column(outputs for _, outputs in starts.values()),
                new_block_ids={r: _tuples(grown[r]) for r in starts if any(grown[r])},
                resumed_req_ids=frozenset(life.req_id for life in resumed),
            ),
            req_ids=tuple(order),
            num_scheduled_tokens=_column(counts[r] for r in order),
            finished_req_ids=frozenset(life.req_id for life in finished),
            preempted_req_ids=frozenset(life.req_id for life in preempted),
            scheduled_spec_decode_tokens=given,
            num_device_drafts=column,
        )
        self._run(output)
        return output

    def settle(self) -> StepOutput:
        """The output of the oldest step that is not settled, now known to the scheduler."""
        step = self.begun.pop(0)
        self.num_settled += 1
        for life, admission, tokens, computed, active, num_tokens in step.results:
            life.num_unsettled -= 1
            if life.admission == admission:
                if step.width > 1:  # drafts that fell, and tokens of rows that ran idle
                    life.known -= life.settled + num_tokens - computed
                    life.computed -= life.settled + num_tokens - computed
                life.tokens += tokens
                life.settled, life.is_over = computed, not active
                if not life.in_batch:
                    life.leave()
        return step.output()

    def _stays(self, life: Life) -> bool:
        """Whether a running request runs on; it may be left out, or rolled back, or made to come back as resumed."""
        if life.is_over or life.known >= life.limit or self.rng.random() < 0.08:
            if life.computed == life.settled:  # else it waits in its row for what is on its way
                self._give_up(life)
            return False
        if self.rng.random() < 0.1:  # what is in flight is forgotten
            life.tokens = life.tokens[: self.rng.randint(len(life.prompt), len(life.tokens))]
            life.admit(self.rng.randint(0, min(life.settled, len(life.tokens) - 1)))
        return True

    def _bring_back(self) -> tuple[list[Life], list[Life]]:
        """Requests without a row that get one: resumed with new blocks, or only left out for a while."""
        resumed, returning = [], []
        for life in self.lives.values():
            may = (
                not life.in_batch and not life.num_unsettled and not life.is_over and life.known < life.limit
            )
            if not may or self._num_free_rows() < 1 or self.rng.random() < 0.3:
                continue
            if self.rng.random() < 0.2:
                life.tokens = life.tokens[: self.rng.randint(len(life.prompt), len(life.tokens))]
            if life.has_blocks and self.rng.random() < 0.8:
                most = min(life.computed, len(life.tokens) - 1)
                life.admit(self.rng.choice((most, self.rng.randint(0, most))))
                returning.append(life)
            else:
                self._free_blocks(life)
                life.admit(self.rng.choice((0, self.rng.randrange(len(life.tokens)))) if self.hits else 0)
                resumed.append(life)
        return resumed, returning

    def _arrive(self) -> Life:
        rng, limits = self.rng, self.limits
        req_id = rng.choice([r for r in "abcdefghij" if r not in self.lives])
        prompt = tuple(rng.randrange(limits.vocab_size) for _ in range(rng.randint(1, 10)))
        params, blocks = rng.choice(PARAMS), [[] for _ in limits.block_sizes]
        life = Life(req_id, prompt, params, limits, rng.randrange(3), list(prompt), blocks)  # type: ignore[arg-type]
        self.lives[req_id] = life
        return life

    def _give_up(self, life: Life, *, frees: bool = False) -> None:
        if life.in_batch:
            life.leave()
            self.released.append(self.num_begun)
        if frees:
            self._free_blocks(life)

    def _num_free_rows(self) -> int:
        held = sum(begun > self.num_settled for begun in self.released)
        return self.limits.max_num_reqs - held - sum(life.in_batch for life in self.lives.values())

    def _draw_count(self, life: Life) -> int:
        rest = life.known - life.computed
        return rest if self.rng.random() < 0.6 else self.rng.randint(1, rest)

    def _draw_drafts(self, life: Life, num_tokens: int) -> tuple[int, ...]:
        """Drafts behind a step that gets to the end of what is known or on its way: ids, or -1 for the device's."""
        life.drafts = ()
        rest = life.known - life.computed
        most = min(self.limits.num_drafts, life.limit - life.known - 1)
        if num_tokens < rest or most < 1 or (life.num_unsettled and rest > 1) or self.rng.random() < 0.3:
            return ()
        ids = [self.guess(life) if self.rng.random() < 0.5 else -1 for _ in range(self.rng.randint(1, most))]
        life.drafts = tuple(ids[: ids.index(-1)] + [-1] * (len(ids) - ids.index(-1)) if -1 in ids else ids)
        return life.drafts

    def _draw_order(self, counts: dict[str, int]) -> list[str]:
        return self.rng.sample(sorted(counts), len(counts)) if self.rng.random() < 0.3 else list(counts)

    def _as_scheduled(
        self, drafts: dict[str, tuple[int, ...]], order: Sequence[str]
    ) -> tuple[dict[str, tuple[int, ...]], np.ndarray | None]:
        """Drafts as ids; or, if all of them are the device's, now and then how many there are."""
        given = {req_id: own for req_id, own in drafts.items() if own}
        if given and all(own[0] < 0 for own in given.values()) and self.rng.random() < 0.8:
            return {}, _column(len(drafts.get(req_id, ())) for req_id in order)
        return given, None

    def guess(self, life: Life) -> int:
        """A draft: what comes next on the device, as often as not."""
        right = self.next_token(life) if life.device_tokens else 0
        return right if self.rng.random() < 0.6 else self.rng.randrange(self.limits.vocab_size)

    def _grow(self, life: Life, num_tokens: int) -> list[list[int]]:
        grown = []
        for group, size in enumerate(self.limits.block_sizes):
            wanted = -(-(life.computed + num_tokens) // size) - len(life.blocks[group])
            most = -(-self.limits.max_model_len // size) - len(life.blocks[group])
            wanted = min(wanted + self.rng.randrange(2), most) if wanted > 0 else 0
            free = self.free[group]
            more = [free.pop(self.rng.randrange(len(free))) for _ in range(wanted)]
            life.blocks[group] = life.blocks[group] + more
            grown.append(more)
        life.has_blocks = True
        return grown

    def _free_blocks(self, life: Life) -> None:
        for group, blocks in enumerate(life.blocks):
            self.free[group] += blocks
        life.blocks, life.has_blocks = [[] for _ in self.limits.block_sizes], False

    def _run(self, output: SchedulerOutput) -> None:
        if not output.req_ids:
            return
        self.num_begun += 1
        results = []
        for req_id, num_tokens in output.num_scheduled_tokens_by_id.items():
            life = self.lives[req_id]
            tokens = life.run(num_tokens, self.next_token, self.guess)
            result = life.admission, tokens, life.device_computed, life.device_active, num_tokens
            results.append((life, *result))
        drafts = any(self.lives[req_id].drafts for req_id in output.req_ids)
        self.begun.append(Begun(tuple(results), 1 + (self.limits.num_drafts if drafts else 0)))

    def check(self, batch: InputBatch) -> None:
        """The batch holds what the lists hold, request by request."""
        assert batch.row_of.keys() == {r for r, life in self.lives.items() if life.in_batch}
        assert batch.parked.keys() == {r for r, life in self.lives.items() if not life.in_batch}
        assert (batch.clock.num_begun, batch.clock.num_settled) == (self.num_begun, self.num_settled)
        rows, columns = batch.rows, batch.columns
        for req_id, row in batch.row_of.items():
            life, request = self.lives[req_id], rows.requests[row]
            assert request is not None
            assert (request.req_id, request.sampling_params, request.stream) == (
                req_id,
                life.params,
                life.stream,
            )
            assert rows.tokens[row] is not None and rows.tokens[row].tolist() == life.tokens
            assert [group[row].tolist() for group in rows.block_ids] == life.blocks  # type: ignore[union-attr]
            assert columns.num_prompt_tokens[row] == request.num_prompt_tokens == len(life.prompt)
            assert columns.num_tokens[row] == len(life.tokens)
            assert columns.num_computed_tokens_settled[row] == life.settled
            assert columns.num_computed_tokens_bound[row] == life.computed
            assert life.settled <= life.device_computed <= life.computed
        for req_id, entry in batch.parked.items():
            life = self.lives[req_id]
            assert entry.tokens.tolist() == life.tokens
            assert entry.num_computed_tokens == life.settled
            assert entry.request.num_prompt_tokens == len(life.prompt)


@attrs.frozen
class Moment:
    """One step of a run: the batch before it, what was scheduled, and the batch after it."""

    before: InputBatch
    output: SchedulerOutput
    after: InputBatch
    is_settled: bool  # every output was known before


def drive(
    schedule: Schedule,
    num_steps: int,
    *,
    max_unsettled: int = 0,
    update: Update = update_states,
    settle: Settle = settle,
) -> Iterator[Moment]:
    """Run a schedule with at most so many steps whose outputs are unknown; the batch is checked all along."""
    batch, pending = InputBatch.make_empty(schedule.limits), []
    for _ in range(num_steps):
        before, is_settled, output = batch, not pending, schedule.begin()
        batch = update(before, output)
        schedule.check(batch)
        yield Moment(before, output, batch, is_settled)
        pending += [batch] if output.req_ids else []
        while len(pending) > max_unsettled or (pending and schedule.rng.random() < 0.2):
            batch = settle(batch, pending.pop(0), schedule.settle())
            schedule.check(batch)


def _new_data(life: Life) -> NewRequestData:
    return NewRequestData(
        req_id=life.req_id,
        prompt_token_ids=life.prompt,
        sampling_params=life.params,
        block_ids=_tuples(life.blocks),
        num_computed_tokens=life.settled,
        stream=life.stream,
    )


def _column(values: Iterable[int]) -> np.ndarray:
    return np.array(list(values), np.int32)


def _tuples(groups: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(ids) for ids in groups)
