"""Consent: what an organisation is shown before it agrees, and the rules by which it agrees unattended.

Everything on the screen is computed here, from the organisation's own understanding of the agreement, in
words of this version; names from outside pass `readable`. The rules of ``[accept]`` fail closed: what is not
stated is not accepted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from securevfl.accountants.gdp import gdp_epsilon, gdp_mu
from securevfl.algorithms import find_algorithm
from securevfl.errors import readable
from securevfl.federation.agreed import Quota
from securevfl.federation.forecast import worst_case
from securevfl.protocols.alignment.ids import MAX_IDS
from securevfl.protocols.alignment.protocol import HELPED, KINDS, PRIVATE, SAME
from securevfl.settings.codec import choice, within
from securevfl.settings.families import ALGORITHM_FAMILIES, PROTECTS, Settings
from securevfl.settings.plan import Plan
from securevfl.settings.protocols import HIDING, PROTOCOLS

if TYPE_CHECKING:
    from securevfl.network.agreement import Agreement, Invitation

ADVERSARIES = ("semi-honest", "malicious")
"""From the weaker to the stronger adversary that sealed training withstands."""
COVERED = {
    "person": "everything of one record that an observer does not hold itself",
    "features": "one organisation's features of a record at a time; labels are not covered",
    "label": "the label of a record; features are not covered",
}
"""What of a record the epsilon of a sealed plan covers, in words."""


@dataclass(frozen=True, kw_only=True)
class AlignmentLimits(Settings):
    """What an organisation lets happen to its records before there is an agreement.

    Attributes:
        kinds: Kinds of alignment that it takes part in.
        ids: Most IDs that any other may bring: each of them asks whether it is here.
        times: How often its records may be aligned, over all processes.
    """

    kinds: tuple[str, ...] = choice(KINDS, KINDS, "alignment")
    ids: int = within(MAX_IDS, high=MAX_IDS)
    times: int = within(10)


@dataclass(frozen=True, kw_only=True)
class Acceptance(Settings):
    """What an organisation agrees to without being asked. What is left out is not accepted.

    Its rules mean what they seem to: a NaN would accept any epsilon, a misspelt name would refuse all.

    Attributes:
        epsilon: The largest budget that a plan may have for records here; ``inf`` asks for none.
        members: Everybody who may take part.
        algorithms: Their names.
        protocols: Their names.
        test_fraction: Largest share of the records that may test the model.
        evaluations: How often the test part may be evaluated.
        alignment: See `AlignmentLimits`.
        delta: The largest delta for that epsilon; to be stated for sealed training.
        dealer: Sealed training: who may deal; empty for nobody.
        adversary: Sealed training: what it must withstand at least, of `ADVERSARIES`.
        protect: Sealed training: what of a record that epsilon must cover at least; everything of a person
            unless stated.
        collusion: How many of the others may pool what they see of sums and shares before noise is too
            little, at least; 1 unless stated.
        held_back: Sealed training: how many records may be kept out of it for a stack, and be scored exactly
            to the label holder: no guarantee for these.
        predictions: How many records may be scored with the model, all predictions together.
        requests: A scoring service: how many requests it may make.
        digest: The one agreement that is accepted; empty for any.
    """

    epsilon: float | None = within(None)
    members: tuple[str, ...] | None = None
    algorithms: tuple[str, ...] | None = choice(None, ALGORITHM_FAMILIES, "algorithm")
    protocols: tuple[str, ...] | None = choice(None, PROTOCOLS, "protocol")
    test_fraction: float | None = within(None, high=1.0)
    evaluations: int | None = within(None)
    alignment: AlignmentLimits | None = None
    delta: float | None = within(None, high=1.0)
    dealer: str | None = None
    adversary: str | None = choice(None, ADVERSARIES)
    protect: str = choice(PROTECTS[0], PROTECTS)
    collusion: int = within(1)
    held_back: int | None = within(None)
    predictions: int | None = within(None)
    requests: int | None = within(None)
    digest: str = ""

    def objection_to_invitation(self, invitation: Invitation, name: str) -> str:
        """Why an organisation does not even look for common records; empty if it does."""
        largest = max((n for each, n in invitation.sizes.items() if each != name), default=0)
        wanted: dict[str, Any] = {"members": list(invitation.members)}
        if name in invitation.sizes:
            wanted["alignment"] = {"kinds": [invitation.kind], "ids": largest, "times": 1}
        if objection := self._unstated(wanted) or self._strangers(invitation.members):
            return objection
        rules = self.alignment
        if name not in invitation.sizes or rules is None:
            return ""
        if invitation.kind not in rules.kinds:
            return f"alignment {invitation.kind!r} is not among {', '.join(rules.kinds)}"
        if largest > rules.ids:
            return f"somebody brings {largest} IDs; at most {rules.ids} are accepted"
        return ""

    def objection(self, agreement: Agreement, name: str, scored: int = 0) -> str:
        """Why an agreement is not acceptable; empty if it is.

        Args:
            agreement: What is proposed, as it is understood here.
            name: Whose rules these are.
            scored: How many records of it were scored with the model before.
        """
        accepted = agreement.trained or agreement.digest
        if self.digest and accepted != self.digest:
            return f"the agreement is {accepted}, not {self.digest}"
        has_data = name in (*agreement.outline.parties, agreement.outline.label_holder)
        if objection := self._unstated(_wanted(agreement, has_data)) or self._strangers(agreement.members):
            return objection
        checks = self._of_prediction if agreement.trained else self._of_training
        found = [
            *self._of_plan(agreement.plan, has_data),
            *self._of_price(agreement, name),
            *checks(agreement, scored),
        ]
        return found[0] if found else ""

    def _unstated(self, wanted: Mapping[str, Any]) -> str:
        """What the rules leave open, with the line that would accept what is proposed."""
        for key, value in wanted.items():
            if getattr(self, key) is None:
                return f"[accept] does not say {key}; to accept what is proposed add: {key} = {_toml(value)}"
        return ""

    def _strangers(self, members: Mapping[str, str]) -> str:
        strangers = sorted(set(members) - set(self.members or ()))
        return f"{', '.join(strangers)} would take part, who is not among the members" if strangers else ""

    def _of_plan(self, plan: Plan, has_data: bool) -> Iterator[str]:
        if plan.algorithm not in (self.algorithms or ()):
            yield f"algorithm {plan.algorithm!r} is not among {', '.join(self.algorithms or ())}"
        if plan.protocol not in (self.protocols or ()):
            yield f"protocol {plan.protocol!r} is not among {', '.join(self.protocols or ())}"
        most, delta = self.epsilon, 1e-5 if self.delta is None else self.delta
        if has_data and most is not None and most < math.inf:
            promised = plan.budget_epsilon
            if plan.insecure_reproducible_noise:
                yield "its noise is reproducible and promises nothing"
            elif not promised or promised > most or plan.delta > delta:
                found = f"epsilon {promised:g} at delta {plan.delta:g}" if promised else "no budget"
                yield f"the plan has {found}; at most epsilon {most:g} at {delta:g} is accepted"
        if plan.mode == "sealed":
            yield from self._of_sealed(plan)
            covers = plan.settings.protect
            if has_data and covers not in (PROTECTS[0], self.protect):
                yield (
                    f"epsilon would cover {COVERED[covers]}; to accept that add: protect = {_toml(covers)}"
                )
        if has_data and plan.collusion < self.collusion:
            yield f"noise withstands {plan.collusion} that pool what they see; {self.collusion} are asked for"

    def _of_price(self, agreement: Agreement, name: str) -> Iterator[str]:
        """What this organisation's own records cost by the forecast, whatever the plan says of its budget."""
        price = max(agreement.forecast.get(name, {}).values(), default=0.0)
        if self.epsilon is not None and price > self.epsilon:
            yield f"{name} would pay epsilon {_figure(price)}; at most {self.epsilon:g} is accepted"

    def _of_sealed(self, plan: Plan) -> Iterator[str]:
        dealers = _dealers(plan)
        if dealers and dealers != (self.dealer,):
            yield f"{', '.join(dealers)} would deal; accepted is {self.dealer or 'nobody'}"
        withstands, asked = adversary(plan), self.adversary or ADVERSARIES[-1]
        if ADVERSARIES.index(withstands) < ADVERSARIES.index(asked):
            yield f"the plan withstands {withstands} members; {asked} ones are asked for"

    def _of_training(self, agreement: Agreement, scored: int) -> Iterator[str]:
        outline, table = agreement.outline, agreement.timetable
        share = outline.n_test / outline.records
        if self.test_fraction is not None and share > self.test_fraction + 1 / outline.records:
            yield f"{share:.2f} of the records would test; at most {self.test_fraction:g} is accepted"
        if self.evaluations is not None and table.evaluations > self.evaluations:
            yield f"the test part would be evaluated {table.evaluations} times; at most {self.evaluations}"
        if (held := _held_back(agreement)) > (self.held_back or 0):
            yield f"{held} records would be scored exactly for a stack; at most {self.held_back or 0}"

    def _of_prediction(self, agreement: Agreement, scored: int) -> Iterator[str]:
        records, most, quota = agreement.timetable.n_train, self.predictions, agreement.timetable.quota
        if quota is not None:
            yield from self._of_quota(quota)
        elif most is not None and scored + records > most:
            yield f"it asks for {records} records, {scored} were scored before; at most {most} in all"

    def _of_quota(self, quota: Quota) -> Iterator[str]:
        if self.predictions is not None and quota.people > self.predictions:
            yield f"it asks for the scores of {quota.people} people; at most {self.predictions} in all"
        if self.requests is not None and quota.requests > self.requests:
            yield f"it asks for {quota.requests} requests; at most {self.requests} are accepted"


def adversary(plan: Plan) -> str:
    """The strongest adversary that a sealed plan withstands."""
    found = str(getattr(plan.settings, "adversary", ""))
    return found if found in ADVERSARIES else ADVERSARIES[0]


def _held_back(agreement: Agreement) -> int:
    """Records that a stack keeps out of training."""
    stack = agreement.plan.mode == "sealed" and agreement.plan.settings.stack
    return agreement.outline.n_train - agreement.timetable.n_train if stack else 0


def _dealers(plan: Plan) -> tuple[str, ...]:
    return tuple(find_algorithm(plan.algorithm).assistants(plan).values())


def _wanted(agreement: Agreement, has_data: bool) -> dict[str, Any]:
    """The rules that must be stated before an agreement can be accepted -> what would accept this one."""
    plan, table, sealed = agreement.plan, agreement.timetable, agreement.plan.mode == "sealed"
    wanted: dict[str, Any] = {
        "members": list(agreement.members),
        "algorithms": [plan.algorithm],
        "protocols": [plan.protocol],
    }
    if sealed:
        wanted |= {"dealer": (*_dealers(plan), "")[0], "adversary": adversary(plan)}
    if not has_data:
        return wanted
    wanted |= {"epsilon": plan.budget_epsilon or math.inf} | ({"delta": plan.delta} if sealed else {})
    if table.quota is not None:
        return wanted | {"predictions": table.quota.people, "requests": table.quota.requests}
    if agreement.trained:
        return wanted | {"predictions": table.n_train}
    wanted |= {"test_fraction": agreement.outline.test_fraction, "evaluations": table.evaluations}
    wanted |= {"held_back": held} if (held := _held_back(agreement)) else {}
    return wanted | ({"predictions": 0} if sealed else {})


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{readable(value)}"' if isinstance(value, str) else repr(value)


# -- the screen ---------------------------------------------------------------------------------------------


def invitation_lines(invitation: Invitation, name: str) -> list[str]:
    """What a person reads before records are compared with others'."""
    sizes = ", ".join(f"{each} {count:,}" for each, count in invitation.sizes.items())
    words = {
        PRIVATE: "each learns which of its own records all have, and how many others bring",
        HELPED: "the same, by keyed hashes that somebody without data compares",
        SAME: "all must have the same IDs, and learn whether they do",
    }
    return [
        f"invitation    {invitation.purpose} in run {readable(invitation.run, 80)}",
        *_members(invitation.members),
        f"records       {sizes or 'none'}",
        f"alignment     {invitation.kind}: {words.get(invitation.kind, 'unknown here')}",
    ]


def agreement_lines(agreement: Agreement, name: str) -> list[str]:
    """What a person reads before agreeing: who, what leaves, at which price, and the worst of it."""
    plan, outline = agreement.plan, agreement.outline
    held = ", ".join(f"{p} ({w} columns)" for p, w in zip(outline.parties, outline.widths, strict=True))
    lines = []
    if words := plan.adversary_in_words:
        lines = [f"members are   {words}", f"dealer        {readable(plan.dealer_in_words)}"]
    lines += [
        f"run           {readable(agreement.run, 80)}, {agreement.purpose}",
        *_members(agreement.members),
    ]
    lines += [f"features      {readable(held)}", f"labels        {outline.label_holder}, {outline.task}"]
    if plan.mode == "sealed" or plan.protocol in HIDING:
        lines.append(f"withstands    {plan.collusion} of the others, if they pool what they see; not more")
    if plan.mode == "sealed":
        lines.append(f"covers        {COVERED[plan.settings.protect]}")
    stay = f" (goes on with {plan.threshold} parties)" if plan.threshold else ""
    noise = f"sigma {plan.sigma:g}, clip {plan.clip:g}" if plan.sigma else "no noise"
    lines.append(f"algorithm     {plan.algorithm} on {plan.protocol}{stay}; mode {plan.mode}, {noise}")
    lines += [f"constant      {each} {value}" for each, value in agreement.constants.items()]
    lines += _prediction(agreement) if agreement.trained else _training(agreement, name)
    lines += [f"WARNING       {each}" for each in warnings(plan)]
    return [*lines, f"IDs           {agreement.ids[:32]}", f"agreement     {agreement.digest}"]


def _members(members: Mapping[str, str]) -> list[str]:
    return [f"member        {readable(each, 80)}, key {key[:16]}" for each, key in members.items()]


def _training(agreement: Agreement, name: str) -> list[str]:
    plan, outline, table = agreement.plan, agreement.outline, agreement.timetable
    lines = [
        f"records       {outline.n_train} to train, {outline.n_test} to test",
        f"schedule      {table.epochs} epochs, {table.evaluations} evaluations of {outline.n_test} records",
        f"restarts      {table.restarts}: as often everybody may go back after a crash, and pays again",
        f"leaves here   {_leaving(plan, name, outline.label_holder)}",
    ]
    if profile := agreement.proposal.profile:
        lines.append(
            f"profile       of agreement {profile}: epsilon {_figure(plan.settings.profile_epsilon)} at "
            f"delta {plan.delta:g} was allowed for it; the price below is that of both together"
        )
    lines += [
        f"price         epsilon {_figure(epsilon)} to {observer} at the end, delta {plan.delta:g}: "
        f"{meaning(epsilon, plan.delta)}"
        for observer, epsilon in agreement.forecast.get(name, {}).items()
    ]
    if name in agreement.forecast and not plan.budget_epsilon and plan.sigma:
        most = worst_case(plan, table)
        lines.append(
            f"budget        none: the gate counts and never refuses; at worst epsilon {_figure(most)}"
        )
    if plan.mode == "sealed" and name in agreement.forecast:
        if held := _held_back(agreement):
            lines.append(
                f"held back     {held} records to train on: their exact scores go to {outline.label_holder}, "
                "with no guarantee for them"
            )
        lines.append(
            f"test part     noisy totals over {outline.n_test} records, to {outline.label_holder}, "
            f"{table.evaluations} times in all within the same epsilon; no score of a record is opened"
            if outline.task == "binary"
            else f"test part     nothing is opened of its {outline.n_test} records"
        )
    return lines


def _prediction(agreement: Agreement) -> list[str]:
    quota = agreement.timetable.quota
    standing = []
    if quota is not None:
        most = f"{quota.people:,} scores or {quota.requests:,} requests in all"
        standing = [f"service       scores any of these records on request, until {most}"]
    return [
        f"model         of agreement {agreement.trained}",
        *standing,
        f"records       {agreement.timetable.n_train}, {agreement.known} of them known from before",
        f"scores        go to {agreement.outline.label_holder}",
        f"cost          {agreement.cost or 'nothing leaves this organisation'}",
    ]


def _leaving(plan: Plan, name: str, label_holder: str) -> str:
    if name == label_holder:
        return "gradients, which tell labels" if plan.mode == "strict" else "what the plan opens of labels"
    ways = {
        "sealed": "shares, which tell nothing alone; noisy totals are opened to all members",
        "frozen": f"one noisy vector per record, once, to {label_holder}",
    }
    usual = f"a vector per record and step to {label_holder}; others get gradients computed from it"
    return ways.get(plan.mode, usual if plan.protocol == "plain" else f"into {plan.protocol} sums, {usual}")


def warnings(plan: Plan) -> list[str]:
    """What the worst fields of a plan do, in words."""
    found = {
        "noise is reproducible: whoever knows the seed subtracts it, and nothing is promised": (
            plan.insecure_reproducible_noise
        ),
        "UNPROTECTED, no noise: features can be computed from what leaves": not plan.sigma,
        "no budget: releases are counted but never refused": not plan.budget_epsilon,
        "labels can be read from the gradients that their holder sends": (
            plan.mode in ("strict", "dp-encoder") and plan.defence != "noise" and not plan.label_epsilon
        ),
        "a party of the plan attacks on purpose (optimiser malicious)": (
            "malicious" in (plan.optimiser, *plan.optimisers.values())
        ),
    }
    return [words for words, applies in found.items() if applies]


def _figure(epsilon: float) -> str:
    return f"{epsilon:.3g}" if math.isfinite(epsilon) else "infinite"


def meaning(epsilon: float, delta: float) -> str:
    """What an epsilon means: how far one who is undecided between two values of a record can get."""
    if not math.isfinite(epsilon):
        return "no guarantee; assume that all of it is known"
    mu = gdp_mu(epsilon, delta)
    sure = 0.5 * (1 + math.erf(mu / 2 / math.sqrt(2)))
    return (
        f"whoever is undecided between two values of a record is right in {100 * sure:.3g} % of cases at most"
    )


def cost_in_words(count: int, plan: Plan, before: float, after: float) -> str:
    """What a prediction of noisy embeddings costs the worst record; the gate decides when the time comes.

    Args:
        count: How many records.
        plan: The resolved plan.
        before: Mu so far.
        after: Mu then.
    """
    figures = [f"{gdp_epsilon(mu, plan.delta):.4g}" if mu else "0" for mu in (before, after)]
    words = (
        f"{count} noisy embeddings; epsilon of the worst record {figures[0]} so far, "
        f"{figures[1]} then, at delta {plan.delta:g}"
    )
    if not plan.budget_epsilon:
        return f"{words} (no budget)"
    over = after > gdp_mu(plan.budget_epsilon, plan.delta)
    return f"{words} (budget {plan.budget_epsilon:g}{': the gate will refuse' if over else ''})"
