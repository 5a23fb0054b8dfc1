"""What a user writes, for the type checker: test_types.py reads it. Each line that ends in
``# error: ...`` must be found, with those words; nothing else may be."""

import numpy as np

import kvx
import kvx.marlin
import kvx.turbomind

# ---- what is right

x = np.zeros((4, 64), np.float32)
rows = kvx.quantize(x, "int4:g32", steps=[])
codes: np.ndarray[tuple[int, ...], np.dtype[np.uint8]] = rows.codes
decoded = kvx.dequantize(rows, np.float16).mean() + rows.dequantize().max()
smaller = kvx.transcode(rows, "mxfp4").nbytes + 1

cache = kvx.Cache(
    num_layers=1, num_kv_heads=2, head_dim=64, recipe="int8", max_tokens=64, prefix_model="model"
)
sequence = cache.create_sequence()
with cache.step([(sequence, 4)]) as same:
    out = cache.append_and_attend(0, x.reshape(2, 2, 64), x.reshape(2, 2, 64), x.reshape(2, 2, 64))
total = float(out.sum()) + same.num_tokens(sequence)
keys, values = cache.gather(sequence, 0)
halves, _ = cache.gather(sequence, 0, like=np.empty(0, np.float16))
cache.record_tokens(sequence, [1, 2, 3, 4])
cache.record_tokens(sequence, np.arange(4))
used = cache.memory().used + cache.cost(4096).tokens_per_gib
cache.save_sequence(sequence, "file", zstd_level=1)

layer = kvx.PagedLayer("int8", num_kv_heads=2, head_dim=64, block_size=16)
pages = np.zeros((8, layer.page_bytes), np.uint8)
layer.append(pages, keys, values, np.arange(4))
table, lengths = np.zeros((1, 1), np.int32), np.ones(1, np.int32)
shape = layer.attend(pages, out, table, lengths, np.array([0, 1], np.int32)).shape

names = [fmt.name.upper() for fmt in kvx.formats()]
sinks = kvx.parse_recipe("nvfp4:auto").sink_tokens + 1
held = kvx.marlin.KVCache(kvx.marlin.CacheConfig(1, 2, 2, 64, 16)).seq_len + 1
blocks = kvx.turbomind.TurbomindEngineConfig(quant_policy=8).mode(0)
figures = kvx.compare("model.gguf", "text.txt", ["int8"])[0].kl.value + 1.0

# ---- what is wrong

kvx.quantize(3, "int8")  # error: "quantize" matches argument types "int", "str"
kvx.quantize([1.0], "int8")  # error: "quantize" matches argument types "list[float]", "str"
kvx.quantize(x)  # error: "quantize" matches argument type
kvx.quantize(x, "int8", step=[1.0])  # error: did you mean "steps"?
kvx.dequantize(x)  # error: "dequantize" matches argument type
rows.codes = codes  # error: Property "codes" defined in "Rows" is read-only
kvx.Cache("int8", num_layers=1)  # error: Missing named argument "head_dim" for "Cache"
kvx.Cache(num_layers=1, num_kv_heads=1, head_dim=64, recipe=8, max_tokens=8)  # error: "recipe"
cache.begin_step(sequence)  # error: "begin_step" of "Cache" has incompatible type "int"
cache.begin_step([sequence])  # error: List item 0 has incompatible type "int"
cache.num_tokens("0")  # error: "num_tokens" of "Cache" has incompatible type "str"
cache.append_and_attend(0, out, keys)  # error: Missing positional argument "v"
cache.append_and_attend(0, out, keys, values, precision="best")  # error: "precision"
cache.truncate(sequence, 1.5)  # error: "truncate" of "Cache" has incompatible type "float"
cache.cost(4).bits  # error: "Cost" has no attribute "bits"
cache.save_sequence(sequence, 3)  # error: "save_sequence" of "Cache" has incompatible type "int"
layer.append(pages, keys, values, [1])  # error: "append" of "PagedLayer" has incompatible type
kvx.parse_recipe(8)  # error: "parse_recipe" has incompatible type "int"
kvx.formats()[0].bits  # error: "Format" has no attribute "bits"
text: str = cache.memory()  # error: Incompatible types in assignment
