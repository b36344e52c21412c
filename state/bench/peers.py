"""Other engines, behind the same protocol as ours: what is asked of them, and how it is timed, is the same."""

import gc
import importlib.metadata
import importlib.util
import json
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import attrs
import torch

from purestep.pure.errors import BenchmarkError
from purestep.pure.models.names import to_hf_views
from purestep.state.bench.hf import hf_config
from purestep.state.bench.methods import Generate, Prompts, Tokens
from purestep.state.bench.shapes import SHAPES, Subject
from purestep.state.loading.loaded import LoadedModel

END_OF_SEQUENCE: dict[str, Any] = {"eos_token_id": None, "pad_token_id": 0}  # nothing ends an output early


@attrs.frozen
class Room:
    """What an engine must have room for."""

    num_requests: int
    length: int  # tokens of the longest request
    free_share: float = 0.9  # of the device's memory


@attrs.frozen
class Peer:
    """Another engine; `open` takes the subject, a function that gives its weights, and the room."""

    name: str  # the package
    open: Callable[[Subject, Callable[[], LoadedModel], Room], AbstractContextManager[Generate]]

    @property
    def version(self) -> str:
        """The installed one."""
        return importlib.metadata.version(self.name)


def installed() -> tuple[Peer, ...]:
    """The peers that could be imported here."""
    return tuple(peer for peer in PEERS if importlib.util.find_spec(peer.name) is not None)


@contextmanager
def open_transformers(subject: Subject, weights: Callable[[], LoadedModel], room: Room) -> Iterator[Generate]:
    """`generate` of transformers with a static cache, which it compiles on a GPU; our own weights, as views.

    Raises:
        BenchmarkError: a model that it has no config for here.
    """
    import transformers

    loaded = weights()
    fields = hf_config(loaded.model.config) | END_OF_SEQUENCE
    views = to_hf_views(loaded.model.config, loaded.params.tree)
    config = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        module = auto.from_config(config, attn_implementation="sdpa")
    module.load_state_dict({"lm_head.weight": views["model.embed_tokens.weight"]} | views, assign=True)
    _compute_buffers(module.eval(), subject)
    last_batch = 0

    def generate(prompts: Prompts, num_tokens: int, sampling: Mapping[str, Any]) -> Tokens:
        nonlocal last_batch
        if subject.is_gpu and len(prompts) != last_batch:
            torch.compiler.reset()  # else a second batch is compiled for any batch, which is slower
            last_batch = len(prompts)
        ids = torch.tensor(prompts, device=subject.device)
        random = sampling["temperature"] > 0
        settings = {"do_sample": True, **sampling} if random else {"do_sample": False}
        output = module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            cache_implementation="static",
            **settings,
            **END_OF_SEQUENCE,
        )
        tokens: list[list[int]] = output[:, ids.shape[1] :].tolist()
        return tokens

    try:
        yield generate
    finally:
        if subject.is_gpu:
            torch.compiler.reset()  # with it goes the memory of its graphs


def _compute_buffers(module: Any, subject: Subject) -> None:
    """Rotary frequencies, which are none of the weights, computed where the module runs."""
    for child in module.modules():
        if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
            with torch.device(subject.device):
                computed = type(child)(module.config)
            for name, buffer in computed.named_buffers(recurse=False):
                setattr(child, name, buffer)


@contextmanager
def open_vllm(subject: Subject, weights: Callable[[], LoadedModel], room: Room) -> Iterator[Generate]:
    """vLLM's `LLM` as it is by default; named shapes get its own dummy weights, whose values cost no time.

    Raises:
        BenchmarkError: a model that is no folder, or a build for another kind of device.
    """
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]
    from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]

    built_for = current_platform.device_type
    if built_for != torch.device(subject.device).type:
        raise BenchmarkError(f"this vLLM is built for {built_for}, and {subject.device} is to be measured")
    with tempfile.TemporaryDirectory() as made:
        folder = made if subject.shape is not None else subject.model
        if subject.shape is not None:
            (Path(made) / "config.json").write_text(json.dumps(hf_config(SHAPES[subject.shape])))
        if folder is None or not Path(folder).is_dir():
            raise BenchmarkError(f"vLLM is measured on folders and named shapes; {folder} is neither")
        engine = LLM(
            model=str(folder),
            load_format="auto" if subject.shape is None else "dummy",
            skip_tokenizer_init=True,
            dtype=subject.dtype,
            max_model_len=room.length,
            max_num_seqs=room.num_requests,
            enable_prefix_caching=True,
            **({"gpu_memory_utilization": room.free_share} if subject.is_gpu else {}),
        )

        def generate(prompts: Prompts, num_tokens: int, sampling: Mapping[str, Any]) -> Tokens:
            params = SamplingParams(max_tokens=num_tokens, ignore_eos=True, detokenize=False, **sampling)
            asked = [{"prompt_token_ids": prompt} for prompt in prompts]
            results = engine.generate(asked, params, use_tqdm=False)
            return [result.outputs[0].token_ids for result in results]

        try:
            yield generate
        finally:
            engine.llm_engine.engine_core.shutdown()


PEERS = (Peer("transformers", open_transformers), Peer("vllm", open_vllm))


def free_share(subject: Subject) -> float:
    """The share of the device's memory that a peer in a process of its own may have, since we hold some of it."""
    if not subject.is_gpu:
        return 0.9
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(subject.device)
    return round(0.95 * free / total, 3)
