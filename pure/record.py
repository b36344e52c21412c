"""Re-export of the record decorator: `from purestep.pure.record import record, replace, static`."""

from purestep.kernels.record import record, replace, static

__all__ = ["record", "replace", "static"]
