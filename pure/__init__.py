"""Records and stages of one inference step: no mutation, no CUDA, no files."""

assert __name__ == "purestep.pure", f"import this package as purestep.pure, not as {__name__}"
