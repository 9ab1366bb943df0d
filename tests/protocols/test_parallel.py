"""Pieces on several threads give what one thread gives."""

import numpy as np
import pytest

from securevfl.errors import EncodingError
from securevfl.protocols import FixedPoint, parallel
from securevfl.protocols.stream import KeyStream, apply_masks


@pytest.fixture(params=[1, 2, 3, 4])
def threads(request, monkeypatch):
    monkeypatch.setattr(parallel, "threads", lambda: request.param)
    monkeypatch.setattr(parallel, "LEAST", 1)
    return request.param


@pytest.mark.parametrize("size", [0, 1, 5, 64, 1000])
@pytest.mark.parametrize("unit", [1, 7, 64])
def test_parts_cover_the_range_once(threads, size, unit):
    parts = []
    parallel.in_parts(size, unit, lambda start, stop: parts.append((start, stop)))
    covered = [i for start, stop in sorted(parts) for i in range(start, stop)]
    assert covered == list(range(size))
    assert all(start % unit == 0 for start, _ in parts)
    assert len(parts) <= max(1, parallel.PARTS * threads)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_masks_do_not_depend_on_the_threads(threads, dtype):
    size = 300_001
    nonce = b"\xff" * 16  # the counter wraps within the first part
    streams = [KeyStream(bytes([i]) * 16, nonce) for i in range(3)]
    values = np.arange(size, dtype=dtype)
    words = [KeyStream(bytes([i]) * 16, nonce).words(size, dtype) for i in range(3)]
    masked = apply_masks(values.copy(), streams[:1], streams[1:])
    np.testing.assert_array_equal(masked, values + words[0] - words[1] - words[2])


def test_encoding_does_not_depend_on_the_threads(threads):
    values = np.random.default_rng(0).normal(size=400_003)
    ring = FixedPoint()
    expected = np.rint(values * 2.0**32).astype(np.int64).view(np.uint64)
    np.testing.assert_array_equal(ring.encode(values), expected)
    values[399_999] = np.nan
    with pytest.raises(EncodingError, match="value 399999 cannot be encoded, it is NaN"):
        ring.encode(values)


def test_errors_of_a_part_come_out(threads):
    def act(start, stop):
        if stop == 100:
            raise ValueError("in a part")

    with pytest.raises(ValueError, match="in a part"):
        parallel.in_parts(100, 1, act)


def test_there_is_at_least_one_thread():
    assert 1 <= parallel.threads() <= parallel.MAX_THREADS
