"""Whether other parameters may take the place of a model's."""

from typing import Any

import torch.utils._pytree as pytree

from purestep.pure.errors import InvalidParameterError


def check_alike(old: Any, new: Any) -> None:
    """Raise unless two trees of tensors have the same structure, shapes, dtypes and device."""
    old_leaves, old_spec = pytree.tree_flatten_with_path(old)
    new_leaves, new_spec = pytree.tree_flatten_with_path(new)
    if old_spec != new_spec:
        raise InvalidParameterError(
            f"the new parameters have the structure {new_spec}; the model's have {old_spec}"
        )
    for (path, a), (_, b) in zip(old_leaves, new_leaves, strict=True):
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            raise InvalidParameterError(
                f"parameter {pytree.keystr(path)} is {tuple(b.shape)} {b.dtype} on {b.device}; "
                f"the model's is {tuple(a.shape)} {a.dtype} on {a.device}: give one like it"
            )


def same_storage(old: Any, new: Any) -> bool:
    """Whether two trees of tensors lie at the same addresses."""
    leaves = [*pytree.tree_leaves(old), *pytree.tree_leaves(new)]
    if any(leaf.is_mkldnn for leaf in leaves):
        return False  # packed copies have no address to compare, and do not follow what they were made of
    pairs = zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True)
    return all(a.data_ptr() == b.data_ptr() for a, b in pairs)
