"""Kernels that write their argument's storage, in torch: what the engine runs on the CPU.

`donating` means the same as `reference`. It writes in place where `Kernels` says "donates"; the functions of a
model's layers are other formulations of the reference's, equal up to rounding.
"""

from purestep.kernels.cpu.attention import attend, attend_qkv
from purestep.kernels.cpu.dense import add_rms_norm, embed, linear, prepare, rms_norm, rotate, silu_and_mul
from purestep.kernels.cpu.logprobs import gather_logprobs, score
from purestep.kernels.cpu.writes import copy_blocks, write, zero_blocks
from purestep.kernels.record import replace
from purestep.kernels.reference import reference

donating = replace(
    reference,
    write=write,
    copy_blocks=copy_blocks,
    zero_blocks=zero_blocks,
    prepare=prepare,
    embed=embed,
    linear=linear,
    rms_norm=rms_norm,
    add_rms_norm=add_rms_norm,
    rotate=rotate,
    silu_and_mul=silu_and_mul,
    attend=attend,
    attend_qkv=attend_qkv,
    gather_logprobs=gather_logprobs,
    score=score,
)
