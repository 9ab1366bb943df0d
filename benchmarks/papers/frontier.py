"""The privacy-utility frontier: what every mode keeps at epsilon 0.5 to 8, what published settings promise.

python -m benchmarks.papers.frontier --data-folder DATA

Runs the sweeps that users can run themselves (`securevfl sweep --preset quick` and `--preset papers`), goes
on where an earlier session stopped, and writes their pictures and tables.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.papers.common import arguments, command, say, table, write
from securevfl.sweeps import Results, parse_sweep, preset, run_sweep
from securevfl.sweeps.summary import Group, data_sets, groups_of, kept_table, promise_table

FOLDER = Path("build/sweeps")
INTRO = (
    "Test AUC (one class against the rest, averaged, for several classes) against the sound epsilon "
    "at delta 1e-5, for the worst owner and observer. `strict`, `dp-encoder` and `frozen` let "
    "something out for every single record; their epsilon covers one party's features and no labels, "
    "which `strict` and `dp-encoder` expose through gradients. `sealed` opens only noisy totals; its "
    "epsilon covers features and label together. Grey: the best that is known at no more epsilon. "
    "Small sets stay hard for sealed training, because the noise of a total does not shrink with the "
    "number of records."
)
WHY = """\
## Why anybody should still release something per record

For accuracy under a promise, nobody should. In the tables below no mode that lets something out for every
record keeps any of what the other parties' columns are worth at epsilon 8 or less, but `frozen` on MNIST
(30 % at 8, where `sealed` keeps 98 %). The one place where it is ahead of `sealed`, digits at epsilon 0.5
and 1, is one where the label holder alone is ahead of both. Its epsilon covers one party's features, that
of `sealed` the label, too. On tables, [sealed scorecards](scorecards.md) are set beside boosted trees at
epsilon 0.25 to 8.

What speaks for releases per record is something else:

- **Comparison.** The papers' algorithms as they were published, and what their claims are worth.
- **Reuse.** A frozen release is paid for once, and any number of models may be made of it. Totals of a
  sealed run serve one model; only a profile serves a second one.
- **No lockstep.** Slow parties, lost ones, asynchronous steps: an opening of `sealed` waits for all
  members.
- **A model on top.** `sealed` adds up what the parties' models say, so it knows no interaction between
  columns of two parties; a head on embeddings may. No set here shows a gain of it under a promise, and
  [pair tables and random trees](scorecards.md#beyond-additive-models) had none.
- **No promise needed.** Inside one organisation, or where a contract does the work, `--unprotected`
  embeddings are exact.
"""
QUICK = (
    "From `securevfl sweep --preset quick --out DIR`: embedded data, 3 parties, 3 seeds; 7 minutes of "
    "processor time, shared by two workers."
)
PAPERS = (
    "From `securevfl sweep --preset papers --data-folder DATA --out DIR`, 25 minutes of processor "
    "time: a9a with 67 + 56 features and 3 seeds; Parkinson's speech, where columns have no public "
    "bounds and no sound mode applies; MNIST over 7 parties, one seed. No paper states a clip. To be "
    "accounted for at all, FDML's predictions are clipped to 5 and VAFL's embeddings to 10 here."
)


def swept(name: str, data_folder: Path) -> Results:
    """The finished sweep of a preset."""
    overrides = {"data_folder": str(data_folder.absolute())} if name == "papers" else {}
    sweep = parse_sweep(preset(name), source=f"preset {name}", overrides=overrides)
    return run_sweep(
        sweep, FOLDER / name, workers=2, progress=lambda now: say(f"{name}: {now.done} of {now.total}")
    )


def tables(groups: Sequence[Group]) -> list[str]:
    """What is kept, and what settings promise."""
    found = [made for made in (kept_table(groups), promise_table(groups)) if made is not None]
    return [f"{caption}.\n\n{table(head, rows)}" for caption, head, rows in found]


def sections(name: str, results: Results, out: Path, titles: Mapping[str, str]) -> list[str]:
    """A heading, a picture and tables for each data set."""
    parts = []
    for order, (data, groups) in enumerate(data_sets(groups_of(results)).items()):
        ending = f"-{order + 1}" if order else ""
        picture = f"frontier-{name}{ending}.png"
        shutil.copyfile(results.folder / "plots" / f"frontier{ending}.png", out / picture)
        parts += [
            f"## {titles.get(data, data)}",
            f"![Utility against sound epsilon]({picture})",
            *tables(groups),
        ]
    return parts


def main() -> None:
    """Runs both sweeps and writes the report."""
    chosen = arguments(__doc__ or "", "frontier")
    quick, papers = swept("quick", chosen.data_folder), swept("papers", chosen.data_folder)
    titles = {"parkinson": "Parkinson's speech", "mnist": "MNIST", "digits": "digits"}
    titles["synthetic:rows=3000,features=24,seed=0"] = "Synthetic, 3,000 records, 24 features"
    write(
        chosen.out / "frontier.md",
        [
            "# Privacy against utility",
            command("frontier", chosen.quick),
            INTRO,
            WHY.strip(),
            PAPERS,
            *sections("papers", papers, chosen.out, titles),
            QUICK,
            *sections("quick", quick, chosen.out, titles),
        ],
    )


if __name__ == "__main__":
    main()
