"""`purestep bench`: how fast a model runs here, beside what the device allows and what other engines do."""

assert __name__ == "purestep.state.bench", f"import it as purestep.state.bench, not as {__name__}"
