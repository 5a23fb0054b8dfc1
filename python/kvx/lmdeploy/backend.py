"""LMDeploy's table of operators with kvx's attention in it, and blocks of the size of kvx's pages.

LMDeploy asks its backend for the shapes of a block of keys and of values. kvx's page holds both, so
all of it is the keys' block, [tokens, numbers] of the model's dtype, and the values' is empty.
"""

import contextlib
import functools
from contextvars import ContextVar

from lmdeploy.pytorch.backends.attention import PagedAttentionBuildSpec, V4AttentionBuildSpec

from kvx.errors import UnsupportedError
from kvx.lmdeploy.attention import KvxAttention
from kvx.lmdeploy.pages import bytes_of_token, recipe_of_process

_layers: ContextVar[list[KvxAttention] | None] = ContextVar("kvx_layers", default=None)


@functools.cache
def backend_over(base):
    """base, a subclass of LMDeploy's OpsBackend, with kvx's attention and blocks."""

    class KvxOpsBackend(base):
        @classmethod
        def build_op(cls, spec, *, enable_deterministic=False):
            if isinstance(spec, V4AttentionBuildSpec):
                raise UnsupportedError(
                    "the model's attention is DeepSeek-V4's, which kvx does not compute; leave kvx "
                    "out for this model"
                )
            if isinstance(spec, PagedAttentionBuildSpec):
                return _new_layer(spec)
            return super().build_op(spec, enable_deterministic=enable_deterministic)

        @staticmethod
        def model_build_context(ctx_mgr):
            return _building(base.model_build_context(ctx_mgr))

        @staticmethod
        def get_k_block_shape(block_size, num_heads, head_size, dtype):
            return block_size, bytes_of_token(num_heads, head_size, block_size) // dtype.itemsize

        @staticmethod
        def get_v_block_shape(block_size, num_heads, head_size, dtype):
            return block_size, 0

    return KvxOpsBackend


def _new_layer(spec) -> KvxAttention:
    layers = _layers.get()
    layer = KvxAttention(spec, recipe_of_process(), is_first=not layers)
    if layers is not None:
        layers.append(layer)
    return layer


@contextlib.contextmanager
def _building(context):
    """While a model is made, its layers are counted: the first one plans each step."""
    token = _layers.set([])
    try:
        with context:
            yield
    finally:
        _layers.reset(token)
