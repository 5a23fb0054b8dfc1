"""Inputs: the rows that go in. The same on every machine: integers and one rounding."""

from fractions import Fraction

from kvx_oracle import binary32
from kvx_oracle.formats import Input
from kvx_oracle.small_float import F32

MASK64 = (1 << 64) - 1


class Random:
    """SplitMix64, seeded by a text (FNV-1a)."""

    def __init__(self, seed):
        self.state = 0xCBF29CE484222325
        for byte in seed.encode():
            self.state = (self.state ^ byte) * 0x100000001B3 & MASK64

    def bits(self, count):
        self.state = self.state + 0x9E3779B97F4A7C15 & MASK64
        z = self.state
        z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK64
        z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK64
        return (z ^ z >> 31) >> 64 - count

    def below(self, limit):
        return self.bits(32) * limit >> 32

    def normal(self):
        """Nearly N(0, 1), as an exact Fraction: twelve uniform numbers less their mean."""
        total = sum(self.bits(24) for _ in range(12)) - 6 * (1 << 24)
        return Fraction(total, 1 << 24)


def f32_input(numbers):
    return Input(F32, tuple(binary32.to_bits(x) for x in numbers))


def normal(head_dim, magnitude, seed):
    random = Random(f"{seed} {head_dim} {magnitude}")
    return [binary32.nearest(random.normal() * Fraction(magnitude)) for _ in range(head_dim)]


def with_outliers(head_dim, seed):
    row = normal(head_dim, "0.3", seed)
    return [binary32.mul(x, 24.0) if d % 37 == 5 else x for d, x in enumerate(row)]


def with_one(row, position, number):
    return row[:position] + [number] + row[position + 1 :]


def ties(head_dim, element):
    """Halves between neighbouring codes under a step that is a power of two, signs alternating;
    the first number of every 16 makes each group's amax the element's largest."""
    if element.name.startswith("int"):
        middles = [Fraction(2 * n + 1, 2) for n in range(element.largest)]
    else:
        grid = element.fmt.magnitudes
        middles = [(a + b) / 2 for a, b in zip(grid, grid[1:])]
    start = max(len(middles) - head_dim, 0)
    row = []
    for d in range(head_dim):
        exact = element.largest if d % 16 == 0 else middles[(start + d) % len(middles)]
        row.append(binary32.nearest(Fraction(exact) / 4 * (-1) ** d))
    return row


def common_rows(head_dim, element):
    """(name, numbers) of every kind of row; element may be None (no ties then)."""
    random = Random(f"common {head_dim}")
    last = head_dim - 3
    base = normal(head_dim, "1", "base")
    rows = [
        ("normal_1", base),
        ("normal_0.02", normal(head_dim, "0.02", "a")),
        ("normal_0.001", normal(head_dim, "0.001", "b")),
        ("constant", [binary32.nearest(Fraction("0.7"))] * head_dim),
        ("all_zero", [0.0] * head_dim),
        ("zeros_of_both_signs", [-0.0 if d % 3 else 0.0 for d in range(head_dim)]),
        ("signs", [(-1.0) ** random.bits(1) * 1.25 for _ in range(head_dim)]),
        ("first_half_zero", [-0.0] * (head_dim // 2) + base[head_dim // 2 :]),
        ("denormal", [binary32.from_bits(random.bits(9) | random.bits(1) << 31) for _ in base]),
        ("smallest_denormal", with_one([0.0] * head_dim, 7, binary32.from_bits(1))),
        ("tiny", normal(head_dim, "4e-8", "d")),
        ("huge", normal(head_dim, "5e7", "e")),
        ("largest", [binary32.FLT_MAX * (-1.0) ** d for d in range(head_dim)]),
        ("outliers", with_outliers(head_dim, "f")),
        ("nan_in_last_group", with_one(base, last, float("nan"))),
        ("inf_in_last_group", with_one(base, last, float("-inf"))),
        ("inf_and_nan", with_one(with_one(base, 1, float("inf")), last, float("nan"))),
    ]
    if element is not None:
        rows.append(("ties", ties(head_dim, element)))
    return [(name, f32_input(row)) for name, row in rows]


def few_rows(head_dim):
    return [
        ("normal_1", f32_input(normal(head_dim, "1", "few"))),
        ("outliers", f32_input(with_outliers(head_dim, "few"))),
    ]


def converted(source, float_type):
    """The same numbers as an engine with 16-bit activations would hand over."""
    return Input(float_type, tuple(float_type.encode(x) for x in source.numbers()))
