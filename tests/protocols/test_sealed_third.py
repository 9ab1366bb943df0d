"""Members that deal for each other: the right totals, views that tell nothing, noise that nobody knows.

The views are counted exhaustively: the real machines run with every value of every mask that a member does
not know, on Z_2^64 read modulo 4 (reduction is a ring homomorphism, and on Z_4 sine and cosine are integers).
"""

import itertools

import numpy as np
import pytest
from sealed_federation import Federation
from test_sealed_views import fits, noise_ratio

from securevfl.accountants.sealed import SealedShifts
from securevfl.errors import AccountingError, InputError, ProtocolError
from securevfl.protocols import SealedProtocol, drive
from securevfl.protocols.sealed import Waves, party_of, third
from securevfl.protocols.sealed.messages import PairSeed
from securevfl.protocols.sealed.parts import Parts

SINE, COSINE = np.array([0, 1, 0, 2**64 - 1], np.uint64), np.array([1, 0, 2**64 - 1, 0], np.uint64)


class Toy:
    """sin(pi u / 2) for integer scores: exact on Z_4."""

    period, coefficients, offset, range, rounding = 2.0**32, (1.0,), 0.0, (-1.0, 1.0), 0.0

    def share(self, delta, waves):
        return SINE[delta % 4] * waves[1, 0] + COSINE[delta % 4] * waves[0, 0]


def toy_waves(phase, series):
    return np.stack([SINE[phase % 4], COSINE[phase % 4]])[:, None]


class Session:
    """One record, one column; holder 0, second 1, dealing 2. Masks are given by name; outputs run apart."""

    def __init__(self, monkeypatch, masks, outputs):
        self.outputs = outputs
        monkeypatch.setattr(third, "waves_of", toy_waves)
        monkeypatch.setattr(third, "ring_product", lambda a, b: a.astype(np.int64).view(np.uint64) @ b)
        monkeypatch.setattr(third, "expand", self._expand)
        self.masks = masks

    def _expand(self, seed, purpose, shape, dtype=np.uint64):
        name = purpose if purpose.startswith("operand") else purpose.rpartition("/")[0]
        return np.broadcast_to(self.masks[name], shape).astype(dtype)

    def view(self, member, rows, scores, labels):
        """Words that a member receives and its total, modulo 4: (words, outputs)."""
        protocol = SealedProtocol(
            widths=(1, 1, 1),
            static=(True,) * 3,
            clips=(1.0,) * 3,
            label_holder=0,
            records=1,
            batch=1,
            outputs=self.outputs,
            series=Toy(),
            share_stds=((0,) * 3,) * 3,
            dealing="third",
        )
        operands = [np.full((1, 1), x, np.int32) for x in rows]
        parties = [party_of(protocol, m, operand=operands[m]) for m in range(3)]
        seen = drive([party.setup() for party in parties])
        machines = [
            party.round(
                round=0,
                scores=scores[m][None],
                labels=(labels * 2.0**-28)[None] if m == 0 else None,
            )
            for m, party in enumerate(parties)
        ]
        seen += drive(machines)
        words = [
            np.broadcast_to(value.reshape(-1, value.shape[-1]), (value.size // value.shape[-1], self.outputs))
            for envelope in sorted(seen, key=lambda e: (e.message.kind, e.sender))
            if envelope.receiver == member
            for value in vars(envelope.message).values()
            if isinstance(value, np.ndarray) and value.size
        ]
        total = machines[member].result() * 2.0**42
        return np.concatenate(words) % 4, total[0].astype(np.int64) % 4


KNOWN = {  # what each member shares with somebody; everything else it does not know
    0: {"phase/0", "waves", "operand/0/1", "operand/2/1", "blind/1/0", "product/1/0", "blind/2/0",
        "product/2/0", "blind/2/1", "product/2/1", "zeta/2"},
    1: {"phase/1", "operand/1/0", "operand/2/0", "blind/0/1", "product/0/1", "blind/2/1", "product/2/1",
        "blind/2/0", "product/2/0", "zeta/2"},
    2: {"phase/0", "phase/1", "waves", "operand/0/1", "operand/1/0", "operand/2/0", "operand/2/1",
        "blind/0/1", "product/0/1", "blind/1/0", "product/1/0"},
}  # fmt: skip
EVERY = sorted(set().union(*KNOWN.values()))


def views_differ(monkeypatch, member, flaw=None, rows_of=range(4)):
    """Whether some pair of the others' inputs with one total gives the member different views."""
    others = [m for m in range(3) if m != member]
    hidden = [name for name in EVERY if name not in KNOWN[member]]
    operands = [name for name in hidden if name.startswith("operand")]
    axes = [name for name in hidden if not name.startswith("operand")]
    axes += ["waves/cosine"] if "waves" in hidden else []
    sizes = [4] * len(axes) + [4, 4, 1 if member == 0 else 2]  # two scores and the label
    grid = dict(zip([*axes, "u", "v", "y"], np.indices(sizes).reshape(len(sizes), -1), strict=True))
    inputs = (grid["u"] * 4 + grid["v"]) * 2 + grid["y"]
    own = np.random.default_rng(member)
    fixed = {name: int(own.integers(4)) for name in EVERY}
    seen: dict[int, np.ndarray] = {}
    for rows in itertools.product(rows_of, repeat=2):
        counts: dict[int, np.ndarray] = {}
        for values in itertools.product(range(4), repeat=len(operands)):
            masks = fixed | {name: grid[name] for name in axes if name in EVERY}
            masks |= dict(zip(operands, values, strict=True))
            if "waves" in hidden:
                masks["waves"] = np.stack([grid["waves"], grid["waves/cosine"]])[:, None, None]
            if flaw:
                flaw(masks)
            scores = {member: np.full(len(inputs), 3), others[0]: grid["u"], others[1]: grid["v"]}
            x = {member: 3, others[0]: rows[0], others[1]: rows[1]}
            session = Session(monkeypatch, masks, len(inputs))
            words, totals = session.view(member, [x[m] for m in range(3)], scores, grid["y"])
            code = np.zeros(len(inputs), np.int64)
            for line in words:
                code = code * 4 + line.astype(np.int64)
            for total in range(4):
                chosen = totals == total
                places = inputs[chosen] * 4 ** len(words) + code[chosen]
                found = np.bincount(places, minlength=32 * 4 ** len(words)).reshape(32, -1)
                counts[total] = counts.get(total, 0) + found
        for total, found in counts.items():
            for line in found[found.any(1)]:
                if not np.array_equal(seen.setdefault(total, line), line):
                    return True
    return False


@pytest.mark.parametrize("member", [0, 1, 2])
def test_no_view_depends_on_more_than_the_own_total(monkeypatch, member):
    # The second member has the most hidden masks: all values of both rows take a quarter of a minute.
    assert not views_differ(monkeypatch, member, rows_of=(0, 3) if member == 1 else range(4))


@pytest.mark.slow
def test_nor_does_the_second_members_for_any_rows(monkeypatch):
    assert not views_differ(monkeypatch, 1)


def _shared(first, second):
    def flaw(masks):
        masks[first] = masks[second]

    return flaw


@pytest.mark.parametrize(
    "member,flaw",
    [
        (2, lambda masks: masks.update({"zeta/2": 0})),
        (2, _shared("blind/2/0", "blind/1/0")),
        (0, _shared("operand/2/0", "operand/2/1")),
    ],
    ids=["no zeta", "one V for two receivers", "one U for two holders"],
)
def test_what_the_masks_are_for(monkeypatch, member, flaw):
    assert views_differ(monkeypatch, member, flaw)


# -- totals -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("members", [3, 4, 6])
def test_totals_equal_the_plain_gradient(members):
    for holder in range(members):
        federation = Federation(members, label_holder=holder, seed=members, codec=True, dealing="third")
        generator = np.random.default_rng(holder)
        federation.setup(lambda pending, g=generator: int(g.integers(len(pending))))
        federation.check(federation.totals(0, choose=lambda p, g=generator: int(g.integers(len(p)))))
        rows = np.array([7, 1, 3])
        federation.check(federation.totals(4, rows), rows)


def test_label_histograms_and_waves():
    federation = Federation(3, label_holder=1, outputs=2, dealing="third")
    plain = {**vars(federation.protocol), "widths": (2, 0, 3), "clips": (1.0,) * 3}
    protocol = SealedProtocol(**plain | {"series": None})
    operands = [op[:w] for op, w in zip(federation.operands, (2, 0, 3), strict=True)]
    operands[1] = np.zeros((0, 12), np.int32)
    parties = [party_of(protocol, m, operand=operands[m]) for m in range(3)]
    drive([party.setup() for party in parties])
    labels = np.column_stack([federation.labels[:, :1], 1 - federation.labels[:, :1]])
    machines = [p.round(round=0, labels=labels if p.index == 1 else None) for p in parties]
    drive(machines)
    for m in range(3):
        assert np.array_equal(machines[m].result(), operands[m] * 2.0**-14 @ labels)
    waves = Waves(24.0, (0.8, 0.6))
    protocol = SealedProtocol(**plain | {"series": waves, "outputs": 4, "widths": (0, 2, 0)})
    operands = [np.zeros((0, 12), np.int32), federation.operands[1][:2], np.zeros((0, 12), np.int32)]
    parties = [party_of(protocol, m, operand=operands[m]) for m in range(3)]
    drive([party.setup() for party in parties])
    machines = [p.round(round=0, scores=federation.scores[p.index][:, :1]) for p in parties]
    drive(machines)
    turns = sum(federation.scores)[:, :1] * 2 * np.pi / 24 * np.array([1, 3])
    exact = np.concatenate([np.sin(turns), np.cos(turns)], 1) * np.array([0.8, 0.6, 0.8, 0.6])
    assert np.abs(machines[1].result() - operands[1] * 2.0**-14 @ exact).max() < 12 * 4 * 2.0**-14


@pytest.mark.parametrize("members", [3, 5])
def test_scores_are_summed_for_the_label_holder_alone(members):
    federation = Federation(members, label_holder=1, dealing="third")
    with pytest.raises(ProtocolError, match="setup"):
        federation.parties[0].score(federation.scores[0], round=0)
    federation.setup()
    machines = [p.score(federation.scores[p.index], round=0) for p in federation.parties]
    sent = drive(machines)
    assert np.allclose(machines[1].result(), sum(federation.scores), atol=1e-8)
    words = [e.message.words for e in sent]
    assert len(words) == members - 1 and all(e.receiver == 1 for e in sent)
    again = [p.score(federation.scores[p.index], round=1) for p in federation.parties]
    assert all((e.message.words != w).all() for e, w in zip(drive(again), words, strict=True))


def test_a_session_has_seeds_of_its_own_and_a_round_serves_once():
    federation = Federation(3, dealing="third")
    with pytest.raises(ProtocolError, match="setup"):
        federation.machines(0)
    federation.setup()
    federation.totals(2)
    with pytest.raises(ProtocolError, match="used round"):
        federation.machines(2)
    federation.setup()
    seeds = [e.message.seed for e in federation.transcript if isinstance(e.message, PairSeed)]
    assert len(seeds) == len(set(seeds)) == 6
    federation.check(federation.totals(0))


def test_a_finished_machine_keeps_no_secrets():
    federation = Federation(3, std=2**20, dealing="third")
    federation.setup()
    machines = federation.machines(0)
    federation.deliver(machines, [])
    for machine in machines:
        kept = vars(machine)
        assert not any(kept[n] for n in ("_seeds", "_dealt", "_masked", "_noise", "_phases"))
        assert all(kept[n].size == 0 for n in ("_waves", "_residual", "_sum"))


# -- noise --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("known", [(), (0,), (1,), (2,)])
def test_totals_carry_the_noise_that_nobody_alone_can_subtract(known):
    federation = Federation(3, records=4, width=40, std=2**43, seed=1, dealing="third")
    assert fits(noise_ratio(federation, 12, known))


def test_noise_that_reaches_no_total_is_refused():
    given = vars(Federation(4, dealing="third").protocol)
    with pytest.raises(InputError, match="cannot reach"):
        SealedProtocol(**given | {"share_stds": ((1,) * 4,) * 4})


def _moves(protects, members, holder, alone):
    """How far the totals can move, corner by corner, while what `alone` holds stays."""
    everywhere = [1.0042] * members
    if protects == "label":
        return [[1.0] * members]
    if protects == "features":
        return [
            everywhere,
            *([2.0042 * (m == p) for m in range(members)] for p in range(members) if p != alone),
        ]
    if alone != holder:
        return [[2.0042] * members]
    return [everywhere, [2.0042 * (m != alone) for m in range(members)]]


@pytest.mark.parametrize("protects", ["person", "features", "label"])
@pytest.mark.parametrize("members", [3, 4, 6])
def test_every_total_leaves_every_single_adversary_enough(members, protects):
    """By the definition, without the accountant's own coalitions: squared shifts over what is unknown."""
    for holder in range(members):
        given = tuple(Parts(members, holder).contributors(m) for m in range(members))
        shifts = SealedShifts(
            clips=(1.0,) * members,
            label_holder=holder,
            protects=protects,
            residual_bound=1.0021,
            residual_change=1.0042,
            contributors=given,
        )
        noise = shifts.variances(mu=1.0, colluders=1)
        for alone in range(members):
            unknown = [sum(v for j, v in enumerate(row) if j != alone) for row in noise]
            assert all(noise[m][j] == 0 for m in range(members) for j in range(members) if j not in given[m])
            if protects == "features":
                assert min(unknown) >= shifts.diameter**2 * (1 - 1e-9)
            if protects == "label" and alone == holder:
                continue
            worst = max(
                sum(d * d / v for d, v in zip(m, unknown, strict=True))
                for m in _moves(protects, members, holder, alone)
            )
            assert worst <= 1 + 1e-9
            assert shifts.squared_mu(noise, frozenset({alone})) <= 1 + 1e-9


def test_noise_of_the_two_that_hold_shares_alone_is_not_enough():
    """The shares that suffice where everybody contributes leave a fourth member's adversary 0.707 sigma."""
    everybody = SealedShifts(
        clips=(1.0,) * 4,
        label_holder=0,
        protects="features",
        residual_bound=1.0,
        residual_change=1.0,
    )
    noise = everybody.variances(mu=1.0, colluders=1)
    reached = tuple(
        tuple(v * (j in Parts(4, 0).contributors(m)) for j, v in enumerate(row))
        for m, row in enumerate(noise)
    )
    assert everybody.mu(reached, colluders=1) > 1.2
    with pytest.raises(AccountingError, match="know all"):
        SealedShifts(
            **vars(everybody)
            | {"contributors": (frozenset({0, 1}),) * 2 + (frozenset({0, 2}),) + (frozenset({0, 3}),)}
        ).variances(mu=1.0, colluders=2)
