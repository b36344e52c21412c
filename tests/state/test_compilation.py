"""Steps that are compiled ahead: they run without memory, and leave the buffers as they are."""

import torch

from purestep.kernels.reference import reference
from purestep.pure.models.initialize import random_params, tiny_config
from purestep.pure.models.llama import llama
from purestep.pure.padding import capture_layout
from purestep.pure.records.batch import BatchLimits
from purestep.pure.records.inputs import BatchDescriptor
from purestep.pure.records.layout import SamplerShape
from purestep.state.buffers import PersistentBuffers
from purestep.state.compilation import compile_steps, steps_without_memory
from purestep.state.profile import profile_layouts
from purestep.state.run import BoundStep
from tests.laws import digest

LIMITS = BatchLimits(max_num_reqs=4, max_model_len=64, vocab_size=64, block_sizes=(4,), num_blocks=(32,))


def test_steps_run_without_memory_and_change_nothing() -> None:
    config = tiny_config(vocab_size=64, hidden_size=32, num_layers=1, max_position_embeddings=64)
    model = llama(config)
    buffers = PersistentBuffers(model, LIMITS)
    bound = BoundStep(buffers, model, random_params(config, seed=0), reference)
    before = digest(buffers.lease().value)

    decodes = [
        capture_layout(BatchDescriptor(num, num, True), LIMITS, sampler=sampler)
        for num in (1, 4)
        for sampler in (SamplerShape(), SamplerShape(random=True, truncated=True))
    ]
    layouts = [*decodes, *profile_layouts(LIMITS, 16)]
    outputs = [call()[1] for call in steps_without_memory(bound, layouts)]
    compile_steps(bound, layouts)  # on a CPU there is nothing to compile

    assert [len(output.sampled_token_ids) for output in outputs] == [
        layout.bounds.num_reqs for layout in layouts
    ]
    assert all(output.sampled_token_ids.device == torch.device("meta") for output in outputs)
    assert digest(buffers.lease().value) == before
