"""A target model and its drafter as one: one KV cache, one tree of parameters."""

from purestep.pure.errors import DrafterError
from purestep.pure.models.model import Model
from purestep.pure.record import replace
from purestep.pure.records.drafter import Drafter
from purestep.pure.records.params import Params


def with_drafter(model: Model, drafter: Drafter) -> Model:
    """The model with the drafter's layers behind its own; it computes what it did.

    Raises:
        DrafterError: the drafter was made for another model.
    """
    if drafter.kv_layers and drafter.target_layers != model.kv_layers:
        raise DrafterError(
            f"a drafter whose layers lie behind {len(drafter.target_layers)} layers of the model that it was made for, "
            f"and {model.name} has other ones ({len(model.kv_layers)}): make the drafter for this model"
        )
    return replace(
        model,
        kv_layers=model.kv_layers + drafter.kv_layers,
        linear_paths=model.linear_paths + tuple(("draft", *path) for path in drafter.linear_paths),
    )


def with_draft_params(params: Params, draft: Params) -> Params:
    """The target's parameters, and in `tree["draft"]` the drafter's."""
    return Params(params.tree | {"draft": draft.tree}, params.version)
