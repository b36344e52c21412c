"""From logits to a token: temperature, the greedy choice, the random draw. Shapes: logits [reqs, vocab]."""

import torch
from torch import Tensor

GREEDY_BELOW = 1e-5  # a request with a lower temperature takes the largest logit; vllm/sampling_params.py


def scale_by_temperature(logits: Tensor, temperature: Tensor) -> Tensor:
    """Logits with the softmax of logits / temperature [reqs], relative to each row's largest.

    The largest is subtracted before the division: no temperature overflows then, and near 0 the result tends
    to the greedy choice. Rows that are greedy, or have temperature 1, keep every bit. `temperature_offset` is
    what was taken away.
    """
    peak, divisor = _peak_and_divisor(logits, temperature)
    return torch.where(divisor == 1, logits, (logits - peak) / divisor)


def temperature_offset(logits: Tensor, temperature: Tensor) -> Tensor:
    """What to add to rows of `scale_by_temperature` to report them as logits / temperature: [reqs, 1].

    It is -0.0 for rows that keep every bit: the one number that adds to 0.0 and to -0.0 without a change.
    """
    peak, divisor = _peak_and_divisor(logits, temperature)
    return torch.where(divisor == 1, -0.0, peak / divisor)


def _peak_and_divisor(logits: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    # A constant of the row changes no probability, and so has no gradient.
    peak = logits.detach().amax(-1, keepdim=True)
    divisor = torch.where(temperature < GREEDY_BELOW, 1.0, temperature).to(logits.dtype)
    return torch.where(peak.isfinite(), peak, 0.0), divisor[:, None]


def greedy(logits: Tensor) -> Tensor:
    """The id of each row's largest logit, lowest among equal; NaN counts as the largest. int64 [reqs]."""
    return logits.argmax(-1)


def draw(logits: Tensor, exponential: Tensor) -> Tensor:
    """One id a row, int64 [reqs], distributed as softmax(logits).

    exponential [reqs, vocab]: independent draws from Exp(1). The token that maximises probability /
    exponential is the one that wins a race of exponential clocks; taken as logarithms, it needs no softmax.
    An id with logit -inf is never drawn while another one is left.
    Source: vllm/v1/sample/ops/topk_topp_sampler.py random_sample.
    """
    score = logits - exponential.log()
    return torch.where(logits == float("-inf"), logits, score).argmax(-1)
