"""The toy device: a model whose every token can be foretold, behind a cache that believes nothing it can check.

The next token is a function of a request's id and of its whole history as read through the block tables from a
cache of tokens. So a block that was shared, evicted, copied or handed out wrongly changes a token, or is found out
where it lies.
"""

import zlib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import numpy as np

from purestep.pure.records.outputs import StepOutput
from purestep.pure.records.queue import Request, SchedulerConfig
from purestep.pure.records.scheduler_output import SchedulerOutput

VOCAB = 7

Held = Iterable[tuple[np.ndarray, ...]]  # per moment and KV group, the blocks that it holds


def next_token(req_id: str, history: Iterable[int]) -> int:
    """What the toy model says."""
    return zlib.crc32(repr((req_id, tuple(history))).encode()) % VOCAB


def guesses(req_id: str, history: Iterable[int], most: int) -> tuple[int, ...]:
    """Up to so many drafts, by no rule: most are right, and some are wrong from some place on."""
    known = list(history)
    dice = zlib.crc32(repr(("dice", req_id, tuple(known))).encode())
    drafts = []
    for place in range(min(dice % (most + 2), most)):
        right = next_token(req_id, known)
        drafts.append(right if dice >> place & 6 else (right + 1) % VOCAB)
        known.append(drafts[-1])
    return tuple(drafts)


def foretold(
    request: Request, config: SchedulerConfig, nan_at: int | None = None, given: tuple[int, ...] = ()
) -> tuple[tuple[int, ...], str, int | None]:
    """Tokens, finish reason and stop reason of a request that runs alone; a fork begins with given outputs."""
    params, outputs = request.sampling_params, list[int]()
    while True:
        if len(outputs) == nan_at and nan_at >= len(given):
            return tuple(outputs), "error", None
        own = next_token(request.req_id, request.prompt_token_ids + tuple(outputs))
        outputs.append(given[len(outputs)] if len(outputs) < len(given) else own)
        length = len(request.prompt_token_ids) + len(outputs)
        if len(outputs) >= params.min_tokens:
            if outputs[-1] in request.eos_token_ids and not params.ignore_eos:
                return tuple(outputs), "stop", None
            if outputs[-1] in params.stop_token_ids:
                return tuple(outputs), "stop", outputs[-1]
        if len(outputs) == params.max_tokens or length in (config.max_model_len, config.capacity + 1):
            return tuple(outputs), "length", None


class Device:
    """Runs scheduler outputs as they come, and believes nothing that it can check."""

    def __init__(self, config: SchedulerConfig, *, freezes: bool) -> None:
        self.config = config
        self.freezes = freezes  # rows that end, as the real one does where it knows of the end
        self.version = 0
        self.good_versions = {0}
        self.nan_at: dict[str, int] = {}
        self.cells: dict[tuple[int, int, int], tuple[int, int, int, str]] = {}  # group, block, offset
        self.tables: dict[str, list[list[int]]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.requests: dict[str, tuple[int, str]] = {}  # prompt length, salt and adapter
        self.ends: dict[str, int] = {}  # outputs after which the row does nothing any more
        self.frozen: set[str] = set()
        self.num_computed: dict[str, int] = {}
        self.batch: set[str] = set()
        self.drafts: dict[str, tuple[int, ...]] = {}  # what it has guessed itself, for the next step

    def remembered(self) -> dict[str, Any]:
        """All that it knows but the cells of its cache, and the parameters."""
        names = (
            "tables",
            "tokens",
            "requests",
            "ends",
            "frozen",
            "num_computed",
            "batch",
            "nan_at",
            "drafts",
        )
        return {name: deepcopy(getattr(self, name)) for name in names}

    def go_back(self, remembered: dict[str, Any]) -> None:
        """Know that again."""
        for name, value in remembered.items():
            setattr(self, name, deepcopy(value))

    def keep(self, kept: Mapping[str, tuple[int, ...]]) -> None:
        """These requests have given up all but so many blocks."""
        for req_id, counts in kept.items():
            self.tables[req_id] = [t[:n] for t, n in zip(self.tables[req_id], counts, strict=True)]

    def fork(self, parent: str, fork: Request, *, goes_on: bool) -> None:
        """A request with the parent's blocks and tokens."""
        self._drop(fork.req_id)
        req_id, given = fork.req_id, tuple(self.tokens[parent][len(fork.prompt_token_ids) :])
        for known in (self.tables, self.tokens, self.requests, self.num_computed):
            known[req_id] = deepcopy(known[parent])  # type: ignore[index]
        if parent in self.frozen:
            self.frozen.add(req_id)
            if len(given) == self.nan_at.get(parent):
                self.nan_at[req_id] = len(given)
        self.ends[req_id] = len(foretold(fork, self.config, given=given)[0])
        self.batch |= {req_id} if goes_on else set()

    def _drop(self, req_id: str) -> None:
        for known in (self.tables, self.tokens, self.requests, self.num_computed, self.ends, self.drafts):
            known.pop(req_id, None)  # type: ignore[attr-defined]
        self.batch.discard(req_id)
        self.frozen.discard(req_id)

    def run(self, output: SchedulerOutput, requests: Mapping[str, Request], held: Held = ()) -> StepOutput:
        """One step; its output, in the order of the batch. Blocks that moments hold are not written."""
        for req_id in output.finished_req_ids:
            assert req_id in self.tokens, f"{req_id} was never here"
            self._drop(req_id)
        assert output.preempted_req_ids <= self.tokens.keys()
        in_a_step = (
            np.minimum(output.num_scheduled_tokens, 1)
            if output.num_steps > 1
            else output.num_scheduled_tokens
        )
        assert in_a_step.sum() <= self.config.max_num_batched_tokens
        assert output.num_steps == 1 or output.num_scheduled_tokens.max() == output.num_steps, (
            "a step for nobody"
        )
        assert len(output.req_ids) <= self.config.max_num_reqs
        assert (output.num_scheduled_tokens >= 1).all()
        self._take_new(output, requests)
        self._take_cached(output)
        self._copy(output)
        self._check_writers(output, held)
        self.drafts = {req_id: own for req_id, own in self.drafts.items() if req_id in self.batch}
        self.batch = set(output.req_ids)
        given = output.scheduled_spec_decode_tokens
        assert all(given.values()) and (not given or output.num_device_drafts is None)
        column = output.num_device_drafts
        counts = {} if column is None else dict(zip(output.req_ids, column.tolist(), strict=True))
        assert self.config.drafts_on_device or not counts
        rows = []
        for req_id, n in output.num_scheduled_tokens_by_id.items():
            num_drafts = len(given.get(req_id, ())) or int(counts.get(req_id, 0))
            assert num_drafts <= self.config.num_spec_tokens
            drafts = given.get(req_id) or self.drafts.get(req_id, ())[:num_drafts]
            several = output.num_steps > 1
            rows.append(self._decode(req_id, n) if several else self._run_row(req_id, n, num_drafts, drafts))
        tokens, computed, nans = zip(*rows, strict=True) if rows else ((), (), ())
        if self.config.drafts_on_device:
            sampled = [req_id for req_id, own in zip(output.req_ids, tokens, strict=True) if own]
            most = self.config.num_spec_tokens
            self.drafts |= {req_id: guesses(req_id, self.tokens[req_id], most) for req_id in sampled}
        width = output.num_steps + (self.config.num_spec_tokens if given or counts else 0)
        kept = [[*own, *[-1] * (width - len(own))] for own in tokens]
        return StepOutput(
            np.array(kept, np.int32).reshape(-1, width),
            np.array(computed, np.int32),  # type: ignore[arg-type]
            np.array([bool(own) for own in tokens], np.bool_),  # type: ignore[arg-type]
            np.array(nans, np.bool_),  # type: ignore[arg-type]
        )

    def _take_new(self, output: SchedulerOutput, requests: Mapping[str, Request]) -> None:
        for new in output.scheduled_new_reqs:
            assert new.req_id not in self.tokens, f"{new.req_id} is not new"
            self.tables[new.req_id] = [list(ids) for ids in new.block_ids]
            self.tokens[new.req_id] = list(new.prompt_token_ids)
            request = requests[new.req_id]
            self.requests[new.req_id] = len(new.prompt_token_ids), repr((request.salt, request.adapter))
            self.ends[new.req_id] = len(foretold(request, self.config)[0])
            self.num_computed[new.req_id] = new.num_computed_tokens

    def _take_cached(self, output: SchedulerOutput) -> None:
        cached = output.scheduled_cached_reqs
        named = [*cached.req_ids, *(new.req_id for new in output.scheduled_new_reqs)]
        assert sorted(named) == sorted(output.req_ids)
        assert cached.new_block_ids.keys() <= set(cached.req_ids), "blocks for requests that sit out"
        running = [r for r in cached.req_ids if r not in cached.resumed_req_ids]
        assert list(cached.req_ids[: len(running)]) == running, "resumed requests come last"
        for req_id, computed, num_outputs in zip(
            cached.req_ids,
            cached.num_computed_tokens.tolist(),
            cached.num_output_tokens.tolist(),
            strict=True,
        ):
            tokens = self.tokens[req_id]
            if req_id in self.frozen:
                continue
            known = self.requests[req_id][0] + num_outputs
            on_their_way = self.config.num_spec_tokens * (2 if self.config.async_scheduling else 0)
            assert len(tokens) <= known <= len(tokens) + on_their_way, (
                f"{req_id} has {tokens}, not {num_outputs}"
            )
            if req_id not in self.batch or req_id in cached.resumed_req_ids:
                assert cached.all_token_ids[req_id] == tuple(tokens)
            if req_id in cached.resumed_req_ids:
                self.tables[req_id] = [list(ids) for ids in cached.new_block_ids[req_id]]
                self.num_computed[req_id] = computed
            else:
                assert computed - self.num_computed[req_id] == known - len(tokens)
                for table, ids in zip(
                    self.tables[req_id], cached.new_block_ids.get(req_id, ()), strict=False
                ):
                    table.extend(ids)

    def _copy(self, output: SchedulerOutput) -> None:
        taken = []
        for group, pairs in enumerate(output.block_copies):
            for source, target in pairs:
                for offset in range(self.config.block_sizes[group]):
                    cell = self.cells.get((group, source, offset))
                    taken.append(((group, target, offset), cell))
        for place, cell in taken:
            if cell is None:
                self.cells.pop(place, None)
            else:
                self.cells[place] = cell

    def _check_writers(self, output: SchedulerOutput, held: Held) -> None:
        for group, size in enumerate(self.config.block_sizes):
            written: set[int] = set()
            remembered = {block for blocks in held for block in blocks[group].tolist()}
            for req_id, n in output.num_scheduled_tokens_by_id.items():
                if req_id in self.frozen:  # it writes nothing
                    continue
                start = self.num_computed[req_id]
                blocks = self.tables[req_id][group][start // size : (start + n - 1) // size + 1]
                assert not written.intersection(blocks), "two requests write one block"
                assert not remembered.intersection(blocks), "a moment's block is written"
                written.update(blocks)
            assert 0 not in written

    def _run_row(
        self, req_id: str, num_tokens: int, num_drafts: int, drafts: tuple[int, ...]
    ) -> tuple[list[int], int, bool]:
        """Kept tokens, computed ones, whether it met NaN. It may have fewer drafts than were scheduled."""
        known, start = self.tokens[req_id], self.num_computed[req_id]
        if req_id in self.frozen:
            return [], start, False
        end = start + num_tokens - num_drafts
        assert end <= len(known) and (end == len(known) or not num_drafts)
        assert end + num_drafts < self.config.max_model_len
        self._write(req_id, [*known, *drafts], start, end + len(drafts))
        self.num_computed[req_id] = end
        if end < len(known):
            return [], end, False
        kept, has_nan = self._say(req_id, known, drafts)
        self.tokens[req_id] = [*known, *kept]
        self.num_computed[req_id] = len(known) + len(kept) - 1 + has_nan
        return kept, self.num_computed[req_id], has_nan

    def _decode(self, req_id: str, num_steps: int) -> tuple[list[int], int, bool]:
        """So many steps of a token each, unless it ends on the way."""
        said, has_nan, is_over = list[int](), False, False
        while len(said) < num_steps and not is_over:
            own, _, has_nan = self._run_row(req_id, 1, 0, ())
            said, is_over = said + own, not own
        return said, self.num_computed[req_id], has_nan

    def _write(self, req_id: str, tokens: list[int], start: int, end: int) -> None:
        """The cells of these positions, and a look at all that they see."""
        salt = self.requests[req_id][1]
        for group, size in enumerate(self.config.block_sizes):
            table = self.tables[req_id][group]
            for position in range(start, end):
                cell = tokens[position], position, self.version, salt
                self.cells[group, table[position // size], position % size] = cell
            read = [self.cells[group, table[p // size], p % size] for p in range(end)]
            assert [cell[:2] for cell in read] == [(tokens[p], p) for p in range(end)], (
                f"{req_id} reads foreign KV"
            )
            assert {cell[2] for cell in read} <= self.good_versions, "KV of another version"
            assert {cell[3] for cell in read} == {salt}, "KV of another salt or adapter"

    def _say(self, req_id: str, known: list[int], drafts: tuple[int, ...]) -> tuple[list[int], bool]:
        """The tokens behind the known ones, as long as the drafts are right; and whether NaN came instead of one."""
        num_prompt, said = self.requests[req_id][0], list[int]()
        for draft in (*drafts, None):
            num_outputs = len(known) - num_prompt + len(said)
            if self.nan_at.get(req_id) == num_outputs:
                self.frozen.add(req_id)
                return said, True
            said.append(next_token(req_id, [*known, *said]))
            if num_outputs + 1 == self.ends[req_id] and self.freezes:
                self.frozen.add(req_id)
                break
            if said[-1] != draft:
                break
        return said, False
