"""What happened to the blocks of kvx's connectors, as vLLM logs it and exports it to Prometheus."""

from collections import Counter

from prometheus_client import Counter as PrometheusCounter
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

# What a block was to the scheduler, and to a worker.
OUTCOMES = {
    "found": "Blocks of prompts that files had.",
    "missed": "Blocks of prompts that no file had.",
    "bad": "Files that were damaged or of another block, and were left aside.",
    "loaded": "Blocks that a worker read from its files.",
    "saved": "Blocks that a worker wrote to its files.",
    "unsaved": "Blocks that a worker could not write.",
    "fetched": "Blocks that came from another engine (KvxTransferConnector).",
}


class FileStats(KVConnectorStats):
    """data: how many blocks of each outcome since the last report."""

    def reset(self):
        self.data = {}

    def aggregate(self, other):
        self.data = dict(Counter(self.data) + Counter(other.data))
        return self

    def reduce(self):
        return {f"blocks {outcome}": count for outcome, count in self.data.items()}

    def is_empty(self):
        return not self.data


class FileMetrics(KVConnectorPromMetrics):
    """A counter ``vllm:kvx_file_blocks_<outcome>`` an engine."""

    def __init__(self, vllm_config, metric_types, labelnames, per_engine_labelvalues):
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        new_counter = metric_types[PrometheusCounter]
        self._counters = {}
        for outcome, documentation in OUTCOMES.items():
            counter = new_counter(
                name=f"vllm:kvx_file_blocks_{outcome}",
                documentation=documentation,
                labelnames=labelnames,
            )
            for engine, labels in per_engine_labelvalues.items():
                self._counters[outcome, engine] = counter.labels(*labels)

    def observe(self, transfer_stats_data, engine_idx=0):
        for outcome, count in transfer_stats_data.items():
            self._counters[outcome, engine_idx].inc(count)
