"""Chat templates."""

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from purestep.pure.errors import InvalidRequestError, ModelLoadError
from purestep.state.loading.chat import render_chat
from purestep.state.loading.gguf_file import open_gguf
from purestep.state.loading.load import default_model

MESSAGES = [{"role": "user", "content": "What is gravity?"}, {"role": "assistant", "content": "A force."}]
TEMPLATES = {
    "SmolLM2's": None,
    "blocks and whitespace": (
        "{% for m in messages %}\n  {%- if m.role == 'user' %}\n[U] {{ m.content | trim }}\n"
        "  {%- elif m.role == 'assistant' %}\n[A] {{ m.content }}{{ eos_token }}\n  {%- endif %}\n{% endfor %}"
        "{% if add_generation_prompt %}[A]{% endif %}"
    ),
    "json, loops and breaks": (
        "{{ bos_token }}{{ messages | tojson }}{{ {'ä': '<&>'} | tojson(indent=2) }}"
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_rendered_as_transformers_does(name: str, add_generation_prompt: bool) -> None:
    """White space, filters, loop controls, variables."""
    template = TEMPLATES[name] or open_gguf(default_model()).metadata["tokenizer.chat_template"]
    variables = {"bos_token": "<s>", "eos_token": "</s>"}
    expected, _ = render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=add_generation_prompt, **variables
    )
    got = render_chat(template, MESSAGES, add_generation_prompt=add_generation_prompt, **variables)
    assert got == expected[0]


def test_a_template_may_refuse() -> None:
    """By raise_exception, with its own words."""
    with pytest.raises(InvalidRequestError, match="roles must alternate"):
        render_chat("{{ raise_exception('roles must alternate') }}", MESSAGES)


def test_messages_that_do_not_fit_are_refused() -> None:
    """What the template trips over is the request's fault."""
    with pytest.raises(InvalidRequestError, match="can not take these messages"):
        render_chat("{{ messages[0].content.parts[0].text }}", MESSAGES)


def test_a_broken_template_is_the_models_fault() -> None:
    """Named as such."""
    with pytest.raises(ModelLoadError, match="no valid jinja"):
        render_chat("{% if %}", MESSAGES)


def test_a_template_can_not_reach_out() -> None:
    """The sandbox stops what is no text."""
    for attack in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}"):
        with pytest.raises(InvalidRequestError, match="can not take"):
            render_chat(attack + "{{ (messages | list).__class__.x }}", MESSAGES)
