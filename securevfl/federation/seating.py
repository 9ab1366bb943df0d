"""Who runs what, and with which models: what a run on one machine and an organisation of its own share."""

from __future__ import annotations

import torch
from torch import nn

from securevfl.algorithms import SERVER, Algorithm
from securevfl.algorithms.planned import planned_encoder
from securevfl.data import VerticalData
from securevfl.errors import PlanError
from securevfl.models import (
    Fusion,
    build_head,
    check_encoder,
    couples_records,
    perturb,
)
from securevfl.models.seeds import torch_generator
from securevfl.privacy.gate import Gate
from securevfl.settings.plan import Plan


def label_holder_of(plan: Plan, data: VerticalData) -> str:
    """The organisation that holds the labels."""
    if plan.label_holder == "server":
        if SERVER in data.parties:
            raise PlanError("a party is called 'server', which names the label holder without features")
        return SERVER
    return data.label_holder


def hosts_of(algorithm: Algorithm, data: VerticalData, label_holder: str) -> dict[str, str]:
    """Who runs which address: parties their own, the label holder the server's, helpers theirs.

    Raises:
        PlanError: A party has the name of another role.
    """
    if SERVER in data.parties:
        raise PlanError(f"a party is called {SERVER!r}, which names the label holder's role; rename it")
    for name in algorithm.helpers:
        if name in (*data.parties, label_holder, SERVER):
            raise PlanError(f"a party is called {name!r}, which names a helper of this algorithm; rename it")
    return {party: party for party in (*data.parties, *algorithm.helpers)} | {SERVER: label_holder}


def seat_encoder(
    plan: Plan, data: VerticalData, party: str, *, gate: Gate | None, given: nn.Module | None = None
) -> nn.Module:
    """A party's encoder, as the plan describes it or as its owner gives it, checked.

    Args:
        plan: The resolved plan.
        data: The data; of other parties only names are used.
        party: Whose encoder.
        gate: The party's gate, where noise inside the encoder comes from; None where nothing is federated.
        given: The party's own module.

    Raises:
        PlanError: It does not fit the data, or couples records where the mode forbids that.
    """
    index = data.parties.index(party)
    block = data.train[index]
    if given is None:
        given = planned_encoder(plan, data, party)
        if plan.hidden_noise and gate is not None:
            given = perturb(given, plan.hidden_noise, gate.noise)
    # Random rows: equal ones could not show that a module mixes them.
    sample = torch.randn((4, *block.shape[1:]), generator=torch_generator(plan.seed, "trial", index))
    check_encoder(given, sample, plan.embedding)
    mixing = couples_records(given, sample)
    if mixing and plan.mode != "strict":
        raise PlanError(
            f"the encoder of {party} couples records ({', '.join(mixing)}) and mode "
            f"{plan.mode!r} forbids that; use LayerNorm instead"
        )
    return given


def seat_head(plan: Plan, data: VerticalData) -> nn.Module:
    """The label holder's model, as the plan describes it."""
    used = len(data.parties) if plan.algorithm != "local" else 1
    fusion = Fusion(plan.fusion, (plan.embedding,) * used)
    generator = torch_generator(plan.seed, "head")
    return build_head(plan.head, fusion.width, data.outputs, generator=generator, hidden=plan.hidden)
