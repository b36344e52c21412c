"""The default model, opened once."""

import pytest

from purestep.state.loading.fields import Fields
from purestep.state.loading.gguf_file import open_gguf
from purestep.state.loading.gguf_tokenizer import gguf_tokenizer
from purestep.state.loading.load import default_model
from purestep.state.loading.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm_tokenizer() -> Tokenizer:
    """SmolLM2's tokenizer, without its weights."""
    return gguf_tokenizer(Fields(open_gguf(default_model()).metadata, "SmolLM2: "))
