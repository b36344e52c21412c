"""Kernels for the CPU in torch: they write in place what may be written, and read lengths on the host."""

assert __name__ == "purestep.kernels.cpu", f"import this package as purestep.kernels.cpu, not as {__name__}"
