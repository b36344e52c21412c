"""Chat messages as a prompt."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from purestep.pure.errors import InvalidRequestError, ModelLoadError

Conversation = Sequence[Mapping[str, Any]]


def conversations_of(messages: Conversation | Sequence[Conversation]) -> list[Conversation]:
    """One conversation or many, as a list.

    Raises:
        InvalidRequestError: what is neither.
    """
    if isinstance(messages, list | tuple):
        many = [messages] if messages and isinstance(messages[0], Mapping) else list(messages)
        if all(isinstance(one, list | tuple) and all(isinstance(m, Mapping) for m in one) for one in many):
            return many
    raise InvalidRequestError(
        f"chat({messages!r}): give a list of messages, or a list of such lists; a message is {{'role': 'user', "
        "'content': ...}"
    )


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
) -> str:
    """The prompt that a model's chat template makes of `messages`.

    `variables` are the template's own (bos_token, tools, ...). Special tokens are in the text: encode it with
    add_special_tokens=False. The template is run in jinja's sandbox.

    Raises:
        ModelLoadError: a template that is no jinja.
        InvalidRequestError: messages that it can not take.
    """
    from jinja2 import TemplateSyntaxError
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
    try:
        return environment.from_string(template).render(
            messages=messages, add_generation_prompt=add_generation_prompt, **variables
        )
    except TemplateSyntaxError as error:
        raise ModelLoadError(f"the model's chat template is no valid jinja: {error}") from error
    except (TemplateError, TypeError, KeyError, AttributeError, ValueError) as error:
        raise InvalidRequestError(
            f"the model's chat template can not take these messages: {error}"
        ) from error


def _to_json(value: Any, **options: Any) -> str:
    return json.dumps(value, **{"ensure_ascii": False, **options})


def _refuse(message: str) -> None:
    raise InvalidRequestError(f"the model's chat template refuses these messages: {message}")


def _now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
