"""Records that flow between stages; one file per kind."""
