"""From files, hubs and memory to a model, its parameters and its tokenizer."""

from purestep.state.loading.load import load_model
from purestep.state.loading.loaded import LoadedModel

__all__ = ["LoadedModel", "load_model"]

assert __name__ == "purestep.state.loading", f"import this package as purestep.state.loading, not {__name__}"
