"""TurboMind's words for a KV cache: quant_policy as a bitmask, modes, block sizes, estimates.

For LMDeploy users: the same names and numbers, checked by kvx before an engine sees them.
"""

import argparse
import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from kvx import _core
from kvx._core import KvCacheMode
from kvx.errors import Error, UnsupportedError
from kvx.refusals import in_words

QUANT_POLICIES = (0, 4, 8, 16)  # bits of a mask, never bit widths
KV_CACHE_FORMATS = ("auto", "int", "fp4")
FP4_BIT = 16
# Fields of LMDeploy 0.18's TurbomindEngineConfig that decide nothing about a block of its cache.
_OTHER_FIELDS = frozenset(
    "gemm_input_dtype model_format tp dp cp ep device_num attn_tp_size attn_cp_size attn_dp_size "
    "mlp_tp_size mlp_dp_size outer_dp_size nnodes node_rank dist_init_addr devices session_len "
    "max_batch_size cache_max_entry_count cache_chunk_size enable_prefix_caching "
    "cache_checkpoint_interval cache_prompt cache_prompt_boundary_skip cache_generation "
    "rope_scaling_factor use_logn_attn download_dir revision max_prefill_token_num "
    "num_tokens_per_iter max_prefill_iters async_ empty_init language_model_only communicator "
    "hf_overrides enable_metrics moe_a2a_backend".split()
)


@dataclass(frozen=True)
class BlockSizes:
    """Bytes of one block of the data pool, and of the scale pool (0 without one).

    q_bits: of a stored number; t_bits: of each of a token's two parameters (scale and zero)
    """

    q_bits: int
    t_bits: int
    block_bytes: int
    scale_block_bytes: int

    @property
    def bytes_per_block(self) -> int:
        """What a block costs: a memory budget divides by this."""
        return self.block_bytes + self.scale_block_bytes


@in_words
def get_kv_cache_mode(
    quant_policy: int, sm_version: int, *, fp4_format: str = "auto", fall_back: bool = False
) -> KvCacheMode:
    """The mode that a policy means on a GPU of ``sm_version`` (major * 10 + minor; 0: the CPU).

    FP4 goes before int8, int8 before int4. fp4_format: "auto", "mx" or "nv".
    Raises kvx.Error: a reserved or unknown bit. kvx.UnsupportedError: FP4 on an architecture
    without it, unless fall_back allows the int8 bit, then the int4 bit, then no quantisation.
    """
    return _core.get_kv_cache_mode(quant_policy, sm_version, fp4_format, fall_back)


@in_words
def get_cache_block_size(
    mode: KvCacheMode,
    *,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    block_len: int = 64,
    dtype: str = "float16",
) -> BlockSizes:
    """Bytes of a block, both pools. dtype is the engine's compute type.

    Raises kvx.Error: a count below 1, a head_dim that the mode cannot store (FP4: a multiple of
    16), another dtype than float16 and bfloat16.
    """
    return BlockSizes(
        **_core.turbomind_block_sizes(mode, dtype, num_layers, num_kv_heads, head_dim, block_len)
    )


@in_words
def recipe_of(
    quant_policy: int,
    *,
    dtype: str = "float16",
    sm_version: int = 0,
    fp4_format: str = "auto",
    rotate: bool = False,
) -> str:
    """The recipe of a kvx.Cache that stores a policy in TurboMind's blocks.

    FP4's scales are searched, which changes no layout. rotate: K and V are rotated as well, which
    kvx undoes and TurboMind's own kernels do not.
    Raises kvx.Error and kvx.UnsupportedError as get_kv_cache_mode does.
    """
    mode = get_kv_cache_mode(quant_policy, sm_version, fp4_format=fp4_format)
    recipe = _core.turbomind_recipe(mode, dtype)
    format, _, options = recipe.partition(":")
    return f"{format}:hadamard,{options}" if rotate else recipe


@dataclass
class TurbomindEngineConfig:
    """The fields of LMDeploy's engine configuration that decide about the KV cache, checked.

    quant_policy:    0 none, 4 int4, 8 int8, 16 the FP4 family
    kv_cache_format: "auto" follows quant_policy; "int" and "fp4" must agree with it
    device_type:     "cuda" (TurboMind has no other)
    capability:      (major, minor) of the GPU, against which FP4 is checked; None: that of the GPU
                     which torch sees, where a program has imported it

    Raises kvx.Error naming the field.
    """

    dtype: str = "auto"
    cache_block_seq_len: int = 64
    quant_policy: int = 0
    kv_cache_format: str = "auto"
    device_type: str = "cuda"
    capability: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        check_quant_policy(self.quant_policy)
        _check_choice("dtype", self.dtype, ("auto", "float16", "bfloat16"))
        check_kv_cache_format(self.kv_cache_format, self.quant_policy)
        _check_choice("device_type", self.device_type, ("cuda",))
        if self.cache_block_seq_len < 1:
            raise Error(f"cache_block_seq_len is {self.cache_block_seq_len}; expected 1 or more")
        if self.capability is None:
            self.capability = capability_of_device()
        if self.capability is None:
            if self.quant_policy == FP4_BIT:
                warnings.warn("quant_policy 16 is not checked: capability is unknown", stacklevel=3)
        else:
            self.mode(self.sm_version)  # raises where the GPU has no such mode

    @property
    def sm_version(self) -> int:
        """major * 10 + minor of the GPU. Raises kvx.Error: no capability was given."""
        if self.capability is None:
            raise Error("capability is None; expected the GPU's (major, minor)")
        major, minor = self.capability
        return major * 10 + minor

    def mode(self, sm_version: int) -> KvCacheMode:
        """What a cache of this configuration stores on such a GPU."""
        return get_kv_cache_mode(self.quant_policy, sm_version)

    def update_from(self, overrides: Mapping[str, object]) -> None:
        """Takes a model's own settings (a YAML engine_config, Hugging Face overrides) for fields
        that it names, but never quant_policy and kv_cache_format: those are the user's.

        LMDeploy's other fields are accepted and decide nothing here.
        Raises kvx.Error: a field that does not exist, or a value that does not fit; nothing has
        changed then.
        """
        fields = dict(self.__dict__)
        for name, value in overrides.items():
            if name in _OTHER_FIELDS:
                continue
            if name not in fields:
                raise Error(f"{name} is no field; expected one of {', '.join(fields)}")
            if name not in ("quant_policy", "kv_cache_format"):
                fields[name] = value
        self.__dict__.update(TurbomindEngineConfig(**fields).__dict__)

    def estimate(
        self, *, num_layers: int, num_kv_heads: int, head_dim: int, memory_bytes: int
    ) -> dict[str, int]:
        """Blocks and tokens that ``memory_bytes`` hold, the scale pool counted.

        Raises kvx.Error as get_cache_block_size does, and for an unknown capability.
        """
        if memory_bytes < 0:
            raise Error(f"memory_bytes is {memory_bytes}; expected 0 or more")
        sizes = get_cache_block_size(
            self.mode(self.sm_version),
            num_layers=num_layers,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_len=self.cache_block_seq_len,
            dtype="float16" if self.dtype == "auto" else self.dtype,
        )
        blocks = memory_bytes // sizes.bytes_per_block
        return {
            "blocks": blocks,
            "tokens": blocks * self.cache_block_seq_len,
            "bytes_per_block": sizes.bytes_per_block,
        }


def capability_of_device() -> tuple[int, int] | None:
    """(major, minor) of the current GPU of a torch that the program has imported."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    major, minor = torch.cuda.get_device_capability()
    return major, minor


def check_quant_policy(quant_policy: int) -> int:
    """quant_policy itself. Raises kvx.Error unless it is 0, 4, 8 or 16."""
    _check_choice("quant_policy", quant_policy, QUANT_POLICIES)
    return quant_policy


def check_kv_cache_format(kv_cache_format: str, quant_policy: int) -> None:
    """Raises kvx.Error: no such format, or one that quant_policy does not agree with."""
    _check_choice("kv_cache_format", kv_cache_format, KV_CACHE_FORMATS)
    expected = {"fp4": (FP4_BIT,), "int": (4, 8)}.get(kv_cache_format)
    if expected and quant_policy not in expected:
        raise Error(
            f"kv_cache_format is '{kv_cache_format}' but quant_policy is {quant_policy}; expected "
            f"{' or '.join(map(str, expected))}"
        )


def add_cli_arguments(parser: argparse.ArgumentParser) -> None:
    """``--quant-policy`` and ``--kv-cache-format``, as LMDeploy's tools spell them."""
    parser.add_argument(
        "--quant-policy",
        type=int,
        default=0,
        choices=QUANT_POLICIES,
        help="the KV cache: 0 not quantised, 4 int4, 8 int8, 16 FP4 (NVFP4 from Blackwell on, "
        "MXFP4 on Ada and Hopper)",
    )
    parser.add_argument(
        "--kv-cache-format",
        default="auto",
        choices=KV_CACHE_FORMATS,
        help="auto follows --quant-policy; int and fp4 insist on it",
    )


def _check_choice(name: str, value: object, choices: tuple[str, ...] | tuple[int, ...]) -> None:
    if isinstance(value, bool) or value not in choices:
        raise Error(f"{name} is {value!r}; expected one of {', '.join(map(str, choices))}")


__all__ = [
    "BlockSizes",
    "Error",
    "KvCacheMode",
    "TurbomindEngineConfig",
    "UnsupportedError",
    "add_cli_arguments",
    "check_kv_cache_format",
    "check_quant_policy",
    "get_cache_block_size",
    "get_kv_cache_mode",
    "recipe_of",
]
