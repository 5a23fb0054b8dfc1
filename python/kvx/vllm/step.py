"""What kvx keeps for vLLM's steps on a GPU: their largest shape, and one workspace a device."""

from dataclasses import dataclass

import torch

from kvx.paged_layer import PagedLayer

_MIB = 1 << 20


@dataclass(frozen=True)
class StepLimits:
    """The largest step that an engine makes. max_queries: rows of q, those of all requests."""

    max_sequences: int
    max_queries: int
    max_q_len: int
    max_seq_len: int

    @classmethod
    def of(cls, vllm_config) -> "StepLimits":
        scheduler = vllm_config.scheduler_config
        captured = vllm_config.compilation_config.cudagraph_capture_sizes or []
        max_queries = max(scheduler.max_num_batched_tokens, scheduler.max_num_seqs, *captured)
        max_seq_len = vllm_config.model_config.max_model_len
        return cls(
            max_sequences=scheduler.max_num_seqs,
            max_queries=max_queries,
            max_q_len=min(max_queries, max_seq_len),
            max_seq_len=max_seq_len,
        )

    def workspace_bytes(
        self,
        layer: PagedLayer,
        num_q_heads: int,
        window: int = 0,
        has_window_pages: bool = False,
    ) -> int:
        """Enough for every step within the limits; at least one byte, so that a tensor has an
        address."""
        needed = layer.workspace_bytes(
            num_q_heads=num_q_heads,
            max_sequences=self.max_sequences,
            max_queries=self.max_queries,
            max_q_len=self.max_q_len,
            max_seq_len=self.max_seq_len,
            window=window,
            has_window_pages=has_window_pages,
        )
        return max(needed, 1)


_workspaces: dict[torch.device, torch.Tensor] = {}


def reserve_workspace(device: torch.device, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes or more] on the device. All layers share it: vLLM runs them one after the
    other on one stream.

    A larger wish makes a new one. Whoever holds the old one, captured graphs among them, keeps it.
    """
    workspace = _workspaces.get(device)
    if workspace is None or workspace.numel() < num_bytes:
        rounded = -(-num_bytes // _MIB) * _MIB
        workspace = torch.empty(rounded, dtype=torch.uint8, device=device)
        _workspaces[device] = workspace
    return workspace


def leading_decodes(query_start_loc: torch.Tensor) -> int:
    """How many requests stand before the first one that has several queries.

    query_start_loc: int32 [requests + 1], on the CPU.
    """
    starts = query_start_loc.numpy()
    has_several = starts[1:] - starts[:-1] > 1
    return int(has_several.argmax()) if has_several.any() else len(has_several)
