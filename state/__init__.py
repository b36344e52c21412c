"""Everything that changes or talks to the world: buffers, engine, loaders, command line."""

assert __name__ == "purestep.state", f"import this package as purestep.state, not as {__name__}"
