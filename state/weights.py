"""Whether other parameters may take the place of a model's, and parameters where an engine wants them."""

from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from purestep.pure.errors import InvalidParameterError
from purestep.pure.models.model import Model
from purestep.pure.models.module import ModuleConfig
from purestep.pure.record import replace
from purestep.pure.records.params import Params

REMEDY = (
    "give a tree like engine.params.tree; from_hf_names(config, state_dict) of purestep.pure.models.names makes one "
    "from Hugging Face names"
)


DRAFT_REMEDY = (
    "this engine has a drafter with weights, and takes those of both: give "
    "with_draft_params(params, draft_params) of purestep.pure.drafters.joined"
)


def check_alike(old: Any, new: Any) -> None:
    """Nothing, if two trees of tensors have the same structure, shapes, dtypes and device.

    Raises:
        InvalidParameterError: the first difference, and what to do.
    """
    (wanted, wanted_spec), (found, found_spec) = _by_name(old), _by_name(new)
    for name in wanted:
        if name not in found:
            remedy = DRAFT_REMEDY if name.startswith("['draft']") else REMEDY
            raise InvalidParameterError(f"the new parameters lack {name}: {remedy}")
    for name in found:
        if name not in wanted:
            raise InvalidParameterError(f"the new parameters have {name}, which the model has not: {REMEDY}")
    if wanted_spec != found_spec:
        raise InvalidParameterError(
            f"the new parameters lie in other containers than the model's, lists for tuples or the like: {REMEDY}"
        )
    for name, a in wanted.items():
        b = found[name]
        if not isinstance(b, Tensor):
            raise InvalidParameterError(f"parameter {name} is a {type(b).__name__}, not a tensor: {REMEDY}")
        if (a.shape, a.dtype, a.device) != (b.shape, b.dtype, b.device):
            raise InvalidParameterError(
                f"parameter {name} is {tuple(b.shape)} {b.dtype} on {b.device}; "
                f"the model's is {tuple(a.shape)} {a.dtype} on {a.device}: give one like it"
            )


def _by_name(tree: Any) -> tuple[dict[str, Any], pytree.TreeSpec]:
    leaves, spec = pytree.tree_flatten_with_path(tree)
    return {pytree.keystr(path) or "(the whole)": leaf for path, leaf in leaves}, spec


def placed(model: Model, params: Params, *, dtype: torch.dtype, device: torch.device) -> Params:
    """The parameters on `device`, floating-point ones in `dtype`. What is so already is the same object.

    Raises:
        InvalidParameterError: the model is a torch module with tensors of its own on another device.
    """
    if isinstance(model.config, ModuleConfig):
        module = model.config.module
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.device.type != device.type:
                raise InvalidParameterError(
                    f"device='{device}': the model is a torch module, which lies on {tensor.device}: move the module, "
                    "and make the model of it again"
                )

    leaves, spec = pytree.tree_flatten(params.tree)
    with torch.no_grad():
        there = [x.to(device=device, dtype=dtype if x.is_floating_point() else x.dtype) for x in leaves]
    if all(new is old for new, old in zip(there, leaves, strict=True)):
        return params
    return replace(params, tree=pytree.tree_unflatten(there, spec))


def same_storage(old: Any, new: Any) -> bool:
    """Whether two trees of tensors lie at the same addresses."""
    leaves = [*pytree.tree_leaves(old), *pytree.tree_leaves(new)]
    if any(leaf.is_mkldnn for leaf in leaves):
        return False  # packed copies have no address to compare, and do not follow what they were made of
    pairs = zip(pytree.tree_leaves(old), pytree.tree_leaves(new), strict=True)
    return all(a.data_ptr() == b.data_ptr() for a, b in pairs)
