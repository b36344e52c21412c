"""Random legal schedules, and beside them plain lists that say what the batch must hold.

`Schedule` plays the scheduler and the device at once. What the scheduler assumes and what the device does are kept
apart: steps may be begun before the outputs of those before them are known. The next token of a request is a function
of its id and its history, so that any two schedules of the same requests can be compared.
"""

import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from random import Random

import attrs
import numpy as np
from hypothesis import strategies as st

from purestep.pure.records.batch import BatchLimits, InputBatch
from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.sampling_params import SamplingParams
from purestep.pure.records.sampling_rows import stop_ids_of
from purestep.pure.records.scheduler_output import CachedRequestData, NewRequestData, SchedulerOutput
from purestep.pure.settle import settle
from purestep.pure.update import update_states

LIMITS = BatchLimits(
    max_num_reqs=4,
    max_model_len=24,
    vocab_size=16,
    block_sizes=(4, 2),
    num_blocks=(64, 128),
    eos_token_ids=(0,),
)
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


def toy_token(req_id: str, history: Sequence[int], vocab_size: int) -> int:
    """What the toy model says next."""
    return zlib.crc32(repr((req_id, tuple(history))).encode()) % vocab_size


@attrs.define(eq=False)
class Life:
    """A request from arrival to finish, as the scheduler sees it, and its row on the device."""

    req_id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    limits: BatchLimits
    stream: int
    tokens: list[int]  # prompt and settled outputs
    blocks: list[list[int]]  # per KV group
    computed: int = 0  # after every step begun, if the device does not stop
    settled: int = 0
    known: int = 0  # tokens, those on their way included
    in_batch: bool = False
    has_blocks: bool = False
    is_over: bool = False  # the scheduler knows that it stopped
    admission: int = 0  # another one each time that its row is written anew
    num_unsettled: int = 0
    device_tokens: list[int] = attrs.field(factory=list)
    device_computed: int = 0
    device_active: bool = True

    @property
    def limit(self) -> int:
        """Tokens at which it ends."""
        most, budget = self.limits.max_model_len, self.params.max_tokens
        return most if budget is None else min(len(self.prompt) + budget, most)

    def admit(self, computed: int) -> None:
        """Its row is written: the device knows what the scheduler knows for certain."""
        self.admission += 1
        self.in_batch = True
        self.computed = self.settled = self.device_computed = computed
        self.known, self.device_tokens, self.device_active = len(self.tokens), list(self.tokens), True

    def leave(self) -> None:
        """It gives its row up and keeps what is settled."""
        self.in_batch = False
        self.computed, self.known = self.settled, len(self.tokens)

    def run(self, num_tokens: int, next_token: "NextToken") -> int:
        """One step on the device: the token that is kept, or -1."""
        self.computed += num_tokens
        self.known += self.computed == self.known
        self.num_unsettled += 1
        if not self.device_active:
            return -1
        self.device_computed += num_tokens
        if self.device_computed < len(self.device_tokens):
            return -1
        token = next_token(self)
        self.device_tokens.append(token)
        stops, num_stops = stop_ids_of(self.params, self.limits.eos_token_ids)
        num_outputs = len(self.device_tokens) - len(self.prompt)
        stopped = token in stops[:num_stops] and num_outputs >= self.params.min_tokens
        self.device_active = not stopped and len(self.device_tokens) < self.limit
        return token


NextToken = Callable[[Life], int]


def toy(life: Life) -> int:
    """A function of a request's id and its history."""
    return toy_token(life.req_id, life.device_tokens, life.limits.vocab_size)


@attrs.frozen
class Begun:
    """A step under way: (life, admission, kept token or -1, computed tokens, still active) of each request."""

    results: tuple[tuple[Life, int, int, int, bool], ...]

    def output(self) -> StepOutput:
        """What the host is told, in the order of the batch."""
        _, _, tokens, computed, active = zip(*self.results, strict=True)
        return StepOutput(
            sampled_token_ids=np.array(tokens, np.int32)[:, None],
            num_computed_tokens=np.array(computed, np.int32),
            active=np.array(active, np.bool_),
            has_nan=np.zeros(len(tokens), np.bool_),
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
        grown = {life.req_id: self._grow(life, counts[life.req_id]) for life in cached + new}
        order = rng.sample(sorted(counts), len(counts)) if rng.random() < 0.3 else list(counts)
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
        )
        self._run(output)
        return output

    def settle(self) -> StepOutput:
        """The output of the oldest step that is not settled, now known to the scheduler."""
        step = self.begun.pop(0)
        self.num_settled += 1
        for life, admission, token, computed, active in step.results:
            life.num_unsettled -= 1
            if life.admission == admission:
                life.tokens += [token] if token >= 0 else []
                life.settled, life.is_over = computed, not active
                if not life.in_batch:
                    life.leave()
        return step.output()

    def _stays(self, life: Life) -> bool:
        """Whether a running request runs on; it may be left out, or rolled back, or made to come back as resumed."""
        if life.is_over or life.known >= life.limit or self.rng.random() < 0.08:
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
            token = life.run(num_tokens, self.next_token)
            results.append((life, life.admission, token, life.device_computed, life.device_active))
        self.begun.append(Begun(tuple(results)))

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
