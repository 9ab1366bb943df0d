"""IDs as they are compared: normalised, encoded, each once."""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Iterable, Iterator

from securevfl.errors import DataError, InputError

MAX_IDS = 10_000_000
MAX_ID_BYTES = 1024

NORMALISATIONS: dict[str, Callable[[str], str]] = {
    "exact": lambda text: text,
    "trim": lambda text: unicodedata.normalize("NFC", text).strip(),
    "trim-casefold": lambda text: unicodedata.normalize("NFC", text.strip().casefold()),
}
"""How IDs are made comparable; all parties have to use the same one."""


def check_normalisation(name: str) -> None:
    """Raises `InputError` if there is no such normalisation."""
    if name not in NORMALISATIONS:
        raise InputError(f"normalisation {name!r} is unknown; use one of {', '.join(NORMALISATIONS)}")


def encode_ids(ids: Iterable[str], normalisation: str = "exact") -> Iterator[bytes]:
    """Normalised IDs as bytes, one after the other; nothing is kept.

    Raises:
        DataError: An ID is no string, empty or too long, or there are too many.
    """
    check_normalisation(normalisation)
    normalise = None if normalisation == "exact" else NORMALISATIONS[normalisation]
    for position, text in enumerate(ids):
        try:
            raw = (text if normalise is None else normalise(text)).encode()
        except (AttributeError, TypeError) as error:
            raise DataError(f"ID in position {position} is no string; convert it first") from error
        except UnicodeEncodeError:  # half a surrogate pair, as a careless decoder leaves it
            raw = b""
        if not 0 < len(raw) <= MAX_ID_BYTES or type(raw) is not bytes:
            raise DataError(
                f"ID in position {position} is empty, not Unicode text or longer than {MAX_ID_BYTES} bytes"
            )
        if position == MAX_IDS:
            raise DataError(f"more than {MAX_IDS} IDs were given; that many can be aligned")
        yield raw


def prepare_ids(ids: Iterable[str], normalisation: str = "exact") -> dict[bytes, int]:
    """Normalised, encoded IDs and their positions.

    Raises:
        DataError: As `encode_ids`, or two are equal after normalisation.
    """
    positions: dict[bytes, int] = {}
    for position, raw in enumerate(encode_ids(ids, normalisation)):
        if positions.setdefault(raw, position) != position:
            raise same_id(positions[raw], position, normalisation)
    return positions


def same_id(first: int, second: int, normalisation: str) -> DataError:
    """What is wrong where two positions hold the same ID."""
    return DataError(
        f"one ID occurs in positions {first} and {second} (normalisation {normalisation!r}); "
        "remove duplicates first"
    )
