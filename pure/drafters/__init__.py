"""Drafters, each a record around two functions; one file per kind."""

assert __name__ == "purestep.pure.drafters", (
    f"import this package as purestep.pure.drafters, not as {__name__}"
)
