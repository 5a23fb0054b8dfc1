"""kvx: the KV cache of LLM inference, quantised, with attention straight from the packed bytes.

Arrays come from NumPy, PyTorch (CPU) or anything else that speaks the buffer protocol or DLPack;
kvx links none of them and copies nothing on the way in. Every verb runs without the GIL. A call
that kvx refuses raises ``kvx.Error`` (a ``ValueError``) that names the argument, its value and what
was expected, and changes nothing. No gradient flows through a verb.
"""

from kvx._core import __version__, num_threads, set_num_threads
from kvx.cache import Cache, Cost, Memory
from kvx.errors import Error, InternalError, OutOfRangeError, UnsupportedError
from kvx.formats import Format, Recipe, SideRecipe, formats, parse_recipe, recipe_options
from kvx.rows import Rows, dequantize, quantize

__all__ = [
    "Cache",
    "Cost",
    "Error",
    "Format",
    "InternalError",
    "Memory",
    "OutOfRangeError",
    "Recipe",
    "Rows",
    "SideRecipe",
    "UnsupportedError",
    "__version__",
    "dequantize",
    "formats",
    "num_threads",
    "parse_recipe",
    "quantize",
    "recipe_options",
    "set_num_threads",
]
