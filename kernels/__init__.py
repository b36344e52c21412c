"""Functions of tensors. They know no stage; `Kernels` is the record that stages are given."""

assert __name__ == "purestep.kernels", f"import this package as purestep.kernels, not as {__name__}"
