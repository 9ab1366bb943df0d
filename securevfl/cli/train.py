"""`securevfl train`: one training run, from data to metrics, ledgers and models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from securevfl.cli import completion
from securevfl.cli.show import number, print_json, progress_bar, table, terminal
from securevfl.errors import Interrupted, PlanError, RunError, SecureVFLError
from securevfl.files import check_new, is_full
from securevfl.interrupts import end_in_order
from securevfl.settings.codec import parse_assignment
from securevfl.settings.plan import KINDS, Plan, plan_file, read_plan
from securevfl.settings.protocols import PROTOCOLS

if TYPE_CHECKING:
    from rich.console import Console

    from securevfl.data import VerticalData
    from securevfl.federation.callbacks import Callback
    from securevfl.federation.run import Run


def train(
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="A data set by name, a data.toml, or one CSV file per party (repeat).",
            autocompletion=completion.data_sets,
        ),
    ] = None,
    data_folder: Annotated[
        Path | None, typer.Option(help="Folder with the data set's own files, or with a folder of its name.")
    ] = None,
    parties: Annotated[int | None, typer.Option(help="Split a named set's columns over M parties.")] = None,
    id_column: Annotated[str | None, typer.Option(help="ID column of CSV files.")] = None,
    label_column: Annotated[str | None, typer.Option(help="Label column, in one of the CSV files.")] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(
            help="Algorithm, sealed by default; securevfl data lists them.",
            autocompletion=completion.algorithms,
        ),
    ] = None,
    protocol: Annotated[
        str | None,
        typer.Option(
            help=f"{', '.join(PROTOCOLS[:-1])} or {PROTOCOLS[-1]}.", autocompletion=completion.protocols
        ),
    ] = None,
    threshold: Annotated[
        int | None,
        typer.Option(help="Protocol pairwise: how many parties must stay in a sum; 0 waits for everybody."),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="linear, mlp, cnn, lstm; sealed: scorecard, auto; central, local: trees.",
            autocompletion=completion.models,
        ),
    ] = None,
    encoder_training: Annotated[
        str | None, typer.Option(help="raw (mode strict), dp (mode dp-encoder) or none (mode frozen).")
    ] = None,
    clip: Annotated[float | None, typer.Option(help="L2 bound C of a released vector.")] = None,
    sigma: Annotated[float | None, typer.Option(help="Noise on each released value; 0 is exact.")] = None,
    epsilon: Annotated[
        float | None, typer.Option(help="Target; sigma is calibrated to it. Sealed: 1 by default.")
    ] = None,
    unprotected: Annotated[
        bool, typer.Option("--unprotected", help="Train with neither noise nor epsilon: nothing is promised.")
    ] = False,
    delta: Annotated[float | None, typer.Option(help="The delta of every epsilon.")] = None,
    budget_epsilon: Annotated[float | None, typer.Option(help="Refuse whatever would exceed this.")] = None,
    label_epsilon: Annotated[
        float | None, typer.Option(help="Flip the training labels once, by randomised response.")
    ] = None,
    defence: Annotated[
        str | None,
        typer.Option(
            help="What the label holder does to gradients: noise, max-norm, marvell, sign or discrete."
        ),
    ] = None,
    defence_level: Annotated[
        float | None, typer.Option(help="How much of the defence; 0 takes its own default.")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Passes over the data; as many as fit the rows by default.")
    ] = None,
    batch: Annotated[int | None, typer.Option(help="Records per step.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    seed: Annotated[int | None, typer.Option(help="Initial models and batch order, never noise.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or auto.")] = None,
    plan: Annotated[Path | None, typer.Option(help="A plan.toml; options on the line win over it.")] = None,
    set_field: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            help="Any other setting of plan, algorithm or simulation, as name=value (repeat).",
            autocompletion=completion.settings,
        ),
    ] = None,
    record_views: Annotated[
        bool, typer.Option("--record-views", help="Write what each observer saw.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for the results; it must not exist.")] = None,
    tracker: Annotated[str | None, typer.Option(help="Log to tensorboard or mlflow too.")] = None,
    ray: Annotated[
        str | None,
        typer.Option(help="Run the parties as actors of a Ray cluster: its address, auto, or local."),
    ] = None,
    profile: Annotated[
        Path | None, typer.Option(help="Start a scorecard from this profile; epsilon covers both.")
    ] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with the unfinished run in this folder.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Train on vertical data; every release passes a gate and is written to its owner's ledger."""
    options = {
        "algorithm": algorithm,
        "protocol": protocol,
        "threshold": threshold,
        "model": model,
        "encoder_training": encoder_training,
        "clip": clip,
        "sigma": sigma,
        "epsilon": epsilon,
        "unprotected": unprotected or None,
        "delta": delta,
        "budget_epsilon": budget_epsilon,
        "label_epsilon": label_epsilon,
        "defence": defence,
        "defence_level": defence_level,
        "epochs": epochs,
        "batch": batch,
        "learning_rate": learning_rate,
        "seed": seed,
        "device": device,
        "record_views": record_views or None,
        "parties": checked_parties(parties),
        "id_column": id_column,
        "label_column": label_column,
        "data": named(data) if data else None,
        "data_folder": None if data_folder is None else str(data_folder),
    }
    chosen = _plan(plan, options, set_field or [], resume, profile)
    if out is None and resume is None:
        raise PlanError("give a folder for the results: --out DIR")
    chosen.check_protection()
    if out is not None and resume is None:
        check_new(out)
    where = resume or out
    from securevfl.settings.source import load_planned

    loaded = load_planned(chosen)
    if not json:
        from securevfl.settings.duration import announcement

        typer.echo(announcement(chosen, loaded))
    from securevfl.trackers import build_tracker

    callbacks = (build_tracker(tracker, where),) if tracker is not None and where is not None else ()
    run = run_with_progress(
        loaded,
        chosen,
        where,
        quiet=json,
        resume=resume is not None,
        callbacks=callbacks,
        ray=ray,
        profile=profile,
    )
    if json:
        print_json(run.result)
    else:
        show_run(run)


def checked_parties(parties: int | None) -> int | None:
    """The number as it was given.

    Raises:
        PlanError: It is below 1.
    """
    if parties is not None and parties < 1:
        raise PlanError(f"--parties is {parties}; at least 1 is needed")
    return parties


def named(data: list[str]) -> str:
    """How the plan remembers the data; a description by its full path, so that an audit finds it again."""
    return ",".join(str(Path(name).absolute()) if name.lower().endswith(".toml") else name for name in data)


OF_PROFILE = ("data", "data_folder", "parties", "id_column", "label_column", "seed", "delta", "collusion")
"""What a run that starts from a profile takes over from its plan, where the line does not say otherwise."""


def _plan(
    file: Path | None,
    options: dict[str, Any],
    extra: list[str],
    resume: Path | None,
    profile: Path | None = None,
) -> Plan:
    """The profile's data, then the plan file's fields, then the options of the line, then --set."""
    if resume is not None:
        given = sorted(name for name, value in options.items() if value is not None)
        if given or file is not None or extra or profile is not None:
            raise PlanError("--resume takes the plan of the run as it is; give no other options")
        return Plan.from_toml(plan_file(resume))
    values: dict[str, Any] = {}
    if profile is not None:
        plan_file(profile)
        from securevfl.federation.continued import Profile

        before = Profile.open(profile).plan.to_flat()
        values = {name: before[name] for name in OF_PROFILE}
    values |= {} if file is None else read_plan(file)
    values |= {name: value for name, value in options.items() if value is not None}
    values |= dict(parse_assignment(text, KINDS) for text in extra)
    return Plan.from_flat(values)


def run_with_progress(
    data: VerticalData,
    plan: Plan,
    out: Path | None,
    *,
    quiet: bool,
    resume: bool = False,
    label: str = "training",
    callbacks: Sequence[Callback] = (),
    ray: str | None = None,
    profile: Path | None = None,
) -> Run:
    """Trains with a progress bar; Ctrl-C and a full disk leave a folder that can be resumed.

    Raises:
        Interrupted: By Ctrl-C.
        RunError: The disk is full.
    """
    from securevfl.federation import run as runs

    end_in_order()
    try:
        with progress_bar(label, quiet=quiet) as progress:
            return runs.train(
                data,
                plan,
                out,
                resume=resume,
                progress=progress,
                callbacks=callbacks,
                ray=ray,
                profile=profile,
            )
    except KeyboardInterrupt:
        raise Interrupted(f"interrupted; {_go_on(out)}") from None
    except (OSError, SecureVFLError) as error:
        if out is None or not is_full(error):
            raise
        what = f"{out}: {error.strerror}" if isinstance(error, OSError) else error
        raise RunError(f"{what}; free some space and {_go_on(out)}") from error


def _go_on(out: Path | None) -> str:
    """What is left to do; a run that released nothing leaves no folder."""
    if out is None or not (out / "plan.toml").is_file():
        return "run the same command again"
    return f"go on with: securevfl train --resume {out}"


def show_stack(console: Console, result: dict[str, Any]) -> None:
    """Which scores were opened beside training, and what the label holder chose to use by them."""
    for owner, opened in result.get("prediction", {}).items():
        console.print(
            f"apart from training, {owner} opened {opened['scores']:,} scores of records to "
            f"{', '.join(opened['observers'])}: no guarantee for those records",
            soft_wrap=True,
        )
    if stack := result.get("stack"):
        figures = {"cross-validated auc on them": stack["decided"][stack["used"]]}
        figures |= {} if stack["test"] is None else {"test auc": stack["test"]["auc"]}
        shown = ", ".join(f"{word} {number(value)}" for word, value in figures.items())
        console.print(
            f"the label holder uses {stack['used']}, decided on {stack['held_back']:,} records held back, "
            f"for which there is no guarantee: {shown}; its trees alone {number(stack['trees']['auc'])}",
            soft_wrap=True,
        )


def show_run(run: Run) -> None:
    """Prints what a run reached and what it promises."""
    from securevfl.settings.source import shown_data

    console = terminal()
    result = run.result
    measured = ", ".join(
        f"{name} {number(value)}" for name, value in result["test"].items() if value is not None
    )
    show_bad_news(console, result)
    on = shown_data(run.plan.source.data) or "data"
    console.print(f"{result['algorithm']} on {on}: test {measured or 'not evaluated'}")
    show_alone(console, result)
    for note in run.notes:
        console.print(f"note: {note}", markup=False)
    if result["privacy"]:
        console.print(privacy_table(result["privacy"], run.plan.delta))
    show_stack(console, result)
    if run.plan.insecure_reproducible_noise:
        console.print("noise is reproducible: every guarantee is VOID")
    console.print(f"labels {result['labels']}", soft_wrap=True)
    show_absences(console, result)
    if result["stopped"]:
        console.print(f"stopped by {result['stopped']}", markup=False)
    time = result["time"]
    console.print(
        f"virtual time {number(time['virtual'])}, {time['wall']:.1f} s, "
        f"{result['messages']:,} messages, {result['bytes']:,} bytes"
    )
    if run.folder is not None:
        console.print(f"files in {run.folder}", markup=False, soft_wrap=True)


def show_bad_news(console: Console, result: dict[str, Any]) -> None:
    """Begins with the bad news: nothing is promised, or the label holder does better alone."""
    from securevfl.algorithms import find_algorithm
    from securevfl.algorithms.alone import below_alone
    from securevfl.federation.run import warning_of

    below = below_alone(result) if find_algorithm(result["algorithm"]).federated else ""
    if words := warning_of(result) + below:
        console.print(words, markup=False, soft_wrap=True)


def show_alone(console: Console, result: dict[str, Any]) -> None:
    """What the label holder reaches alone."""
    if alone := result.get("alone"):
        kinds = {"linear": "linear", "trees": "boosted trees"}
        known = [f"{number(alone[kind])} {word}" for kind, word in kinds.items() if alone[kind] is not None]
        console.print(f"the label holder alone: {alone['metric']} {', '.join(known) or 'unknown'}")


def show_absences(console: Console, result: dict[str, Any]) -> None:
    """Says which parties are missing from how many sums."""
    for party, count in result.get("absent_rounds", {}).items():
        console.print(
            f"sums of training without {party}: {count:,}; the model took those steps without its part",
            markup=False,
            soft_wrap=True,
        )


def privacy_table(privacy: dict[str, dict[str, Any]], delta: float) -> Any:
    """What each owner promises to its worst observer."""
    shown = table("What is promised", "owner", "to", "mode", "releases", "mu", f"epsilon at delta {delta:g}")
    for owner, spend in privacy.items():
        shown.add_row(
            owner,
            spend["observer"],
            spend["mode"],
            f"{spend['releases']:,}",
            number(spend["mu"]),
            number(spend["epsilon"]) + ("" if spend["epsilon"] is not None else " (no guarantee)"),
        )
    return shown
