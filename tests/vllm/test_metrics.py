"""Counts of the file connector in vLLM's log and in Prometheus."""

from collections import Counter

import prometheus_client
import pytest
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorProm

from kvx.vllm.connector import KvxFileConnector
from kvx.vllm.metrics import OUTCOMES, FileMetrics


def connector(**counts):
    made = object.__new__(KvxFileConnector)
    made.counts, made._reported, made._writer = Counter(counts), Counter(), None
    return made


def test_each_count_is_reported_once():
    made = connector(found=3, missed=1)
    assert made.get_kv_connector_stats().data == {"found": 3, "missed": 1}
    assert made.get_kv_connector_stats() is None
    made.counts["found"] += 2
    assert made.get_kv_connector_stats().data == {"found": 2}
    made.counts.clear()
    assert made.get_kv_connector_stats() is None


def test_the_scheduler_and_the_workers_add_up():
    total = connector(found=3, bad=1).get_kv_connector_stats()
    total = total.aggregate(connector(loaded=3, bad=1).get_kv_connector_stats())
    assert total.reduce() == {"blocks found": 3, "blocks bad": 2, "blocks loaded": 3}
    as_sent = KvxFileConnector.build_kv_connector_stats(total.to_dict())
    assert as_sent.data == total.data and not as_sent.is_empty()
    as_sent.reset()
    assert as_sent.is_empty()


def test_prometheus_has_a_counter_for_each_outcome_and_engine(monkeypatch):
    registry = prometheus_client.CollectorRegistry()

    def new_counter(**options):
        return prometheus_client.Counter(**options, registry=registry)

    class Config:
        kv_transfer_config = None

    types = {
        prometheus_client.Counter: new_counter,
        prometheus_client.Gauge: None,
        prometheus_client.Histogram: None,
    }
    assert KVConnectorProm._counter_cls is prometheus_client.Counter  # the key that vLLM passes
    metrics = KvxFileConnector.build_prom_metrics(
        Config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]}
    )
    assert isinstance(metrics, FileMetrics)
    metrics.observe({"found": 3, "saved": 1}, engine_idx=1)
    metrics.observe({"found": 2}, engine_idx=1)

    def value(outcome, engine):
        labels = {"model_name": "m", "engine": engine}
        return registry.get_sample_value(f"vllm:kvx_file_blocks_{outcome}_total", labels)

    assert value("found", "1") == 5 and value("saved", "1") == 1 and value("found", "0") == 0
    assert all(value(outcome, "0") == 0 for outcome in OUTCOMES)
    with pytest.raises(KeyError):
        metrics.observe({"lost": 1})
