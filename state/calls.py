"""`Call`: the prompts of one `generate` or `stream`, while they run among others."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import attrs

from purestep.pure.errors import InvalidRequestError, StaleStateError
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.guarded import without_frames
from purestep.state.results import RequestOutput
from purestep.state.submission import Prompt, refused_output
from purestep.state.turns import Turns


@attrs.define
class Call:
    """Prompts that were submitted together; by number those that were not refused, and those still to end."""

    turns: Turns
    names: tuple[str, ...]
    own: Mapping[int, str]
    refused: Mapping[str, RequestOutput]
    left: set[int] = attrs.field(init=False)
    _num_rewinds: int = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.left = set(self.own)
        self._num_rewinds = self.turns.num_rewinds

    def turn(self) -> list[int]:
        """Those that there is news of, by number: the engine takes a turn if there is none yet.

        Of prompts that were aborted meanwhile, or whose end `step` has told, there is none any more.

        Raises:
            StaleStateError: the engine was rewound to a moment at which they had not begun.
        """
        if self._num_rewinds != self.turns.num_rewinds:
            self._go_on_from_there()
        submissions = self.turns.now.book.submissions
        self.left = {
            number for number in self.left if number in submissions
        }  # others told or aborted the rest
        if not self.left:
            return []
        if not any(number in self.own for number in self.turns.now.book.news):
            self.turns.turn()
        return [number for number in self.turns.now.book.news if number in self.own]

    def take(self, numbers: Iterable[int], *, only_over: bool = False) -> dict[str, RequestOutput]:
        """By id, what these have, or those of them that have ended; there is no news of them any more."""
        over = self.turns.now.book.over
        outputs = self.turns.tell(numbers, of=over if only_over else None)
        self.left.difference_update(over)
        return {self.own[number]: output for number, output in outputs.items()}

    def _go_on_from_there(self) -> None:
        """Prompts that were running at the moment are to end again; those that have not ended must be among them."""
        submissions = self.turns.now.book.submissions
        there = {
            number
            for number in self.own
            if (known := submissions.get(number)) and known.req_id == self.own[number]
        }
        if gone := self.left - there:
            raise StaleStateError(
                f"request {self.own[min(gone)]!r} of this call is gone: the engine was rewound to a moment at which it "
                "had not begun. Rewind after the call, or remember after its beginning"
            )
        self.left, self._num_rewinds = there, self.turns.num_rewinds


@contextmanager
def submitted(
    turns: Turns,
    names: Sequence[str],
    prompts: Sequence[Prompt],
    params: Sequence[SamplingParams | None],
    add: Callable[..., None],
    *,
    raises: bool,
) -> Iterator[Call]:
    """These prompts, submitted by `add`. Whatever ends the block, none of them runs on.

    With `raises` the first that is refused ends it; without, those that are refused come back with their errors.
    """
    own, refused, stream = dict[int, str](), dict[str, RequestOutput](), 0
    try:
        for i, (name, prompt, wanted) in enumerate(zip(names, prompts, params, strict=True)):
            number = turns.now.book.num_submitted
            try:
                add(name, prompt, wanted, stream=None if getattr(wanted, "seed", None) is None else stream)
                own[number] = name
            except InvalidRequestError as error:
                if raises:
                    error.add_note(f"This is prompt {i} of {len(prompts)}; none of them was run.")
                    raise
                without_frames(error)
                refused[name] = refused_output(name, prompt, error)
            stream += wanted.n if isinstance(wanted, SamplingParams) and type(wanted.n) is int else 1
        yield Call(turns, tuple(names), own, refused)
    finally:
        turns.abort(names)
