"""All measurements of one subject, one after another: ours, then the same of other engines."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs

from purestep.pure.errors import InvalidParameterError
from purestep.state.bench.clocks import Clock, clock_of
from purestep.state.bench.engines import decode_engine, generator_of, prefill_engine, steps_at_once
from purestep.state.bench.floors import Rates, decode_floor_ms, measure_rates, prefill_ceiling, spared_bytes
from purestep.state.bench.methods import (
    CPU_METHOD,
    GPU_METHOD,
    SAMPLINGS,
    TINY_METHOD,
    Generate,
    Method,
    Prompts,
    decode_ms,
    prefill_tok_s,
    random_prompts,
)
from purestep.state.bench.peers import Peer, Room, free_share
from purestep.state.bench.rows import Row
from purestep.state.bench.shapes import Subject, load
from purestep.state.bench.startup import Launch, launch, startup_rows
from purestep.state.bench.steady import decoding, run_us, step_ms, turn_us
from purestep.state.engine import Engine
from purestep.state.loading.loaded import LoadedModel

WHAT = ("decode", "prefill", "sampled", "startup", "host")
START_ALONE = ("vllm",)  # peers whose start-up is theirs alone; others are given weights that we have loaded


@attrs.frozen(kw_only=True)
class Wanted:
    """What is to be measured."""

    subject: Subject
    method: Method
    what: tuple[str, ...] = WHAT
    batches: tuple[int, ...] = (1, 8)
    peers: tuple[Peer, ...] = ()
    unroll: int | None = None  # decode steps of ours in one launch; None: what an engine does by default

    def __attrs_post_init__(self) -> None:
        if not self.what or set(self.what) - set(WHAT):
            raise InvalidParameterError(f"what={' '.join(self.what)!r}: give some of {', '.join(WHAT)}")
        if not self.batches or min(self.batches) < 1:
            raise InvalidParameterError(f"batches={list(self.batches)}: each has at least one prompt")

    @property
    def name(self) -> str:
        """What the subject is called in rows."""
        return self.subject.shape or self.subject.model or "default model"

    @property
    def samplings(self) -> list[str]:
        """Those of decode that are wanted."""
        return [bench for bench in SAMPLINGS if bench in self.what]

    @property
    def num_rows(self) -> int:
        """How many rows `measure` gives if nothing fails."""
        engines = 1 + len(self.peers)
        alone = 1 + sum(peer.name in START_ALONE for peer in self.peers)
        own = ("decode" in self.what) + 2 * ("host" in self.what)
        per_batch = engines * len(self.samplings) + own
        return (
            2 * alone * ("startup" in self.what)
            + engines * ("prefill" in self.what)
            + len(self.batches) * per_batch
        )


def usual_method(subject: Subject) -> Method:
    """The amount of work that suits the subject: that of published figures on a GPU, less of it elsewhere."""
    if subject.shape == "tiny":
        return TINY_METHOD
    return GPU_METHOD if subject.is_gpu else CPU_METHOD


def usual_batches(subject: Subject) -> tuple[int, ...]:
    """1, 8, 64 and 256 on a GPU; elsewhere 1 and 8."""
    return (1, 8, 64, 256) if subject.is_gpu else (1, 8)


def measure(
    wanted: Wanted, *, clock: Clock | None = None, rates: Rates | None = None, launch: Launch = launch
) -> Iterator[Row]:
    """The rows, each as soon as it is known. What a peer fails at becomes a row that says why.

    Start-up comes first, while this process holds nothing on the device. `rates` are the device's, measured here
    unless they are given.

    Raises:
        InvalidParameterError: the method does not fit the model.
        ModelLoadError: the model can not be loaded.
        BenchmarkError: one of our own measurements did not do its work.
    """
    subject = wanted.subject
    clock = clock_of(subject.device) if clock is None else clock
    if "startup" in wanted.what:
        yield from startup_rows(subject, "purestep", wanted.name, launch=launch)
        for peer in wanted.peers:
            if peer.name in START_ALONE:
                rows = partial(startup_rows, subject, peer.name, wanted.name, launch=launch)
                yield from _or_why(wanted, peer, "startup", rows())
    if set(wanted.what) == {"startup"}:
        return
    loaded = load(subject)
    if rates is None:
        rates = measure_rates(subject.device, subject.torch_dtype, clock)
    bench = Bench(wanted, loaded, rates, clock)
    yield from bench.own_rows()
    for peer in wanted.peers:
        if wanted.samplings or "prefill" in wanted.what:
            yield from _or_why(wanted, peer, "decode", bench.peer_rows(peer))


@attrs.frozen
class Bench:
    """A loaded subject on a device whose rates are known."""

    wanted: Wanted
    loaded: LoadedModel
    rates: Rates
    clock: Clock

    def own_rows(self) -> Iterator[Row]:
        """Decode, the bare step and the host's share of it, for each batch; then prefill."""
        wanted, subject, method = self.wanted, self.wanted.subject, self.wanted.method
        if wanted.samplings or "host" in wanted.what:
            with decode_engine(self.loaded, subject, method, wanted.batches, unroll=wanted.unroll) as engine:
                spared = spared_bytes(engine.turns.bound.prepared)
                for batch in wanted.batches:
                    for row in self.decode_rows(generator_of(engine), batch, spared=spared):
                        unroll = steps_at_once(engine, batch, SAMPLINGS[row.bench])
                        yield attrs.evolve(row, facts={**row.facts, "unroll": unroll})
                    yield from self.steady_rows(engine, batch)
        if "prefill" in wanted.what:
            with prefill_engine(self.loaded, subject, method) as engine:
                yield self.prefill_row(generator_of(engine))

    def peer_rows(self, peer: Peer) -> Iterator[Row]:
        """The same of a peer. Decode first: some size the caches of later calls by the longest one before."""
        wanted, method = self.wanted, self.wanted.method
        room = Room(
            num_requests=max(*wanted.batches, method.prefill_batch),
            length=max(method.length, method.prefill_length + 1) + 16,
            free_share=free_share(wanted.subject),
        )
        with peer.open(wanted.subject, lambda: self.loaded, room) as generate:
            for batch in wanted.batches if wanted.samplings else ():
                yield from self.decode_rows(generate, batch, peer)
            if "prefill" in wanted.what:
                yield self.prefill_row(generate, peer)

    def decode_rows(
        self, generate: Generate, batch: int, peer: Peer | None = None, *, spared: int = 0
    ) -> Iterator[Row]:
        """Greedy and random, as far as they are wanted."""
        for bench in self.wanted.samplings:
            prompts = self.prompts(batch)
            ms = decode_ms(generate, prompts, SAMPLINGS[bench], self.wanted.method, self.clock)
            yield self.decode_row(bench, batch, ms, peer, spared=spared)

    def steady_rows(self, engine: Engine, batch: int) -> Iterator[Row]:
        """The bare step if decode is wanted, and what a step costs the host if that is."""
        wanted, method = self.wanted, self.wanted.method
        if not {"decode", "host"} & set(wanted.what):
            return
        with decoding(engine, self.prompts(batch), method) as turns:
            if "decode" in wanted.what:
                step = step_ms(turns, method, self.clock)
                row = self.decode_row("decode", batch, step.ms, spared=spared_bytes(turns.bound.prepared))
                yield attrs.evolve(
                    row, level="step", facts={**row.facts, "uploads": step.num_uploads, "unroll": 1}
                )
            if "host" in wanted.what:
                facts: dict[str, Any] = {
                    "includes_step": not wanted.subject.is_gpu
                }  # a CPU computes it meanwhile
                host = Row(bench="host", shape=wanted.name, batch=batch, unit="us", value=None, facts=facts)
                yield attrs.evolve(host, level="step", value=run_us(turns, method, self.clock))
                unroll = steps_at_once(engine, batch, SAMPLINGS["decode"])
                facts = {**facts, "unroll": unroll}
                yield attrs.evolve(host, value=turn_us(turns, method, self.clock), facts=facts)

    def prefill_row(self, generate: Generate, peer: Peer | None = None) -> Row:
        """Prompt tokens per second, and at most how many the matrix products allow."""
        model, method = self.loaded.model, self.wanted.method
        facts = {"length": method.prefill_length, "tflop_s": self.rates.multiply / 1e12}
        row = Row(
            bench="prefill",
            shape=self.wanted.name,
            batch=method.prefill_batch,
            unit="tok_s",
            value=prefill_tok_s(generate, model.vocab_size, method, self.clock),
            bound=prefill_ceiling(model.config, method.prefill_length, self.rates.multiply),
            facts=facts,
        )
        return _of_peer(row, peer)

    def decode_row(
        self, bench: str, batch: int, ms: float, peer: Peer | None = None, *, spared: int = 0
    ) -> Row:
        """Milliseconds of a step, and at least how many the device takes to read what the step reads."""
        model, method = self.loaded.model, self.wanted.method
        floor = decode_floor_ms(
            model.config,
            model.kv_layers,
            batch=batch,
            context=method.mean_context,
            itemsize=self.wanted.subject.torch_dtype.itemsize,
            read=self.rates.read,
            spared=spared,
        )
        facts = {
            "context": method.context,
            "tokens": [method.short, method.long],
            "tb_s": self.rates.read / 1e12,
        }
        row = Row(
            bench=bench,
            shape=self.wanted.name,
            batch=batch,
            unit="ms",
            value=ms,
            bound=floor,
            facts=facts,
        )
        return _of_peer(row, peer)

    def prompts(self, batch: int) -> Prompts:
        """The prompts of a batch, the same for everybody."""
        return random_prompts(self.loaded.model.vocab_size, batch, self.wanted.method.context, seed=batch)


def _of_peer(row: Row, peer: Peer | None) -> Row:
    if peer is None:
        return row
    return attrs.evolve(row, who=peer.name, facts={**row.facts, "version": peer.version})


def _or_why(wanted: Wanted, peer: Peer, bench: str, rows: Iterator[Row]) -> Iterator[Row]:
    """A peer's rows up to where it fails; then one that says why. It may fail in any way: it is not ours."""
    try:
        yield from rows
    except Exception as error:
        why = f"{type(error).__name__}: {error}".splitlines()[0]
        yield Row(bench=bench, shape=wanted.name, who=peer.name, unit="ms", value=None, why=why)


def best_batches(batches: Sequence[int]) -> tuple[int, ...]:
    """Each once, ascending."""
    return tuple(sorted(set(batches)))
