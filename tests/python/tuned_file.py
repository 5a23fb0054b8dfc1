"""Writes tuned recipes as docs/tune-file.md describes them, by no code of kvx's."""

import json
import struct

import numpy as np


def write_tuned(path, recipe, tables, *, layers=2, heads=2, head_dim=64, ropes=(), **fields):
    """tables: {"layers.0.k.mean": array, ...}; ropes: entries of the header's field, each with an
    "inv_freq". Returns the recipe "tuned:PATH"."""
    tensors = {name: np.asarray(table, np.float32) for name, table in tables.items()}
    for i, rope in enumerate(ropes):
        tensors[f"ropes.{i}.inv_freq"] = np.asarray(rope["inv_freq"], np.float64)
    known = {
        "version": 1,
        "recipe": recipe,
        "layer_overrides": [],
        "head_overrides": [],
        "num_layers": layers,
        "num_kv_heads": heads,
        "k_head_dim": head_dim,
        "v_head_dim": head_dim,
        "k_block_size": 0,
        "ropes": [{k: v for k, v in rope.items() if k != "inv_freq"} for rope in ropes],
        "model_name": "",
        "model_architecture": "",
        "model_hash": "",
        "text_hash": "",
        "date": "",
        "measured": {},
    }
    header = {"__metadata__": {"format": "kvxtune", "kvx": json.dumps({**known, **fields})}}
    data = b""
    for name in sorted(tensors, key=lambda name: (-tensors[name].itemsize, name)):
        table = tensors[name]
        end = len(data) + table.nbytes
        header[name] = {
            "dtype": "F64" if table.dtype == np.float64 else "F32",
            "shape": list(table.shape),
            "data_offsets": [len(data), end],
        }
        data += table.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return f"tuned:{path}"


def all_tables(layers=2, heads=2, head_dim=64, seed=0):
    """Every table but scales, with one rope for all layers. A format without scales ignores the
    weights of error feedback."""
    rng = np.random.default_rng(seed)
    tables = {}
    for layer in range(layers):
        for name, low, high in (
            ("k.mean", -1, 1),
            ("v.mean", -1, 1),
            ("k.factor", 0.5, 2),
            ("v.factor", 0.5, 2),
            ("k.rope_mean", -3, 3),
        ):
            tables[f"layers.{layer}.{name}"] = rng.uniform(low, high, (heads, head_dim))
        weights = rng.uniform(-0.05, 0.05, (heads, head_dim, head_dim))
        tables[f"layers.{layer}.k.feedback"] = np.triu(weights, 1)
    inv_freq = 10000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))
    rope = dict(pairs="halves", attention_scaling=1.0, layers=list(range(layers)))
    return tables, [{**rope, "inv_freq": inv_freq}]
