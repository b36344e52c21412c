"""Records that flow between stages; one file per kind."""

assert __name__ == "purestep.pure.records", f"import this package as purestep.pure.records, not as {__name__}"
