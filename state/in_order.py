"""Results one by one, in the order in which they were asked for."""

from collections.abc import Iterator, Sequence

from purestep.pure.errors import InvalidRequestError
from purestep.pure.records.sampling_params import SamplingParams
from purestep.state.engine import Engine
from purestep.state.progress import Report
from purestep.state.results import RequestOutput
from purestep.state.submission import Prompt, refused_output


def in_order(
    engine: Engine,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    report: Report,
    add_special_tokens: bool = True,
) -> Iterator[RequestOutput]:
    """The results that `engine.generate(prompts, params, on_error="return")` gives, each as early as the order allows.

    That is when it and all before it are finished or refused. The engine must have no other requests.
    """
    done, num_before = dict[str, RequestOutput](), engine.turns.num_tokens
    for i, prompt in enumerate(prompts):
        stream = None if params.seed is None else i * params.n
        try:
            engine.add_request(str(i), prompt, params, stream=stream, add_special_tokens=add_special_tokens)
        except InvalidRequestError as error:
            done[str(i)] = refused_output(str(i), prompt, error)
    for i in range(len(prompts)):
        while str(i) not in done:
            done |= {result.req_id: result for result in engine.step() if result.finished}
            report(finished=i + len(done), tokens=engine.turns.num_tokens - num_before)
        yield done.pop(str(i))
