"""Operands larger than memory: the same words and totals as those that are held."""

from __future__ import annotations

import mmap
import os

import numpy as np
import pytest
from sealed_federation import Federation, unit_rows

from securevfl.errors import RunError, WireError
from securevfl.protocols.sealed import large
from securevfl.protocols.sealed.large import (
    Chosen,
    SeedMask,
    choose,
    held_pieces,
    large_words,
    masked_operand,
)
from securevfl.protocols.sealed.protocol import Deal, expand, ring_product

SEED = bytes(range(16))


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything of more than one page is large."""
    monkeypatch.setattr(large, "HELD_BYTES", mmap.PAGESIZE)


def in_file(array: np.ndarray) -> bool:
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(getattr(array, "obj", array), mmap.mmap)


@pytest.mark.parametrize("records", [1, 7, 1000, large.PIECE + 3])
def test_a_mask_is_what_expand_makes(records: int) -> None:
    shape, generator = (3, records), np.random.default_rng(1)
    mask, words = SeedMask(SEED, "operand", shape), expand(SEED, "operand", shape)
    right = generator.integers(0, 2**63, (records, 2)).astype(np.uint64)
    np.testing.assert_array_equal(mask.whole(), words)
    np.testing.assert_array_equal(ring_product(mask, right), words @ right)
    np.testing.assert_array_equal(ring_product(mask[:2], right), words[:2] @ right)
    neighbours = np.arange(records // 3, records)
    for rows in (neighbours, generator.permutation(records)[: records // 2 + 1], neighbours[::-1]):
        np.testing.assert_array_equal(mask.take(rows), words[:, rows])


def test_blocks_of_neighbours_are_found_in_the_stream() -> None:
    records = 5 * large.RUN + 1
    rows = np.concatenate([np.arange(s, s + large.RUN) for s in (3 * large.RUN, 1, 2 * large.RUN + 1)])
    mask, words = SeedMask(SEED, "operand", (3, records)), expand(SEED, "operand", (3, records))
    right = np.random.default_rng(5).integers(0, 2**63, (len(rows), 2)).astype(np.uint64)
    for whole in (mask, words):
        chosen = choose(whole, rows)
        assert isinstance(chosen, Chosen) and chosen.shape == (3, len(rows))
        np.testing.assert_array_equal(ring_product(chosen, right), words[:, rows] @ right)
    assert isinstance(choose(words, rows[::2]), np.ndarray) and choose(mask, None) is mask
    np.testing.assert_array_equal(choose(mask, rows[::2]), words[:, rows[::2]])


@pytest.mark.usefixtures("small")
def test_masked_words_lie_in_a_file_without_a_name() -> None:
    operand = unit_rows(np.random.default_rng(2), 5, 1001).astype(np.int16)
    words = masked_operand(SEED, operand)
    wanted = operand.astype(np.int64).view(np.uint64) - expand(SEED, "operand", operand.shape)
    np.testing.assert_array_equal(words, wanted)
    assert in_file(words) and not in_file(large_words((4, 4)))
    assert len(list(held_pieces(words))) == 5
    np.testing.assert_array_equal(words, wanted)  # what was given back is read again
    right = expand(SEED, "blind", (1001, 1))
    np.testing.assert_array_equal(ring_product(words, right), ring_product(wanted, right))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("members", [2, 3])
def test_a_large_federation_totals_the_same(members: int) -> None:
    federation = Federation(members, records=1500, width=4)
    federation.setup()
    assert all(in_file(words) for party in federation.parties for words in party.masked.values())
    scattered = np.random.default_rng(3).permutation(1500)[:400]
    for number, rows in enumerate((None, np.arange(300, 900), scattered)):
        federation.check(federation.totals(number, rows), rows)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("outputs", [1, 3])
def test_rounds_over_all_records_share_a_run_through_the_masks(
    outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six rounds take two runs, not six; no seed serves twice, and a new session has none of the last one."""
    runs, made = [], SeedMask.product
    monkeypatch.setattr(SeedMask, "product", lambda mask, right: runs.append(mask) or made(mask, right))
    federation = Federation(2, records=600, width=4, outputs=outputs)
    federation.setup()
    for number in range(6):
        federation.check(federation.totals(number, more=5 - number))
    assert len(runs) == 2 * 2
    federation.check(federation.totals(6, more=3))
    federation.setup()
    federation.check(federation.totals(0))
    assert len(runs) == 2 * 4
    deals = [each.message for each in federation.transcript if each.message.kind == Deal.kind]
    assert len({deal.seed for deal in deals}) == len(deals) == 16


@pytest.mark.parametrize(("members", "outputs"), [(2, 1), (3, 1), (2, 3)])
def test_rounds_of_many_pieces_total_the_same(
    members: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(large, "PIECE", 64)
    federation = Federation(members, records=150, width=4, outputs=outputs)
    federation.setup()
    for number, rows in enumerate((None, np.arange(3, 140))):
        federation.check(federation.totals(number, rows), rows)


def test_no_room_and_wrong_seeds_are_said(monkeypatch: pytest.MonkeyPatch, small: None) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(large.mmap, "mmap", full)
    with pytest.raises(RunError, match=r"No space left on device\); make room, or .* in TMPDIR"):
        large_words((1, 1000))
    with pytest.raises(WireError, match="a seed has 16 bytes, not 3"):
        masked_operand(os.urandom(3), np.zeros((1, 1), np.int16))
