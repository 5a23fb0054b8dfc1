"""kvx in PyTorch: the verbs as operators for torch.compile and CUDA graphs, attention that is
planned once a step for all layers, and attention over quantised keys and values for research.

Works on CPU tensors and on CUDA tensors alike. No gradient flows through a verb.
"""

from kvx.torch.attention import attention
from kvx.torch.batch import BatchAttention, BatchDecode, BatchPrefill
from kvx.torch.layers import register_layer, registered_layer, unregister_layer
from kvx.torch.operators import (
    append,
    attend,
    attend_into,
    copy_blocks,
    dequantize,
    gather,
    quantize,
)

__all__ = [
    "BatchAttention",
    "BatchDecode",
    "BatchPrefill",
    "append",
    "attend",
    "attend_into",
    "attention",
    "copy_blocks",
    "dequantize",
    "gather",
    "quantize",
    "register_layer",
    "registered_layer",
    "unregister_layer",
]
