"""Custom logits processors: plain functions of logits, history and parameters, chosen request by request."""

from collections.abc import Callable, Iterable, Mapping

import attrs
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from purestep.kernels.record import record
from purestep.pure.errors import InvalidParameterError

Named = Mapping[str, float] | Iterable[tuple[str, float]]


@record
class History:
    """What requests have said so far: the prompt, then accepted outputs. What was thrown away was never in it.

    So whatever a processor works out of it is right after chunks, preemption, rewinding and forks alike.
    """

    token_ids: Int[Tensor, "rows width"]  # 0 behind a request's length; every request of a batch is as wide
    prompt_lengths: Int[Tensor, " rows"]
    lengths: Int[Tensor, " rows"]  # prompt and outputs

    @property
    def is_known(self) -> Bool[Tensor, "rows width"]:
        """Which entries are tokens of the request."""
        return self._places < self.lengths[:, None]

    @property
    def is_output(self) -> Bool[Tensor, "rows width"]:
        """Which entries are outputs of the request."""
        return self.is_known & (self._places >= self.prompt_lengths[:, None])

    @property
    def _places(self) -> Int[Tensor, " width"]:
        return torch.arange(self.token_ids.shape[1], device=self.token_ids.device)


Apply = Callable[[Tensor, History, Mapping[str, Tensor]], Tensor]


def _numbers(value: Named) -> tuple[tuple[str, float], ...]:
    pairs = value.items() if isinstance(value, Mapping) else value
    try:
        found = tuple((str(name), number if type(number) is int else float(number)) for name, number in pairs)
    except (TypeError, ValueError):
        raise InvalidParameterError(
            f"parameters of a logits processor must map names to numbers, got {value!r}"
        ) from None
    return found


@record(static=True)
class LogitsProcessor:
    """A function, and one request's parameters of it: `SamplingParams.logits_processors` lists them in order.

    `apply(logits [rows, vocab], history, params) -> logits [rows, vocab]` is called with the rows of all requests that
    chose the same function, and for every name a tensor [rows] of their parameters: int64 if all of them are whole
    numbers, else float32. Logits are float32, or float64 of a model that is. It is pure: it writes nothing that it was
    given, and each row of its result depends on that row alone. Requests that did not choose it are not shown to it.

    It stands behind bias and before penalties; with `argmax_invariant`, which promises that no row's largest logit
    changes, behind temperature and before min-p, top-k and top-p, and greedy requests skip it.

    Raises: InvalidParameterError for parameters that are no numbers.
    Source: vllm/v1/sample/logits_processor/interface.py (places and the promise).
    """

    apply: Apply
    params: tuple[tuple[str, float], ...] = attrs.field(default=(), converter=_numbers)
    argmax_invariant: bool = False
