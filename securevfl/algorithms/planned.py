"""A party's encoder as the plan describes it: everybody can build it, whoever holds the party's features."""

from __future__ import annotations

from torch import nn

from securevfl.data import VerticalData
from securevfl.data.binning import card_columns
from securevfl.models import build_encoder
from securevfl.models.scorecard import ScorecardEncoder
from securevfl.models.seeds import torch_generator
from securevfl.settings.plan import Plan


def planned_encoder(plan: Plan, data: VerticalData, party: str) -> nn.Module:
    """The encoder with its first weights; of the data only shapes are used.

    Raises:
        PlanError: The plan's model does not fit the party's columns.
    """
    index = data.parties.index(party)
    if plan.model == "scorecard":
        return ScorecardEncoder(card_columns(data)[index])
    return build_encoder(
        plan.model,
        data.widths[index],
        plan.embedding,
        generator=torch_generator(plan.seed, "encoder", index),
        hidden=plan.hidden,
        image_shape=_image_shape(data, index),
        prepared=plan.mode == "sealed",
    )


def _image_shape(data: VerticalData, index: int) -> tuple[int, ...] | None:
    """The band of whole pixel rows that a party holds, where the data are images."""
    shape = data.train[index].shape[1:]
    if len(shape) == 3:
        return tuple(shape)
    if data.image_size is not None and data.widths[index] % data.image_size[1] == 0:
        return (1, data.widths[index] // data.image_size[1], data.image_size[1])
    return None
