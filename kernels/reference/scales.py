"""Keys and values in a cache of eight bits: what is stored of them, and by which scale.

stored = x / scale, rounded to the nearest e4m3 number and never beyond the largest one; read = stored * scale. Scales
are float32 [2], of keys and of values; a cache of any other type has none.
Source: https://arxiv.org/abs/2209.05433 (e4m3).
"""

import torch
from torch import Tensor

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max  # 448


def stored(x: Tensor, scale: Tensor | None, dtype: torch.dtype) -> Tensor:
    """x as a cache of `dtype` holds it, by a scale that broadcasts against it; None: no scale, a plain cast.

    What is too large becomes the largest number of its sign, infinities too; NaN stays NaN.
    """
    if scale is None:
        return x.to(dtype)
    wide = torch.promote_types(x.dtype, torch.float32)
    return (x.to(wide) / scale).clamp(-LARGEST, LARGEST).to(dtype)


def scales_of(k: Tensor, v: Tensor, exists: Tensor) -> Tensor:
    """The scales by which the largest key and the largest value are stored as 448: float32 [2].

    k, v [tokens, kv_heads, dim]; tokens count where `exists` [tokens] says so, numbers where they are finite. Where
    none is left, or a scale would be 0, it is 1.
    Source: vllm/model_executor/layers/attention/attention.py calc_kv_scales.
    """
    real = exists[:, None, None]
    wide, most = torch.promote_types(k.dtype, torch.float32), torch.finfo(torch.float32).max
    largest = [torch.where(real & x.isfinite(), x, 0.0).abs().amax().to(wide) for x in (k, v)]
    scales = torch.stack(largest).clamp(max=most).to(torch.float32) / LARGEST
    return torch.where(scales > 0, scales, 1.0)


def check_scales(kv: Tensor, kv_scales: Tensor | None) -> None:
    """Nothing, if a cache of eight bits has scales and any other none.

    Raises:
        TypeError: it is not so.
    """
    if (kv.dtype == FP8) != (kv_scales is not None):
        raise TypeError(
            f"a cache of {kv.dtype} {'without' if kv_scales is None else 'with'} kv_scales: give float32 scales [2] "
            f"with a cache of {FP8}, and None with any other"
        )
