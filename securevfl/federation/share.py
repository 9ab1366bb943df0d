"""What one organisation of a simulation is sent of the data: its own block, of the others the shapes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from securevfl.data import VerticalData
from securevfl.data.share import absent_block, absent_labels

Share = dict[str, Any]


def pack_share(data: VerticalData, name: str) -> Share:
    """An organisation's own block and public facts; no other features, no scalings of them, no labels."""
    content = {each.name: getattr(data, each.name) for each in fields(data)}
    for part in ("train", "test"):
        blocks = zip(data.parties, content[part], strict=True)
        content[part] = tuple(block if party == name else block.shape for party, block in blocks)
    scales = zip(data.parties, data.scales, strict=False)
    content["scales"] = tuple(steps if party == name else () for party, steps in scales)
    described = zip(data.parties, data.described, strict=False)
    content["described"] = tuple(mine if party == name else mine.without_rows() for party, mine in described)
    content |= {"y_train": data.n_train, "y_test": data.n_test, "labels_absent": True}
    content["absent"] = tuple(party for party in data.parties if party != name)
    return content


def unpack_share(share: Share) -> VerticalData:
    """The data as the organisation has it; what is absent is NaN throughout and takes no memory."""
    content = dict(share)
    for part in ("train", "test"):
        blocks = content[part]
        content[part] = tuple(absent_block(*each) if isinstance(each, tuple) else each for each in blocks)
    for part in ("y_train", "y_test"):
        content[part] = absent_labels(content["task"], content[part])
    return VerticalData(**content)
