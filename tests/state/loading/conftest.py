"""The default model, opened once."""

import pytest

from purestep.state.loading.gguf_file import open_gguf
from purestep.state.loading.gguf_tokenizer import gguf_tokenizer
from purestep.state.loading.load import default_model
from purestep.state.loading.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def smollm_tokenizer() -> Tokenizer:
    """SmolLM2's tokenizer, without its weights."""
    path = default_model()
    return gguf_tokenizer(open_gguf(path).metadata, source=str(path))
