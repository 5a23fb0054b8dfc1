"""Sequences to another process by NIXL and by Mooncake's Transfer Engine, over loopback."""

import json
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import kvx
import kvx.transports

SHAPE = dict(num_layers=2, num_kv_heads=2, head_dim=64, max_tokens=256, max_sequences=3)
TRANSPORTS = {"nixl": kvx.transports.Nixl, "mooncake": kvx.transports.MooncakeEngine}
TOKENS = 100


def new_cache(recipe="nvfp4"):
    return kvx.Cache(recipe=recipe, prefix_model="a model", **SHAPE)


def fill(cache):
    sequence = cache.create_sequence()
    rng = np.random.default_rng(3)
    with cache.step([(sequence, TOKENS)]):
        for layer in range(2):
            rows = rng.standard_normal((TOKENS, 2, 64), np.float32)
            cache.append_and_attend(layer, rows, rows, rows)
    cache.record_tokens(sequence, range(TOKENS))
    return sequence


def rows_of(cache, sequence):
    return [cache.gather(sequence, layer) for layer in range(2)]


def export(name):
    """An exporter in a process of its own: a description out, and a line in when it may end."""
    cache = new_cache()
    with kvx.transports.offer_sequence(cache, fill(cache), TRANSPORTS[name]()) as offer:
        cache.close()
        print(offer.description, flush=True)
        sys.stdin.readline()


@contextmanager
def exporter(name):
    with subprocess.Popen(
        [sys.executable, __file__, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        while not (line := process.stdout.readline()).startswith("{"):
            assert line, "the exporter did not start"
        yield line
        process.stdin.write("\n")
        process.stdin.close()
        process.stdout.read()
        assert process.wait(60) == 0


@pytest.fixture(params=TRANSPORTS)
def name(request):
    return request.param


def test_another_process_goes_on_with_the_same_bytes(name):
    here = new_cache()
    expected = rows_of(here, fill(here))
    with exporter(name) as description:
        transport, importer = TRANSPORTS[name](), new_cache()
        for _ in range(2):  # an offer may be taken more than once
            sequence = kvx.transports.take_sequence(importer, description, transport)
            assert importer.num_tokens(sequence) == TOKENS
            for found, right in zip(rows_of(importer, sequence), expected):
                np.testing.assert_array_equal(found, right)
        packed = 128 * 2 * 2 * 2 * 64 * 4.5 / 8  # two blocks of 64 tokens
        assert json.loads(description)["bytes"] <= packed + 2048  # tokens, a page of text
        with pytest.raises(kvx.Error, match="another cache: layers_from_0 is .* nvfp4.*; expected .* int8"):
            kvx.transports.take_sequence(new_cache("int8"), description, transport)


def test_an_exporter_that_is_gone_is_an_error(name):
    with exporter(name) as description:
        pass
    importer = new_cache()
    with pytest.raises(kvx.Error):
        kvx.transports.take_sequence(importer, description, TRANSPORTS[name](), seconds=3)
    assert importer.num_tokens(fill(importer)) == TOKENS


def test_descriptions_that_cannot_be_are_refused(name):
    cache = new_cache()
    transport = TRANSPORTS[name]()
    with kvx.transports.offer_sequence(cache, fill(cache), transport) as offer:
        facts = json.loads(offer.description)
    for change, message in [
        ({"kvx_offer": 2}, "version 2; expected 1"),
        ({"transport": "pigeon"}, "transport 'pigeon'"),
        ({"bytes": 0}, "has 0 bytes"),
        ({"bytes": True}, "has True bytes"),
        ({"address": -1}, "at -1"),
        ({"peer": "?"}, "none of an offer"),
    ]:
        with pytest.raises(kvx.Error, match=message):
            kvx.transports.take_sequence(cache, json.dumps({**facts, **change}), transport)
    for text in ("", "{}", "[]", "7"):
        with pytest.raises(kvx.Error, match="none of an offer"):
            kvx.transports.take_sequence(cache, text, transport)


def test_the_block_of_the_transfer_page_runs():
    sys.path.append(str(Path(__file__).parents[1] / "python"))
    import pages

    prefill, decode = new_cache(), new_cache()
    names = dict(kvx=kvx, prefill=prefill, decode=decode, sequence=fill(prefill))
    assert pages.run_blocks("docs/transfer.md", " transports", **names) == 1


if __name__ == "__main__":
    export(sys.argv[1])
