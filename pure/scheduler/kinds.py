"""What callers of the scheduler give is of the kind that it says, or refused by name before anything has changed."""

from collections.abc import Iterable
from typing import Any, get_args

import numpy as np

from purestep.pure.errors import InvalidParameterError, InvalidRequestError, short
from purestep.pure.records.outputs import DraftTokenIds
from purestep.pure.records.queue import FinishReason, Request
from purestep.pure.records.sampling_params import SamplingParams

WHOLE = (int, np.integer)
REASONS = get_args(FinishReason)


def check_request(request: Request) -> None:
    """Every field is what `Request` says: ids are looked up, and the line is in the order of whole numbers.

    Raises:
        InvalidRequestError: otherwise.
    """
    if not isinstance(request, Request):
        raise InvalidRequestError(f"add({short(request)}): give a Request")
    is_id = isinstance(request.req_id, str) and isinstance(request.fork_of, str | None)
    if not is_id or not isinstance(request.sampling_params, SamplingParams):
        raise InvalidRequestError(
            f"request {short(request.req_id)}, a fork of {short(request.fork_of)}, with "
            f"{short(request.sampling_params)}: ids are text, and parameters SamplingParams"
        )
    for name in ("priority", "arrival"):
        if not isinstance(value := getattr(request, name), WHOLE):
            raise InvalidRequestError(
                f"request {short(request.req_id)}: {name}={short(value)}: it is a whole number"
            )
    check_stream(request.req_id, request.stream)
    ends = request.eos_token_ids
    if not isinstance(ends, tuple) or not all(isinstance(t, WHOLE) and -(2**31) <= t < 2**31 for t in ends):
        raise InvalidRequestError(
            f"request {short(request.req_id)}: eos_token_ids={short(ends)}: give a tuple of token ids, which are int32"
        )
    if not isinstance(request.salt, str | None):
        raise InvalidRequestError(
            f"request {short(request.req_id)}: salt={short(request.salt)}: it is text, or None"
        )


def check_stream(req_id: str, stream: Any) -> None:
    """Raises: InvalidRequestError for what names no random stream."""
    if not isinstance(stream, WHOLE) or not -(2**63) <= stream < 2**63:
        raise InvalidRequestError(
            f"request {short(req_id)}: stream={short(stream)}: it is a whole number from -2**63 to 2**63 - 1"
        )


def check_ids(call: str, req_ids: Iterable[Any]) -> tuple[str, ...]:
    """The ids of requests that a call is given.

    Raises:
        InvalidRequestError: text, whose letters would be taken for ids, or what is no collection of text.
    """
    if isinstance(req_ids, str) or not isinstance(req_ids, Iterable):
        raise InvalidRequestError(f"{call}({short(req_ids)}): give a list of ids, which are text")
    ids = tuple(req_ids)
    for req_id in ids:
        if not isinstance(req_id, str):
            raise InvalidRequestError(f"{call}({short(req_ids)}): {short(req_id)} is no id: ids are text")
    return ids


def check_finish(req_id: Any, reason: Any, stop_reason: Any) -> None:
    """Raises: InvalidRequestError for what is no id, no reason, or neither a token id nor text that ended a request."""
    check_ids("finish", [req_id])
    if reason not in REASONS or not isinstance(stop_reason, (*WHOLE, str, type(None))):
        raise InvalidRequestError(
            f"finish({short(req_id)}, {short(reason)}, {short(stop_reason)}): the reason is one of "
            f"{', '.join(REASONS)}, and what stopped the request is a token id, text or None"
        )


def check_version(version: Any) -> None:
    """Raises: InvalidParameterError for what is no number of a version."""
    if not isinstance(version, WHOLE):
        raise InvalidParameterError(
            f"version={short(version)}: it is a whole number, another one for other parameters"
        )


def check_drafts(drafts: DraftTokenIds) -> None:
    """Drafts are token ids for requests, each named once.

    Raises:
        InvalidParameterError: otherwise.
    """
    if not isinstance(drafts, DraftTokenIds):
        raise InvalidParameterError(
            f"take_drafts({short(drafts)}): give DraftTokenIds, of ids and their token ids"
        )
    req_ids, given = drafts.req_ids, drafts.draft_token_ids
    if not isinstance(req_ids, tuple | list) or not all(isinstance(req_id, str) for req_id in req_ids):
        raise InvalidParameterError(f"drafts for {short(req_ids)}: give a tuple of ids, which are text")
    if not isinstance(given, tuple | list) or len(given) != len(req_ids) or len(set(req_ids)) != len(req_ids):
        raise InvalidParameterError(
            f"drafts {short(given)} for {short(req_ids)}: give a tuple of token ids for each request, and name each "
            "once"
        )
    for req_id, own in zip(req_ids, given, strict=True):
        if not isinstance(own, tuple | list) or not all(isinstance(t, WHOLE) and 0 <= t < 2**31 for t in own):
            raise InvalidParameterError(
                f"request {short(req_id)} has drafts {short(own)}: they are a tuple of token ids, whole numbers from 0 "
                "on"
            )
