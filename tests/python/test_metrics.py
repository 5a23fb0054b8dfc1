"""Metrics of the process's caches: the text, and the same over HTTP."""

import re
import urllib.error
import urllib.request

import pytest
from kv_events import add, told_cache

import kvx

SAMPLE = re.compile(r'(\w+)\{(.*)\} (\S+)')


def samples(text, name, **labels):
    """{labels: value} of a metric."""
    found = {}
    for line in text.splitlines():
        match = SAMPLE.fullmatch(line)
        if match and match[1] == name:
            of = dict(re.findall(r'(\w+)="((?:[^"\\]|\\.)*)"', match[2]))
            if labels.items() <= of.items():
                found[tuple(sorted(of.items()))] = float(match[3])
    return found


def one(text, name, **labels):
    (value,) = samples(text, name, **labels).values()
    return value


@pytest.fixture
def cache():
    made = told_cache()
    made.set_name("tested")
    yield made
    made.close()


def test_blocks_hits_and_steps_are_counted(cache):
    sequence = add(cache, list(range(50)))
    cache.free_sequence(sequence)
    cache.create_sequence_from(list(range(40)))
    text = kvx.metrics()
    blocks = {s: one(text, "kvx_blocks", cache="tested", state=s) for s in ("used", "cached", "free")}
    assert blocks == {"used": 2, "cached": 1, "free": 8}
    assert one(text, "kvx_kv_cache_usage_perc", cache="tested") == pytest.approx(2 / 11)
    assert one(text, "kvx_prefix_cache_queries_total", cache="tested") == 32
    assert one(text, "kvx_prefix_cache_hits_total", cache="tested") == 32
    assert one(text, "kvx_step_seconds_count", cache="tested") == 1
    assert one(text, "kvx_step_seconds_sum", cache="tested") > 0
    assert one(text, "kvx_cache_config_info", cache="tested", recipe="int8", policy="lru") == 1


def test_buckets_are_cumulative(cache):
    for _ in range(3):
        cache.free_sequence(add(cache, list(range(10))))
    buckets = samples(kvx.metrics(), "kvx_step_seconds_bucket", cache="tested")
    in_order = sorted((float(dict(labels)["le"]), count) for labels, count in buckets.items())
    counts = [count for _, count in in_order]
    assert counts == sorted(counts) and counts[-1] == 3 and len(counts) == 21


def test_a_closed_cache_is_shown_no_more(cache):
    assert samples(kvx.metrics(), "kvx_sequences", cache="tested")
    cache.close()
    assert not samples(kvx.metrics(), "kvx_sequences", cache="tested")


def test_they_are_served_until_they_are_stopped(cache):
    port = kvx.serve_metrics(0)
    url = f"http://127.0.0.1:{port}/metrics"
    with urllib.request.urlopen(url) as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        text = answer.read().decode()
    assert one(text, "kvx_sequences", cache="tested") == 0
    again = kvx.serve_metrics(port)
    assert again == port
    kvx.stop_metrics()
    kvx.stop_metrics()
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(url)


def test_refusals():
    with pytest.raises(kvx.Error, match="port is 70000"):
        kvx.serve_metrics(70000)
    with pytest.raises(kvx.Error, match="cannot be bound"):
        kvx.serve_metrics(0, address="nowhere.invalid")
