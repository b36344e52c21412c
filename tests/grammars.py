"""xgrammar where it is installed, and a tokenizer whose tokens can be read."""

import importlib.util

import pytest
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from purestep.state.loading.tokenizer import Tokenizer, wrap
from tests import profiles

EOS, MARK = 0, 1
TEXTS = (
    *"0123456789abcdefghijklmnoprstu",
    *'{}[]":,.- \n',
    *("ab", "true", "null", '":', '{"', '"}', "aa", "12", "é", "ä\n", "no", "cab", '",', "ef"),
)


def needs_xgrammar() -> None:
    """Skip, loudly, without xgrammar; in CI its absence fails."""
    if importlib.util.find_spec("xgrammar") is not None:
        return
    message = "xgrammar is not installed: pip install xgrammar"
    if profiles.IN_CI:
        pytest.fail(f"{message} (CI=true, so its absence fails)", pytrace=False)
    pytest.skip(message)


def small_tokenizer() -> Tokenizer:
    """At most 64 tokens: the end, a special one that looks like text, and pieces of JSON."""
    texts = ("<end>", "<mark>", *TEXTS)
    backend = Backend(models.WordLevel({text: i for i, text in enumerate(texts)}, unk_token="<end>"))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken("<end>", special=True), AddedToken("<mark>", special=True)])
    return wrap(backend)
