"""Every kernel in plain torch, out of place: the definition that all others must equal."""

from purestep.kernels.reference.attention import attend
from purestep.kernels.reference.choose import choose, exponentials, judge
from purestep.kernels.reference.compositions import (
    attend_qkv,
    logits,
    norm_gate_up,
    norm_linear,
    score_hidden,
)
from purestep.kernels.reference.constraints import add_bias, allow_only, ban_bad_words, ban_tokens
from purestep.kernels.reference.dense import (
    add_rms_norm,
    embed,
    linear,
    prepare,
    rms_norm,
    rotate,
    silu_and_mul,
)
from purestep.kernels.reference.draft_ends import advance_drafts, lay_out_drafts, put_drafts
from purestep.kernels.reference.draw import draw, greedy, scale_by_temperature, temperature_offset
from purestep.kernels.reference.ends import advance, lay_out
from purestep.kernels.reference.grammar import apply_grammar_bitmask
from purestep.kernels.reference.layout import ragged_index, take_rows
from purestep.kernels.reference.logprobs import gather_ids, gather_logprobs, score
from purestep.kernels.reference.ngram import propose_ngram
from purestep.kernels.reference.penalties import penalize
from purestep.kernels.reference.philox import uniforms
from purestep.kernels.reference.rope import angles
from purestep.kernels.reference.scales import scales_of
from purestep.kernels.reference.truncate import truncate
from purestep.kernels.reference.verify import count_accepted, draw_last, verify_greedy
from purestep.kernels.reference.writes import copy_blocks, write, zero_blocks
from purestep.kernels.types import Kernels

assert __name__ == "purestep.kernels.reference", (
    f"import this package as purestep.kernels.reference, not as {__name__}"
)

reference = Kernels(
    lay_out=lay_out,
    advance=advance,
    lay_out_drafts=lay_out_drafts,
    advance_drafts=advance_drafts,
    put_drafts=put_drafts,
    ragged_index=ragged_index,
    take_rows=take_rows,
    write=write,
    copy_blocks=copy_blocks,
    zero_blocks=zero_blocks,
    scales_of=scales_of,
    prepare=prepare,
    embed=embed,
    linear=linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    angles=angles,
    rotate=rotate,
    silu_and_mul=silu_and_mul,
    attend=attend,
    norm_linear=norm_linear,
    norm_gate_up=norm_gate_up,
    logits=logits,
    attend_qkv=attend_qkv,
    uniforms=uniforms,
    apply_grammar_bitmask=apply_grammar_bitmask,
    allow_only=allow_only,
    ban_bad_words=ban_bad_words,
    ban_tokens=ban_tokens,
    add_bias=add_bias,
    penalize=penalize,
    scale_by_temperature=scale_by_temperature,
    temperature_offset=temperature_offset,
    truncate=truncate,
    greedy=greedy,
    draw=draw,
    exponentials=exponentials,
    choose=choose,
    judge=judge,
    gather_logprobs=gather_logprobs,
    score=score,
    score_hidden=score_hidden,
    gather_ids=gather_ids,
    verify_greedy=verify_greedy,
    count_accepted=count_accepted,
    draw_last=draw_last,
    propose_ngram=propose_ngram,
)
