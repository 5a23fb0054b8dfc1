"""LMDeploy's PyTorch engine: K and V of a layer apart, [blocks, tokens, heads, head_dim].

Written against LMDeploy 0.18 (docs/engines.md), whose TurboMind is ``kvx.engines.turbomind``. The
PyTorch engine numbers its policies otherwise: 16 and 17 are fp8 there. Its block_offsets go with
``kvx.engines.packed``.
"""

from typing import Any

from kvx.engines.layer import Layer
from kvx.engines.split import nhd
from kvx.errors import Error, UnsupportedError

_FLOATS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_FP8 = {16: "fp8_e4m3", 17: "fp8_e5m2"}
_OTHERS = {
    4: "a token has a scale and a zero point that is subtracted from its codes",
    8: "a token has a scale and a zero point that is subtracted from its codes",
    42: "its keys are 3-bit codebook numbers with a sign bit of their own (TurboQuant)",
}


def layer(
    k_cache: Any,
    v_cache: Any,
    quant_policy: int = 0,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> Layer:
    """A layer of k_cache and v_cache, [blocks, tokens, heads, head_dim] in any strides but those of
    head_dim, as the engine passes them to its attention.

    quant_policy: 0 (float32, float16 or bfloat16, what the arrays are), 16 (E4M3) or 17 (E5M2), the
                  engine's own number
    k_scale, v_scale: of fp8, the attention's k_scale and v_scale
    Raises kvx.UnsupportedError: 4, 8 and 42, whose rows are no format of kvx.
    """
    if quant_policy in _OTHERS:
        raise UnsupportedError(
            f"quant_policy is {quant_policy}: {_OTHERS[quant_policy]}; kvx reads 0, 16 and 17 of "
            f"LMDeploy's PyTorch engine"
        )
    if quant_policy in _FP8:
        return nhd(k_cache, v_cache, _FP8[quant_policy], k_scale=k_scale, v_scale=v_scale)
    if quant_policy != 0:
        raise Error(f"quant_policy is {quant_policy!r}; expected 0, 16 or 17")
    dtypes = [str(getattr(x, "dtype", type(x).__name__)) for x in (k_cache, v_cache)]
    format = _FLOATS.get(dtypes[0].removeprefix("torch."))
    if format is None or dtypes[0] != dtypes[1]:
        raise Error(
            f"k_cache is {dtypes[0]} and v_cache {dtypes[1]}; expected both float32, float16 or "
            f"bfloat16 with quant_policy 0"
        )
    return nhd(k_cache, v_cache, format, k_scale=k_scale, v_scale=v_scale)
