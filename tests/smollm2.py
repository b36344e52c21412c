"""The real model, where it is installed."""

import pytest

from purestep.pure.errors import ModelLoadError
from purestep.state.loading.load import default_model
from tests import profiles


def needs_smollm2() -> None:
    """Skip, loudly, without SmolLM2; in CI its absence fails."""
    try:
        default_model()
    except ModelLoadError as error:
        if profiles.IN_CI:
            pytest.fail(f"{error} (CI=true, so its absence fails)", pytrace=False)
        pytest.skip(str(error))
