"""`securevfl account`: a privacy calculator, and the books of a finished run."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from securevfl.cli.show import number, print_json, table, terminal
from securevfl.errors import AccountingError, RunError

if TYPE_CHECKING:
    from securevfl.accountants import Claim, Figure, GaussianRelease, ReleaseRecord, Spend

_COUNTED = {
    "strict": "every vector that the party releases",
    "dp-encoder": "the releases of one record",
    "frozen": "the releases of one record",
    "sealed": "the openings that contain one record",
}


def account(
    run: Annotated[Path | None, typer.Argument(help="A run folder: print what its ledgers say.")] = None,
    clip: Annotated[float | None, typer.Option(help="Clip norm C; sensitivity 2C (replace-one).")] = None,
    sigma: Annotated[float | None, typer.Option(help="Noise; leave out to calibrate it.")] = None,
    releases: Annotated[int | None, typer.Option(help="Releases that the worst record pays for.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Target: finds --sigma from --releases, or the other way round.")
    ] = None,
    delta: Annotated[float, typer.Option(help="Delta of every figure.")] = 1e-5,
    mode: Annotated[
        str, typer.Option(help="What --releases counts: strict, dp-encoder, frozen or sealed.")
    ] = "strict",
    sensitivity: Annotated[
        float | None, typer.Option(help="Instead of --clip: replace-one sensitivity (mode sealed).")
    ] = None,
    sampling_rate: Annotated[float, typer.Option(help="Poisson rate; below 1 needs --ids-hidden.")] = 1.0,
    ids_hidden: Annotated[
        bool, typer.Option("--ids-hidden", help="No observer can tell who was sampled.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(help="Draw trade-off and epsilon-delta curves here.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Compute a privacy guarantee, calibrate the noise for one, or read a run's ledgers."""
    if run is not None:
        if any(value is not None for value in (clip, sigma, releases, epsilon, sensitivity, plot)):
            raise AccountingError("a run's ledgers hold all values; give either RUN or options, not both")
        _show_run(run, delta, as_json=json)
        return
    from securevfl import accountants

    event = _solve(clip, sensitivity, sigma, releases, epsilon, delta, mode, sampling_rate, not ids_hidden)
    best = accountants.best_upper_bound(event, delta)
    figures = accountants.compare(event, delta)
    if plot is not None:
        from securevfl.accountants.plots import plot_curves

        plot_curves(event, plot, delta=delta, epsilon=best.epsilon)
    if json:
        print_json(_content(event, mode, best, figures))
    else:
        _show_figures(event, mode, best, figures)


def _solve(
    clip: float | None,
    sensitivity: float | None,
    sigma: float | None,
    releases: int | None,
    epsilon: float | None,
    delta: float,
    mode: str,
    sampling_rate: float,
    ids_visible: bool,
) -> GaussianRelease:
    """Find whichever of sigma and releases was left out."""
    from securevfl import accountants

    if (clip is None) == (sensitivity is None):
        raise AccountingError("give exactly one of --clip and --sensitivity (or a run folder)")
    if mode not in _COUNTED:
        raise AccountingError(f"mode is {mode!r}; expected one of {', '.join(sorted(_COUNTED))}")
    if sum(value is not None for value in (sigma, releases, epsilon)) != 2:
        raise AccountingError("give exactly two of --sigma, --releases and --epsilon; the third is computed")
    reach = 2 * clip if clip is not None else sensitivity
    if sigma is None:
        sigma = accountants.calibrate_sigma(
            epsilon=epsilon or 0.0,
            delta=delta,
            releases=releases or 0,
            mode=mode,
            sensitivity=reach,
            sampling_rate=sampling_rate,
            ids_visible=ids_visible,
        )
    if releases is None:
        if sampling_rate < 1:
            raise AccountingError("give --releases with --sampling-rate; it cannot be solved for")
        releases = accountants.max_releases(
            epsilon=epsilon or 0.0, delta=delta, sigma=sigma, mode=mode, sensitivity=reach
        )
    return accountants.GaussianRelease(
        sigma=sigma,
        sensitivity=reach if reach is not None else 0.0,
        count=releases,
        sampling_rate=sampling_rate,
        ids_visible=ids_visible,
        adjacency="replace-one",
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _content(event: GaussianRelease, mode: str, best: Figure, figures: dict[str, Figure]) -> dict[str, Any]:
    from securevfl import accountants

    return {
        "mode": mode,
        "adjacency": event.adjacency,
        "sensitivity": event.sensitivity,
        "sigma": event.sigma,
        "releases": event.count,
        "sampling_rate": event.sampling_rate,
        "delta": best.delta,
        "mu": _finite(accountants.GDPAccountant().mu(event)),
        "epsilon": _finite(best.epsilon),
        "accountant": best.accountant,
        "accountants": {
            name: {
                "epsilon": _finite(figure.epsilon),
                "bound": figure.bound,
                "accountant": figure.accountant,
                "explanation": figure.explanation,
            }
            for name, figure in figures.items()
        },
    }


def _show_figures(event: GaussianRelease, mode: str, best: Figure, figures: dict[str, Figure]) -> None:
    from securevfl import accountants

    console = terminal()
    console.print(
        f"epsilon {number(best.epsilon, 6)} at delta {best.delta:g}, by {best.accountant}\n"
        f"mode {mode}: {event.count:,} releases, counting {_COUNTED[mode]}\n"
        f"noise {number(event.sigma, 6)}, sensitivity {number(event.sensitivity, 6)} (replace-one), "
        f"mu {number(accountants.GDPAccountant().mu(event), 6)}"
        + (" without sampling" if event.sampling_rate < 1 else ""),
        markup=False,
        highlight=False,
    )
    shown = table("All accountants", "accountant", "epsilon", "kind", "remark")
    for name, figure in figures.items():
        kind = "upper bound" if figure.bound else "approximation"
        shown.add_row(
            accountants.ACCOUNTANTS[name].__name__, number(figure.epsilon, 6), kind, figure.explanation
        )
    console.print(shown)


def _show_run(run: Path, delta: float, *, as_json: bool) -> None:
    if not run.is_dir():
        raise RunError(f"{run} holds no run: it is no folder")
    from securevfl import accountants
    from securevfl.privacy.ledger import read_records

    records = read_records(run)
    matrix = accountants.privacy_matrix(records, delta)
    together = accountants.coalition_spend(records, delta)
    claims = {owner: _claim(run, [r for r in records if r.owner == owner], delta) for owner in together}
    if as_json:
        print_json(
            {"owners": {owner: _owner(matrix[owner], together[owner], claims[owner]) for owner in matrix}}
        )
        return
    console = terminal()
    shown = table(
        f"What each owner let each observer learn, delta {delta:g}",
        *("owner", "observer", "mode", "epsilon", "mu", "releases", "worst record"),
    )
    for owner, observers in matrix.items():
        for spend in [*observers.values(), *([together[owner]] if len(observers) > 1 else [])]:
            figures = (
                number(spend.epsilon),
                number(spend.mu),
                f"{spend.releases:,}",
                f"{spend.worst_releases:,}",
            )
            shown.add_row(owner, spend.observer, spend.mode, *figures)
    console.print(shown)
    for text in _remarks(together, claims):
        console.print(text, markup=False, highlight=False)


def _remarks(together: dict[str, Spend], claims: dict[str, Claim | None]) -> list[str]:
    assumptions = sorted({text for spend in together.values() for text in spend.assumptions})
    remarks = [f"Assumed: {text}." for text in assumptions]
    remarks += [
        f"{owner}: {spend.predictions:,} scores of records outside of training were opened besides, exactly."
        for owner, spend in together.items()
        if spend.predictions
    ]
    told: dict[str, list[str]] = {}
    for owner, claim in claims.items():
        if claim is not None:
            told.setdefault(_sentence(claim), []).append(owner)
    return [*remarks, *(f"{', '.join(owners)}: {text}" for text, owners in told.items())]


def _sentence(claim: Claim) -> str:
    stated = "no epsilon" if claim.epsilon is None else f"epsilon {number(claim.epsilon)}"
    return (
        f"{stated} by {claim.source}: {claim.label}, since {claim.reason}. "
        f"Counter-example: {claim.counter_example}."
    )


def _owner(observers: dict[str, Spend], together: Spend, claim: Claim | None) -> dict[str, Any]:
    return {
        "observers": {name: _spend(spend) for name, spend in observers.items()},
        "coalition": _spend(together),
        "claimed": None if claim is None else _claimed(claim),
    }


def _spend(spend: Spend) -> dict[str, Any]:
    return {
        "mode": spend.mode,
        "mu": _finite(spend.mu),
        "epsilon": _finite(spend.epsilon),
        "delta": spend.delta,
        "releases": spend.releases,
        "worst_releases": spend.worst_releases,
        "updates": spend.updates,
        "exact": spend.exact,
        "predictions": spend.predictions,
        "assumptions": list(spend.assumptions),
    }


def _claimed(claim: Claim) -> dict[str, Any]:
    return {
        "label": claim.label,
        "source": claim.source,
        "mu": _finite(claim.mu),
        "epsilon": _finite(claim.epsilon),
        "reason": claim.reason,
        "counter_example": claim.counter_example,
    }


def _claim(run: Path, records: list[ReleaseRecord], delta: float) -> Claim | None:
    """What the algorithm's paper would promise for an owner's releases."""
    from securevfl.accountants import claim_for
    from securevfl.settings.plan import Plan

    file = run / "plan.toml"
    if not file.is_file():
        return None
    plan = Plan.from_toml(file)
    noisy = [r for r in records if r.mechanism == "gaussian"]
    rows = max((int(r.rows.max()) + 1 for r in noisy if r.rows is not None and r.rows.size), default=0)
    if not rows:
        return claim_for(
            plan.algorithm, sigma=None, clip=plan.clip, records=1, batch=1, releases=0, delta=delta
        )
    return claim_for(
        plan.algorithm,
        sigma=plan.sigma,
        clip=plan.clip,
        records=rows,
        batch=min(plan.batch, rows),
        releases=sum(r.vectors for r in noisy),
        delta=delta,
    )
