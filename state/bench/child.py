"""Start-up, in a process of its own: from before anything is imported to the first token.

`python -m purestep.state.bench.child '{"who": ..., "subject": {...}}'` writes one line of JSON: seconds. Nothing is
imported up here that takes time, so that all of that is within what is timed.
"""

import importlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Any

PROMPT_TOKENS = 16


def first_token(told: Mapping[str, Any]) -> dict[str, float]:
    """Seconds of importing, of making an engine with its weights, of the first token."""
    marks = [time.perf_counter()]
    from purestep.state.bench.engines import opened
    from purestep.state.bench.peers import PEERS, Room
    from purestep.state.bench.shapes import Subject, load

    others = {peer.name: peer.open for peer in PEERS}
    subject, prompt = Subject(**told["subject"]), [list(range(1, 1 + PROMPT_TOKENS))]
    if told["who"] in others:
        importlib.import_module(told["who"])
        marks.append(time.perf_counter())
        context = others[told["who"]](subject, lambda: load(subject), Room(num_requests=64, length=2048))
    else:
        marks.append(time.perf_counter())
        context = opened(load(subject), subject)
    with context as generate:
        marks.append(time.perf_counter())
        tokens = generate(prompt, 1, {"temperature": 0.0})
        marks.append(time.perf_counter())
    assert [len(own) for own in tokens] == [1]
    names = ("import_s", "engine_s", "first_token_s")
    return {name: end - begun for name, begun, end in zip(names, marks, marks[1:], strict=False)}


if __name__ == "__main__":
    print(json.dumps(first_token(json.loads(sys.argv[1]))))
