"""Every kernel on small inputs, for compute-sanitizer; each is checked against its definition as well.

    export PYTHONPATH=.ci/src:.ci/test OURS='--kernel-name regex=^_[a-z]'
    python -P tests/bench/gpu_sanitize.py                       # first: fills Triton's cache on disk
    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer $OURS --tool memcheck python -P tests/bench/gpu_sanitize.py
    compute-sanitizer $OURS --tool racecheck python -P tests/bench/gpu_sanitize.py

Only our kernels are watched, whose names begin so: those of torch that check them would take many times as long. A part
of the checks, as `1/4` (the second of four), lets several runs share the work; `--only` and `--but` choose by name.

Without torch's cache every tensor is an allocation of its own, so that a step beyond its end is seen. The exit status
is 1 if a check fails.
"""

import argparse
import sys
import time

from tests.kernels.triton import gpu_checks, gpu_fused_checks

SMALL_VOCAB = 3000
SLOW = (
    "beyond 2**31",
    "replays",
    "thirty times",
    "launches",
    "logits of",
)  # nothing there that others do not launch


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", nargs="?", default="0/1")
    parser.add_argument("--only", default="", help="only checks whose names contain this")
    parser.add_argument("--but", nargs="*", default=[], help="not the checks of these names")
    options = parser.parse_args()
    index, num_parts = map(int, options.part.split("/"))
    for module in (gpu_checks, gpu_fused_checks):
        module.SHAPES = {name: gpu_checks.SHAPES[name] for name in ("1B", "96")}
    gpu_checks.VOCAB = SMALL_VOCAB
    gpu_fused_checks.PRODUCTS = [(2048, 2048), *gpu_fused_checks.PRODUCTS[-2:]]
    begun, num_checks, num_failed = time.monotonic(), 0, 0
    checks = [*gpu_checks._checks(1), *gpu_fused_checks._checks(1)]
    quick = [(name, check) for name, check in checks if not any(word in name for word in SLOW)]
    for name, check in quick[index::num_parts]:
        if options.only not in name or name in options.but:
            continue
        print(f"     {name} ...", flush=True)  # for whoever stops it
        holds, detail = check()
        num_checks, num_failed = num_checks + 1, num_failed + (not holds)
        print(f"{'ok  ' if holds else 'FAIL'} {name}" + ("" if holds else f": {detail[:200]}"), flush=True)
    print(f"{num_checks} checks, {num_failed} failed, {time.monotonic() - begun:.0f} s", flush=True)
    return int(num_failed > 0)


if __name__ == "__main__":
    sys.exit(main())
