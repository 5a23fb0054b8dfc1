"""Pages of this process's recipe in LMDeploy's blocks."""

import math
import os

import torch

from kvx.errors import Error
from kvx.lmdeploy.config import RECIPE_VARIABLE
from kvx.paged_layer import PagedLayer

_BLOCK_ALIGNMENT = 256  # LMDeploy's, of a block in its pool: kvx's pages lie without gaps then


def recipe_of_process() -> str:
    """Raises kvx.Error: KVX_LMDEPLOY_RECIPE is not set."""
    recipe = os.environ.get(RECIPE_VARIABLE)
    if not recipe:
        raise Error(
            f"{RECIPE_VARIABLE} is not set in a process of LMDeploy's that kvx's module map was "
            f"loaded in; call kvx.lmdeploy.enable() where the engine is made, or set it everywhere"
        )
    return recipe


def new_pages(
    num_kv_heads: int, head_dim: int, block_size: int, device: str | torch.device
) -> PagedLayer:
    """The pages of a layer as this process stores them."""
    return PagedLayer(
        recipe_of_process(),
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        device=str(device),
    )


def bytes_of_token(num_kv_heads: int, head_dim: int, block_size: int) -> int:
    """Bytes that LMDeploy reserves for a token of a layer, so that block_size of them hold a page
    and end on its alignment."""
    page_bytes = new_pages(num_kv_heads, head_dim, block_size, "cpu").page_bytes
    step = _BLOCK_ALIGNMENT // math.gcd(_BLOCK_ALIGNMENT, block_size)
    return -(-page_bytes // (block_size * step)) * step
