"""The weights of the tiny models, for the scripts here that write golden files."""


def weights(name, count):
    """Multiples of 2^-10 in [-1/4, 1/4), exact in f32; tests/runner/tiny_weights.hpp has the same rule."""
    state = 2166136261
    for byte in name.encode():
        state = (state ^ byte) * 16777619 % 2**32
    out = []
    for _ in range(count):
        state = (state * 1664525 + 1013904223) % 2**32
        out.append(((state >> 16) % 512 - 256) / 1024)
    return out
