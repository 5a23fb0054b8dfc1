"""Models under torch.compile: whole graphs that serve every cache, and say the same tokens."""

import copy

import pytest
import torch
from conftest import left_padded, passed, prompt, stock_tokens, tiny_model, tokens_of

import kvx
import kvx.hf


class Counted:
    """A backend that counts its graphs."""

    def __init__(self):
        self.count = 0

    def __call__(self, graph, inputs):
        self.count += 1
        return graph.forward


@pytest.fixture(autouse=True)
def reset():
    yield
    torch.compiler.reset()


def compiled(name, backend, **options):
    model = kvx.hf.enable(tiny_model(name))
    model.forward = torch.compile(model.forward, backend=backend, **options)
    return model


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss"])
def test_a_whole_graph_says_the_same_tokens(name):
    """Sliding windows, softcaps and sinks, padding on the left."""
    inputs = left_padded(3, 13, [0, 4, 9])
    expected = stock_tokens(name, inputs)
    model = compiled(name, "eager", fullgraph=True)
    found = tokens_of(model, kvx.hf.Cache(model.config, "f32"), inputs)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_backends_that_reorder_keep_the_layers_in_order(backend):
    inputs = {"input_ids": prompt()}
    model = compiled("llama", backend, fullgraph=True)
    found = tokens_of(model, kvx.hf.Cache(model.config, "f32"), inputs)
    assert torch.equal(found, stock_tokens("llama", inputs))


def test_one_graph_serves_every_cache_and_length():
    backend, inputs = Counted(), {"input_ids": prompt()}
    model = compiled("llama", backend, fullgraph=True)
    expected = tokens_of(model, kvx.hf.Cache(model.config, "f32"), inputs)
    graphs = backend.count
    caches = [kvx.hf.Cache(model.config, "f32") for _ in range(3)]
    assert all(torch.equal(tokens_of(model, cache, inputs), expected) for cache in caches)
    assert backend.count == graphs <= 3  # a prompt's, and tokens' at one length and at any
    fork = copy.deepcopy(caches[0])
    one = torch.tensor([[5]])
    with torch.no_grad():
        logits = [model(one, **passed(cache)).logits for cache in (fork, caches[1])]
    assert torch.equal(*logits) and caches[0].get_seq_length() + 1 == fork.get_seq_length()


def test_parts_of_a_model_say_the_same_tokens():
    """Without fullgraph, and with a break between update() and the attention."""
    inputs = {"input_ids": prompt()}
    model = compiled("llama", "eager")
    layer = model.model.layers[1].self_attn
    forward = layer.q_proj.forward

    def breaking(x):
        torch._dynamo.graph_break()
        return forward(x)

    layer.q_proj.forward = breaking
    found = tokens_of(model, kvx.hf.Cache(model.config, "f32"), inputs)
    assert torch.equal(found, stock_tokens("llama", inputs))


def test_what_a_graph_refuses_stores_nothing():
    model = compiled("llama", "eager", fullgraph=True)
    cache = kvx.hf.Cache(model.config, "f32", max_tokens=16)
    ids = prompt()[:, :10]
    with torch.no_grad():
        model(ids, **passed(cache))
        for more, error in [(ids, kvx.OutOfRangeError), (ids.repeat(2, 1)[:, :3], kvx.Error)]:
            with pytest.raises(error):
                model(more, **passed(cache))
            assert cache.get_seq_length() == 10
    with pytest.raises(Exception, match="gradients are wanted"):
        model(ids[:, :3], **passed(cache))
    assert cache.get_seq_length() == 10
