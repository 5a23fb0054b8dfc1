"""Drafts in a cache: trees, marks and partial acceptance."""

import numpy as np
import pytest
from reference import attention, random_rows

import kvx

HEADS, Q_HEADS, DIM = 2, 4, 32
TREE = np.array([[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 0, 1]], np.uint8)  # 0-1-2, 0-3


def make_cache(recipe="f32", **options):
    return kvx.Cache(
        num_layers=1, num_kv_heads=HEADS, head_dim=DIM, recipe=recipe, max_tokens=64, block_size=8,
        **options,
    )


def feed(cache, sequence, k, q=None, tree_mask=None, kept=None, speculative=()):
    """One step of k's rows as keys and values; the step's output."""
    q = random_rows(9, len(k), Q_HEADS, DIM) if q is None else q
    cache.begin_step([(sequence, len(k))], speculative=speculative)
    out = cache.append_and_attend(0, q, k, k, tree_mask=tree_mask)
    cache.end_step(kept)
    return out


def test_a_tree_mask_shows_each_token_its_own_branch():
    prompt, drafts = random_rows(1, 17, HEADS, DIM), random_rows(2, 4, HEADS, DIM)
    q = random_rows(3, 4, Q_HEADS, DIM)
    cache = make_cache()
    sequence = cache.create_sequence()
    feed(cache, sequence, prompt)
    out = feed(cache, sequence, drafts, q, TREE)
    for token, row in enumerate(TREE):
        branch = np.concatenate([prompt, drafts[row.astype(bool)]])
        expected = attention(q[token : token + 1], branch, branch)
        np.testing.assert_allclose(out[token : token + 1], expected, rtol=1e-4, atol=1e-5)


def test_end_step_keeps_what_a_verification_accepts():
    prompt, drafts = random_rows(1, 17, HEADS, DIM), random_rows(2, 4, HEADS, DIM)
    cache, other = make_cache(), make_cache()
    sequence, expected = cache.create_sequence(), other.create_sequence()
    feed(cache, sequence, prompt)
    feed(cache, sequence, drafts, kept=[2])
    feed(other, expected, prompt)
    feed(other, expected, drafts[:2])
    assert cache.num_tokens(sequence) == 19
    for one, two in zip(cache.gather(sequence, 0), other.gather(expected, 0), strict=True):
        np.testing.assert_array_equal(one, two)


def test_marked_tokens_go_again_bit_for_bit_where_pages_share_scales():
    cache = make_cache("int8:source=page,immediate", max_speculative_tokens=8)
    sequence = cache.create_sequence()
    feed(cache, sequence, random_rows(1, 13, HEADS, DIM))
    before = cache.gather(sequence, 0)
    feed(cache, sequence, 20 * random_rows(2, 6, HEADS, DIM), speculative=[True])
    assert not np.array_equal(cache.gather(sequence, 0, 0, 13)[0], before[0])
    cache.truncate(sequence, 13)
    for one, two in zip(cache.gather(sequence, 0), before, strict=True):
        np.testing.assert_array_equal(one, two)


def test_what_does_not_fit_is_refused():
    cache = make_cache("int8:sink=8,recent=8")
    sequence = cache.create_sequence()
    with pytest.raises(kvx.Error, match="speculative has 2 marks; the step has 1"):
        cache.begin_step([(sequence, 1)], speculative=[True, False])
    rows, q = random_rows(1, 10, HEADS, DIM), random_rows(2, 10, Q_HEADS, DIM)
    cache.begin_step([(sequence, 10)])
    with pytest.raises(kvx.UnsupportedError, match="goes over a block's end"):
        cache.append_and_attend(0, q, rows, rows, tree_mask=np.ones((10, 10), np.uint8))
    with pytest.raises(kvx.Error, match="tree_mask is .*expected uint8"):
        cache.append_and_attend(0, q, rows, rows, tree_mask=np.ones((9, 10), np.uint8))
    cache.cancel_step()
    cache = make_cache("int8")
    sequence = cache.create_sequence()
    cache.begin_step([(sequence, 10)])
    with pytest.raises(kvx.Error, match="tree_mask_stride is 9; expected at least 10"):
        cache.append_and_attend(0, q, rows, rows, tree_mask=np.ones((10, 9), np.uint8))
