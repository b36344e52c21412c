"""Models as tuples of pieces; one file per family."""

assert __name__ == "purestep.pure.models", f"import this package as purestep.pure.models, not as {__name__}"
