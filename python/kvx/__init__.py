"""kvx: the KV cache of LLM inference, quantised, with attention straight from the packed bytes.

Arrays come from NumPy, PyTorch, CuPy, JAX or anything else that speaks the buffer protocol or
DLPack; kvx links none of them and copies nothing on the way in. A cache made with device="cuda"
works on arrays of that GPU, all else on those of the CPU. Every verb runs without the GIL. A
call that kvx refuses raises ``kvx.Error`` (a ``ValueError``) that names the argument, its value and
what was expected, and changes nothing. No gradient flows through a verb.
"""

from kvx import _core
from kvx.cache import (
    Cache,
    Cost,
    EventPublisher,
    Export,
    ExportState,
    HostTier,
    Import,
    LoadReport,
    Memory,
    Saturation,
    Tier,
)
from kvx.compare import CacheFigures, Comparison, Estimate, compare
from kvx.errors import Error, InternalError, OutOfRangeError, UnsupportedError
from kvx.files import BlockCopyKind, CacheFile, inspect, verify
from kvx.formats import Format, Formats, Recipe, SideRecipe, formats, parse_recipe, recipe_options
from kvx.gates import GateError, GateFailure, HeadErrors
from kvx.observe import metrics, serve_metrics, stop_metrics
from kvx.paged_layer import PagedLayer
from kvx.paged_window import PagedWindow, WindowPlan
from kvx.rows import Rows, dequantize, quantize, transcode
from kvx.step import Step
from kvx.stores import Store, register_store, unregister_store
from kvx.threads import num_threads, set_num_threads, use_openmp

__version__: str = getattr(_core, "__version__")

__all__ = [
    "BlockCopyKind",
    "Cache",
    "CacheFigures",
    "CacheFile",
    "Comparison",
    "Cost",
    "Error",
    "Estimate",
    "EventPublisher",
    "Export",
    "ExportState",
    "Format",
    "Formats",
    "GateError",
    "GateFailure",
    "HeadErrors",
    "HostTier",
    "Import",
    "InternalError",
    "LoadReport",
    "Memory",
    "OutOfRangeError",
    "PagedLayer",
    "PagedWindow",
    "Recipe",
    "Rows",
    "Saturation",
    "SideRecipe",
    "Step",
    "Store",
    "Tier",
    "UnsupportedError",
    "WindowPlan",
    "__version__",
    "compare",
    "dequantize",
    "formats",
    "inspect",
    "metrics",
    "num_threads",
    "parse_recipe",
    "quantize",
    "recipe_options",
    "register_store",
    "serve_metrics",
    "set_num_threads",
    "stop_metrics",
    "transcode",
    "unregister_store",
    "use_openmp",
    "verify",
]
