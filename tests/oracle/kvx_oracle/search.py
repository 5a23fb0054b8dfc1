"""Choosing a scale: amax, 4 over 6, or search by squared error (docs/numbers.md 5)."""

from fractions import Fraction

from . import binary32
from .groups import quantize_with_scale

CANDIDATES = {
    "amax": ("1",),
    "4over6": ("1", "1.5"),
    "search": ("1", "0.7", "0.8", "0.9", "1.1", "1.2", "1.3", "1.5"),
}
LANES = 16


def squared_error(numbers, decoded):
    """The binary32 sum of (x - decoded)^2, added as sixteen lanes and then as a tree."""
    lanes = [0.0] * LANES
    for index, (x, value) in enumerate(zip(numbers, decoded)):
        difference = binary32.sub(x, value)
        lane = index % LANES
        lanes[lane] = binary32.add(lanes[lane], binary32.mul(difference, difference))
    width = LANES // 2
    while width >= 1:
        lanes = [binary32.add(lanes[lane], lanes[lane + width]) for lane in range(width)]
        width //= 2
    return lanes[0]


def chooser(name):
    """A function for groups.quantize_computed: the first candidate with the smallest error."""
    multipliers = [binary32.nearest(Fraction(text)) for text in CANDIDATES[name]]

    def choose(numbers, amax, rule):
        best, best_error = None, None
        for multiplier in multipliers:
            target = min(binary32.mul(amax, multiplier), binary32.FLT_MAX)
            group = quantize_with_scale(numbers, rule.scale_code(target), rule)
            if len(multipliers) == 1:
                return group
            error = squared_error(numbers, group.decoded)
            if best is None or error < best_error:
                best, best_error = group, error
        return best

    return choose
