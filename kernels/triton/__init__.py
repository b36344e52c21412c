"""Triton kernels for CUDA: `cuda_donating()` is `reference` with these in the place of its functions.

Triton is imported when that is called, not when this package is. The modules in here are the only ones that import
it at their top. Every function has the signature and the meaning of its namesake in `kernels/reference`; types wider
than float32 are refused. None of them waits for the device or sizes memory by what lies on it, so all can be
captured; none adds in an order that depends on timing, so a replay gives the same bits.
"""

from purestep.kernels.record import replace
from purestep.kernels.reference import reference
from purestep.kernels.types import Function, Kernels

assert __name__ == "purestep.kernels.triton", (
    f"import this package as purestep.kernels.triton, not as {__name__}"
)


def cuda_donating() -> Kernels:
    """The kernels for a state in persistent CUDA memory: those that may write their argument's storage do.

    `linear` of several rows is mostly torch's, which is cuBLAS. Rules that name tokens (`allow_only`, `ban_bad_words`,
    `ban_tokens`, `add_bias`), `gather_ids`, `scales_of` and `temperature_offset` are the reference's: rarely used.

    Raises:
        ImportError: triton is not installed.
    """
    from purestep.kernels.triton.attention import attend, attend_qkv
    from purestep.kernels.triton.choose import choose, judge
    from purestep.kernels.triton.dense import add_rms_norm, rms_norm, rotate, silu_and_mul
    from purestep.kernels.triton.draw import draw, greedy, scale_by_temperature
    from purestep.kernels.triton.ends import advance, lay_out
    from purestep.kernels.triton.grammar import apply_grammar_bitmask
    from purestep.kernels.triton.hidden_scores import score_hidden
    from purestep.kernels.triton.layout import ragged_index, take_rows
    from purestep.kernels.triton.linear import linear, logits, norm_gate_up, norm_linear
    from purestep.kernels.triton.logprobs import gather_logprobs, score
    from purestep.kernels.triton.penalties import penalize
    from purestep.kernels.triton.philox import uniforms
    from purestep.kernels.triton.rope import angles
    from purestep.kernels.triton.truncate import truncate
    from purestep.kernels.triton.writes import copy_blocks, embed, write, zero_blocks

    return replace(
        reference,
        lay_out=lay_out,
        advance=advance,
        ragged_index=ragged_index,
        take_rows=take_rows,
        write=write,
        copy_blocks=copy_blocks,
        zero_blocks=zero_blocks,
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
        penalize=penalize,
        scale_by_temperature=scale_by_temperature,
        truncate=truncate,
        greedy=greedy,
        draw=draw,
        choose=choose,
        judge=judge,
        gather_logprobs=gather_logprobs,
        score=score,
        score_hidden=score_hidden,
        **_speculation(),
    )


def _speculation() -> dict[str, Function]:
    """Those of verification and of drafters."""
    from purestep.kernels.triton.draft_ends import advance_drafts, lay_out_drafts, put_drafts
    from purestep.kernels.triton.ngram import propose_ngram
    from purestep.kernels.triton.verify import count_accepted, draw_last, verify_greedy

    return {
        "lay_out_drafts": lay_out_drafts,
        "advance_drafts": advance_drafts,
        "put_drafts": put_drafts,
        "verify_greedy": verify_greedy,
        "count_accepted": count_accepted,
        "draw_last": draw_last,
        "propose_ngram": propose_ngram,
    }


def cuda_invariant() -> Kernels:
    """`cuda_donating` with products and attention that give a token the same bits in every batch.

    So a request's logits do not depend on who else runs, on chunks, padding or graphs. Tiles and splits are fixed by
    the shapes of weights and heads; that costs time where another tile would be faster.

    Raises:
        ImportError: triton is not installed.
    """
    from purestep.kernels.triton.fixed import linear, logits
    from purestep.kernels.triton.invariant import attend, attend_qkv

    return replace(
        cuda_donating(),
        linear=linear,
        norm_linear=reference.norm_linear,
        norm_gate_up=reference.norm_gate_up,
        logits=logits,
        attend=attend,
        attend_qkv=attend_qkv,
    )
