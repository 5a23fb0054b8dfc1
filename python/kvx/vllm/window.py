"""A full-precision window beside vLLM's pages: its memory in each layer, and the plan of a step.

vLLM's backends do not learn whose requests a step's rows are, and kvx.PagedWindow needs no names:
it follows pages. What it cannot see is a page that something else than a step writes, so connectors
and two batches at once are refused.

Dual-scale formats quantise whole blocks: the open block of a request is in the window alone, until
its last row is there or another request needs its place. Blocks that vLLM shares by their hash are
full, so their pages are complete.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context

from kvx.errors import Error, UnsupportedError
from kvx.formats import parse_recipe
from kvx.paged_layer import PagedLayer
from kvx.paged_window import PagedWindow, WindowPlan
from kvx.vllm.recipe import is_tuned
from kvx.vllm.step import StepLimits


@dataclass(frozen=True)
class WindowTokens:
    """How many tokens of a request stay in bf16: the first ones, and those before each query."""

    sink: int
    recent: int
    unit: str = "row"  # kvx.PagedWindow's

    def num_blocks(self, block_size: int, max_sequences: int) -> int:
        """Blocks of a layer's window."""
        return PagedWindow.blocks_for(
            block_size, sink=self.sink, recent=self.recent, max_sequences=max_sequences
        )


def split_window(recipe: str) -> tuple[str, WindowTokens | None]:
    """The recipe of the pages, and the window that the recipe names beside it.

    Raises kvx.Error: a window in another format than bf16, or none beside a dual-scale format.
    """
    parsed = parse_recipe(recipe)
    if parsed.full_precision_format is None and is_dual_scale(parsed):
        raise Error(
            f"recipe is '{recipe}'; dual-scale formats quantise blocks that leave a full-precision "
            f"window: add recent=N, or auto"
        )
    if parsed.full_precision_format is None:
        return recipe, None
    if parsed.full_precision_format != "bf16":
        raise Error(
            f"recipe is '{recipe}'; the window beside vLLM's pages is bf16 (leave "
            f"full_precision={parsed.full_precision_format} out)"
        )
    # A tuned recipe may store layers unlike, and a window of blocks takes any format.
    unit = "block" if is_dual_scale(parsed) or is_tuned(recipe) else "row"
    return f"{recipe},immediate", WindowTokens(parsed.sink_tokens, parsed.recent_tokens, unit)


def is_dual_scale(parsed) -> bool:
    """parsed: of parse_recipe. Whether keys or values are quantised by whole blocks."""
    return any(side.scale_rule == "dual" for side in (parsed.k, parsed.v))


def check_window(vllm_config) -> None:
    """Raises kvx.UnsupportedError: something that writes pages which no step has planned."""
    if vllm_config.kv_transfer_config is not None:
        raise UnsupportedError(
            "a full-precision window beside a KV connector or offloading, which write pages that "
            "the window does not see; add immediate to the recipe"
        )
    if vllm_config.parallel_config.use_ubatching:
        raise UnsupportedError(
            "a full-precision window with two batches at once (dual batch overlap); add immediate "
            "to the recipe"
        )


class StepWindow:
    """The plans of the steps of one builder's layers."""

    def __init__(self, tokens: WindowTokens, vllm_config, layer, block_size: int, device):
        """layer: of vLLM's, whose kv_cache has the pages once vLLM has allocated them."""
        self._tokens, self._layer, self._block_size = tokens, layer, block_size
        self._limits, self._device = StepLimits.of(vllm_config), torch.device(device)
        self._window: PagedWindow | None = None
        self._numbers: dict[int, WindowPlan] = {}  # by the width of a table: for the most requests
        self._plans: dict[tuple[int, int], WindowPlan] = {}
        self.plan: WindowPlan | None = None  # of the step
        self._has_decodes_alone = False  # each request of the step has at most one query
        is_cuda = self._device.type == "cuda"
        self._side_stream = torch.cuda.Stream(self._device) if is_cuda else None

    def plan_step(self, block_table, seq_lens, q_starts, max_q_len) -> WindowPlan:
        """Plans a step into arrays that a CUDA graph finds again."""
        self._has_decodes_alone = max_q_len <= 1
        if self._window is None:
            self._window = self._new_window(self._layer.kv_cache.shape[0])
        plan = self._arrays(*block_table.shape)
        self.plan = self._window.plan(
            block_table, seq_lens, q_starts, len(plan.window_slots), out=plan
        )
        return self.plan

    def plan_warm_up(self, num_pages, block_table, seq_lens, q_starts) -> WindowPlan:
        """Plans a step of pages that are no request's."""
        self._has_decodes_alone = False
        window = self._new_window(num_pages)
        self.plan = window.plan(block_table, seq_lens, q_starts, self._limits.max_queries)
        return self.plan

    @property
    def closes_beside_attention(self) -> bool:
        """Whether a layer's full blocks are quantised beside its attention, which does not read
        them, instead of before it. In a graph of whole steps that costs nothing; in others append
        may be captured apart from attention, and without one it would cost the host more than it
        saves."""
        return (
            self._side_stream is not None
            and self._tokens.unit == "block"
            and self._has_decodes_alone
            and torch.cuda.is_current_stream_capturing()
            and get_forward_context().cudagraph_runtime_mode == CUDAGraphMode.FULL
        )

    @contextmanager
    def beside(self, work):
        """Runs work() on a stream of its own, beside what the block launches."""
        self._side_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._side_stream):
            work()
        yield
        torch.cuda.current_stream().wait_stream(self._side_stream)

    def _new_window(self, num_pages):
        return PagedWindow(
            num_pages,
            self._block_size,
            sink=self._tokens.sink,
            recent=self._tokens.recent,
            max_sequences=self._limits.max_sequences,
            unit=self._tokens.unit,
            device=_name_of(self._device),
        )

    def _arrays(self, requests: int, width: int) -> WindowPlan:
        """Views of one set of arrays a width. vLLM's tables have one width in an engine's life."""
        if (requests, width) in self._plans:
            return self._plans[requests, width]
        most = max(self._limits.max_queries, requests)  # vLLM pads requests up to rows
        if width not in self._numbers:
            self._numbers[width] = WindowPlan(
                self._zeros((most, width), torch.int32),
                self._zeros((most,), torch.int32),
                self._zeros((most,), torch.int32),
                self._zeros((most,), torch.int64),
                self._zeros((most,), torch.int64),
                *self._block_copies(most),
            )
        whole = self._numbers[width]
        plan = replace(
            whole,
            block_table=whole.block_table[:requests],
            num_sink_blocks=whole.num_sink_blocks[:requests],
            first_recent_blocks=whole.first_recent_blocks[:requests],
        )
        for name, length in self._copy_lists(requests):
            for part in ("from", "to", "tokens"):
                numbers = getattr(whole, f"{name}_{part}")
                setattr(plan, f"{name}_{part}", numbers[:length])
        self._plans[requests, width] = plan
        return plan

    def _copy_lists(self, requests):
        """(name, length) of the plan's lists of block copies, in its order."""
        if self._tokens.unit == "row":
            return []
        of_window = requests * self._window.closing_blocks_per_sequence
        return [("closing", of_window), ("evicted", of_window), ("reopened", requests)]

    def _block_copies(self, requests):
        dtypes = (torch.int64, torch.int64, torch.int32)
        lengths = [length for _, length in self._copy_lists(requests)]
        return [self._zeros((length,), dtype) for length in lengths for dtype in dtypes]

    def _zeros(self, shape, dtype):
        return torch.zeros(shape, dtype=dtype, device=self._device)


def new_window_pages(layer: PagedLayer, tokens: WindowTokens, block_size, vllm_config, device):
    """uint8 [blocks, bytes]: a layer's memory for the windows of all requests of a step."""
    num_blocks = tokens.num_blocks(block_size, StepLimits.of(vllm_config).max_sequences)
    return torch.zeros((num_blocks, layer.window_block_bytes), dtype=torch.uint8, device=device)


def _name_of(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    return f"cuda:{torch.cuda.current_device() if device.index is None else device.index}"
