"""What a loader gives."""

from typing import Any

import attrs

from purestep.pure.errors import InvalidParameterError
from purestep.pure.models.model import Model
from purestep.pure.records.params import Params
from purestep.state.loading.tokenizer import Tokenizer


@attrs.frozen
class LoadedModel:
    """A model, its parameters, and what goes with them."""

    name: str
    model: Model
    params: Params
    tokenizer: Tokenizer | None = None
    chat_template: str | None = None  # a jinja template of messages; None: not an instruct model
    special_tokens: dict[str, str] = attrs.field(factory=dict)  # bos_token, eos_token, ... for the template
    eos_token_ids: tuple[int, ...] = ()
    generation_defaults: dict[str, Any] = attrs.field(factory=dict)  # of SamplingParams, as its makers say


def in_memory(pair: tuple[Any, ...]) -> LoadedModel:
    """(Model, Params) as if they had been loaded.

    Raises:
        InvalidParameterError: other things.
    """
    if [type(part) for part in pair] != [Model, Params]:
        kinds = ", ".join(type(part).__name__ for part in pair)
        raise InvalidParameterError(f"model=({kinds}): what is in memory already is given as (Model, Params)")
    model, params = pair
    return LoadedModel(name=model.name, model=model, params=params)
