"""The cryptographic stream: vectors, freshness, independence of rounds and purposes."""

import numpy as np
import pytest
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from securevfl.protocols.stream import (
    CHUNK_BYTES,
    KeyStream,
    MaskStream,
    apply_masks,
    derive_key,
    round_nonce,
)

# NIST SP 800-38A, F.5.1 CTR-AES128.Encrypt
NIST_KEY = bytes.fromhex("2b7e151628aed2a6abf7158809cf4f3c")
NIST_COUNTER = bytes.fromhex("f0f1f2f3f4f5f6f7f8f9fafbfcfdfeff")
NIST_PLAIN = bytes.fromhex(
    "6bc1bee22e409f96e93d7e117393172aae2d8a571e03ac9c9eb76fac45af8e51"
    "30c81c46a35ce411e5fbc1191a0a52eff69f2445df4f9b17ad2b417be66c3710"
)
NIST_CIPHER = bytes.fromhex(
    "874d6191b620e3261bef6864990db6ce9806f66b7970fdff8617187bb9fffdff"
    "5ae4df3edbd5d35e5b4f09020db03eab1e031dda2fbe03d1792170a0f3009cee"
)


def test_keystream_is_aes_ctr():
    words = KeyStream(NIST_KEY, NIST_COUNTER).words(64, np.uint8)
    assert (words ^ np.frombuffer(NIST_PLAIN, np.uint8)).tobytes() == NIST_CIPHER


def test_pieces_give_the_same_stream_as_the_whole():
    whole = KeyStream(NIST_KEY).words(3 * CHUNK_BYTES + 5, np.uint8)
    stream = KeyStream(NIST_KEY)
    sizes = [1, 15, 16, 17, 0, 4096, CHUNK_BYTES - 1, CHUNK_BYTES + 3]
    pieces = [stream.words(size, np.uint8) for size in sizes]
    joined = np.concatenate(pieces)
    assert np.array_equal(joined, whole[: joined.size])


def test_words_cover_shapes_and_types():
    for dtype in (np.uint8, np.uint16, np.uint32, np.uint64):
        for shape in ((), 3, (2, 5), (0,)):
            words = KeyStream(NIST_KEY).words(shape, dtype)
            assert words.dtype == dtype
            assert words.shape == (shape if isinstance(shape, tuple) else (shape,))
    for dtype in (np.int64, np.float64, bool):
        with pytest.raises(ValueError, match="unsigned"):
            KeyStream(NIST_KEY).words(3, dtype)


def test_only_whole_writable_arrays_are_filled():
    frozen = np.zeros(4, np.uint64)
    frozen.flags.writeable = False
    for target in (np.zeros((4, 4), np.uint64)[:, ::2], frozen):
        with pytest.raises(ValueError, match="contiguous"):
            KeyStream(NIST_KEY).fill(target)


def test_bad_keys_are_refused():
    with pytest.raises(ValueError, match="16 bytes"):
        KeyStream(b"short")
    with pytest.raises(ValueError, match="16 bytes"):
        KeyStream(NIST_KEY, b"short")
    with pytest.raises(ValueError, match="too short"):
        derive_key(b"short", purpose="test")


def test_entropy_streams_differ():
    first, second = KeyStream.from_os_entropy(), KeyStream.from_os_entropy()
    assert not np.array_equal(first.words(4), second.words(4))


def test_kept_cipher_equals_fresh_cipher():
    kept = MaskStream(NIST_KEY)
    for number, attempt in [(0, 0), (5, 0), (5, 1), (0, 0), (2**32 - 1, 2**16 - 1)]:
        fresh = KeyStream(NIST_KEY, round_nonce(number, attempt))
        assert np.array_equal(kept.at(number, attempt).words(1000), fresh.words(1000))


def test_rounds_and_attempts_never_share_a_block():
    """Nonces differ in the upper eight bytes; the lower eight are left to count 2^64 blocks."""
    nonces = {round_nonce(number, attempt) for number in range(300) for attempt in range(30)}
    nonces |= {round_nonce(2**32 - 1, 0), round_nonce(0, 2**16 - 1)}
    assert len({nonce[:8] for nonce in nonces}) == 300 * 30 + 2
    assert {nonce[8:] for nonce in nonces} == {bytes(8)}


def test_masks_are_added_and_returned():
    values = np.arange(CHUNK_BYTES // 2, dtype=np.uint64)
    masked = values.copy()
    mask = KeyStream(NIST_KEY).mask(masked)
    assert np.array_equal(mask, KeyStream(NIST_KEY).words(values.shape))
    assert np.array_equal(masked, values + mask)


@pytest.mark.parametrize("dtype", [np.uint32, np.uint64])
def test_masks_that_are_added_and_subtracted_cancel(dtype):
    values = KeyStream(NIST_COUNTER).words((3, CHUNK_BYTES // 4 + 1), dtype)
    keys = [bytes([i]) * 16 for i in range(4)]
    masked = apply_masks(values.copy(), [KeyStream(k) for k in keys[:3]], [KeyStream(keys[3])])
    words = [KeyStream(k).words(values.shape, dtype) for k in keys]
    assert np.array_equal(masked, values + words[0] + words[1] + words[2] - words[3])
    again = apply_masks(masked, [KeyStream(keys[3])], [KeyStream(k) for k in keys[:3]])
    assert np.array_equal(again, values)


def test_keys_depend_on_secret_purpose_and_context():
    secrets = [bytes(16), bytes(17), b"x" * 32]
    keys = {
        derive_key(secret, purpose=purpose, context=context)
        for secret in secrets
        for purpose in ("mask", "seal")
        for context in (b"", b"a")
    }
    assert len(keys) == 12
    assert len(derive_key(bytes(16), purpose="mask", length=64)) == 64


def test_derivation_is_hkdf_with_a_label():
    label = b"securevfl/v1/mask\0context"
    expected = HKDF(algorithm=hashes.SHA256(), length=16, salt=None, info=label).derive(b"s" * 32)
    assert derive_key(b"s" * 32, purpose="mask", context=b"context") == expected
