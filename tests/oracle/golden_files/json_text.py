"""JSON text of the golden files: hex for everything that must be exact, one case a line."""

import json


def words(codes, bits=32):
    """Bit patterns side by side, each written as a number (most significant digit first)."""
    digits = (bits + 3) // 4
    return "".join(f"{code:0{digits}x}" for code in codes)


def dump(top):
    """One line a top-level entry, and one line an element of each top-level list of objects."""
    lines = []
    for key, value in top.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            items = ",\n  ".join(compact(item) for item in value)
            lines.append(f" {compact(key)}: [\n  {items}\n ]")
        else:
            lines.append(f" {compact(key)}: {compact(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def compact(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=True)
