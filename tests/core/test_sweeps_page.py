"""The table, the findings, the page and the pictures, on made-up records."""

from __future__ import annotations

import csv
import json
import math
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from sweep_helpers import TINY, invented, made_up

from securevfl.pages.charts import styles_for
from securevfl.sweeps.axis import EpsilonAxis, log_ticks
from securevfl.sweeps.charts import write_plots
from securevfl.sweeps.page import render
from securevfl.sweeps.records import failed_record, gain
from securevfl.sweeps.results import Results, time_to_target, write_tables
from securevfl.sweeps.spec import parse_sweep
from securevfl.sweeps.summary import groups_of, interval, kept_table, pareto, promise_table, sentences

SEVERAL = (
    TINY
    + """
[[point]]
label = "sealed </script><b>"
algorithm = "sealed"
grid = { epsilon = [1, 8], seed = [0, 1] }
[[point]]
label = "as published"
sigma = 0.1
[[point]]
algorithm = "local"
[[point]]
algorithm = "central"
[[point]]
epochs = 7
"""
)


@pytest.fixture
def results(tmp_path: Path) -> Results:
    """Two epsilons with two seeds each, a published setting, both baselines, and a failure."""
    points = parse_sweep(SEVERAL).points
    return made_up(
        tmp_path,
        SEVERAL,
        {
            0: invented(points[0], sound=1.0, auc=0.80),
            1: invented(points[1], sound=1.0, auc=0.82),
            2: invented(points[2], sound=7.9, auc=0.86),
            3: invented(points[3], sound=8.0, auc=0.88),
            4: invented(points[4], sound=5000.0, auc=0.9, claimed=12.0, mode="strict"),
            5: invented(points[5], sound=0.0, auc=0.7, attacks=[]),
            6: invented(points[6], sound=None, auc=0.91, attacks=[]),
            7: failed_record(points[7].id, "it <broke>\nhere"),
        },
    )


class Page(HTMLParser):
    """Collects what a test asks about."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.open: list[str] = []
        self.ids: list[str] = []
        self.marks: dict[str, int] = {}
        self.headings: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag == "a":
            self.links.append(given["href"] or "")
        if "id" in given:
            self.ids.append(given["id"] or "")
        for point in (given.get("data-ids") or "").split():
            self.marks[point] = self.marks.get(point, 0) + 1
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "th":
            self.headings.append(data)


def test_the_page_is_whole_and_asks_no_network(results: Results) -> None:
    text = render(results)
    page = Page(text)
    assert page.open == []
    assert re.findall(r"https?://[^\"'<\s]*", text) == []
    assert len(page.ids) == len(set(page.ids))  # charts do not take each other's clips and markers
    assert "</script><b>" not in text
    assert render(results) == text
    for row in results.finished:
        # once in the frontier and once in the table at least
        assert page.links.count(row["report"]) >= 2
        assert page.marks[row["id"]] >= 2  # what filters hide
    assert "it &lt;broke&gt; here" in text


def test_the_inline_data_holds_every_plan(results: Results) -> None:
    found = re.search(r'<script type="application/json" id="plans">(.*?)</script>', render(results), re.S)
    assert found is not None
    plans = json.loads(found[1])
    assert set(plans) == {row["id"] for row in results.finished}
    third = plans[results.rows[2]["id"]]
    facts = dict(third["facts"])
    assert (facts["algorithm"], facts["epsilon"], facts["sound ε"]) == ("sealed", "8.0", "7.9")
    own = {"variant": "sealed </script><b>", "algorithm": "sealed", "epsilon": "8.0", "seed": "0"}
    assert own.items() <= third["fields"].items()


def test_every_varied_field_is_a_filter(results: Results) -> None:
    text = render(results)
    found = re.findall(r'<select data-filter="(\w+)">(.*?)</select>', text, re.S)
    values = {name: re.findall("<option>(.*?)</option>", options) for name, options in found}
    # seven epochs are those of a point that failed, so nothing is left to choose from
    assert set(values) >= {"variant", "algorithm", "sigma", "epsilon", "seed", "attack"}
    assert not {"epochs", "protocol", "record_views"} & set(values)
    assert [value for value in values["epsilon"] if value in ("8.0", "1.0")] == ["1.0", "8.0"]
    assert values["algorithm"] == ["central", "local", "sealed", "vafl"]


def test_what_all_points_share_stands_above_the_table(results: Results) -> None:
    text = render(results)
    assert "The same in all rows: data synthetic:rows=60,features=4; protocol plain;" in text
    headings = Page(text).headings
    assert "seed" in headings and "sound ε" in headings and "protocol" not in headings


def test_fields_that_labels_do_not_stand_for_have_columns(tmp_path: Path) -> None:
    text = TINY + "[[point]]\nlabel = 'a'\nbatch = 8\ngrid = { embedding = [2, 3] }\n[[point]]\nlabel = 'b'\n"
    points = parse_sweep(text).points
    results = made_up(tmp_path, text, {number: invented(point) for number, point in enumerate(points)})
    headings = Page(render(results)).headings
    assert "embedding" in headings and "batch" not in headings


def test_series_differ_without_colour() -> None:
    styles = styles_for(f"series {number}" for number in range(8)).values()
    assert len({(style.marker, str(style.line)) for style in styles}) == 8


def test_an_empty_sweep_has_a_page_too(tmp_path: Path) -> None:
    nothing = made_up(tmp_path, SEVERAL, {})
    assert "No point has finished yet" in render(nothing)
    assert write_plots(nothing) == []
    write_tables(nothing)
    assert (tmp_path / "results.csv").read_text() == "point\n"


def test_one_point_without_figures(tmp_path: Path) -> None:
    point = parse_sweep(TINY).points[0]
    record = invented(point, test={"auc": None, "accuracy": None, "loss": None}, curve=[], attacks=[])
    assert "All points" in render(made_up(tmp_path, TINY, {0: record}))


def test_pictures_are_written_as_png_and_svg(results: Results) -> None:
    names = {path.name for path in write_plots(results)}
    stems = ("frontier", "claimed-sound", "attacks", "time-to-target")
    assert names == {f"{stem}.{kind}" for stem in stems for kind in ("png", "svg")}
    text = (results.folder / "plots" / "frontier.svg").read_text()
    assert {url.split("/")[2] for url in re.findall(r"https?://[^\"'<\s]*", text)} == {"www.w3.org"}
    assert "<a " not in text  # papers have nothing to link to
    assert (results.folder / "plots" / "frontier.png").read_bytes().startswith(b"\x89PNG")


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    text = TINY + "[[point]]\nlabel = '_a $b_{$ & 银行'\n[[point]]\nlabel = 'plain'\n"
    points = parse_sweep(text).points
    results = made_up(tmp_path, text, {number: invented(point) for number, point in enumerate(points)})
    write_plots(results)
    for drawn in (render(results), (tmp_path / "plots" / "frontier.svg").read_text()):
        assert re.search(r"<text[^>]*> _a \$b_\{\$ &amp; 银行</text>", drawn)


def test_groups_are_plans_without_seed(results: Results) -> None:
    groups = groups_of(results)
    assert [len(group.rows) for group in groups] == [2, 2, 1, 1, 1]
    first, second = groups[:2]
    assert first.mean == pytest.approx(0.81)
    assert first.low is None and first.high is None  # two seeds tell no interval
    assert second.epsilon == 8.0
    assert groups[3].series == "label holder alone"


def test_a_label_for_several_algorithms_names_them(tmp_path: Path) -> None:
    text = TINY + "[[point]]\nlabel = 'x'\ngrid = { algorithm = ['vafl', 'flex'] }\n"
    points = parse_sweep(text).points
    results = made_up(tmp_path, text, {number: invented(point) for number, point in enumerate(points)})
    assert [group.series for group in groups_of(results)] == ["x, vafl", "x, flex"]


def test_the_pareto_line_holds_what_nobody_beats(results: Results) -> None:
    line = pareto(groups_of(results))
    assert [(group.epsilon, round(group.mean or 0, 2)) for group in line] == [
        (0.0, 0.7),
        (1.0, 0.81),
        (8.0, 0.87),
        (5000.0, 0.9),
        (math.inf, 0.91),
    ]


def test_the_findings_are_stated(results: Results) -> None:
    groups = groups_of(results)
    made = kept_table(groups)
    assert made is not None
    _, head, rows = made
    assert head == ["way of training", "ε = 1", "ε = 8"]
    # (0.81 - 0.7) / (0.91 - 0.7) = 52 %
    assert rows[0][1].endswith("(52%)")
    promised = promise_table(groups)
    assert promised is not None
    assert [row[3:6] for row in promised[2]] == [["12", "5,000", "0.5"]]
    words = sentences(groups)
    assert words[-1] == "as published, sigma 2.5: the paper would claim epsilon 12; what holds is 5,000."
    for sentence in words[:2]:
        assert sentence.endswith("; above the label holder alone (0.700), on too few seeds to be sure.")
    assert "±" not in str(rows)


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        # s = 0.01, t = 4.30265 (two degrees of freedom), half 4.30265 * 0.01 / sqrt(3) = 0.025
        ((0.86, 0.87, 0.88), "auc 0.870 ± 0.025; better than the label holder alone (0.700)."),
        ((0.61, 0.81, 1.01), "auc 0.810 ± 0.497; not clearly better than the label holder alone (0.700)."),
    ],
)
def test_only_a_whole_interval_above_counts_as_better(
    tmp_path: Path, scores: tuple[float, ...], words: str
) -> None:
    text = (
        "data = 'wine'\nseed = [1, 2, 3]\n[[point]]\nepsilon = 1\n[[point]]\nalgorithm = 'local'\nseed = 1\n"
    )
    points = parse_sweep(text).points
    records = {number: invented(points[number], auc=score) for number, score in enumerate(scores)}
    records[3] = invented(points[3], auc=0.7, plan={**points[3].fields})
    assert sentences(groups_of(made_up(tmp_path, text, records)))[0].endswith(words)


def test_without_a_baseline_the_figures_of_the_runs_themselves_are_compared(tmp_path: Path) -> None:
    text = "data = 'wine'\nseed = [1, 2, 3]\nepsilon = 1\n"
    points = parse_sweep(text).points
    scores = ((0.86, 0.69), (0.87, 0.70), (0.88, 0.71))
    records = {
        number: invented(points[number], auc=auc) | {"alone": alone}
        for number, (auc, alone) in enumerate(scores)
    }
    (words,) = sentences(groups_of(made_up(tmp_path, text, records)))
    assert words.endswith("reaches auc 0.870 ± 0.025; better than the label holder alone (0.700).")


def test_a_page_names_files_without_their_folders(tmp_path: Path) -> None:
    text = f"data = '{tmp_path}/private place/data.toml'\nseed = [1, 2]\nepsilon = 1\n"
    points = parse_sweep(text).points
    records = {number: invented(point, auc=0.8) for number, point in enumerate(points)}
    page = render(made_up(tmp_path, text, records))
    assert "data.toml" in page and "private place" not in page


def test_what_is_worse_than_nothing_is_called_so(results: Results) -> None:
    points = results.sweep.points
    records = dict(results.records)
    for number in range(4):
        records[points[number].id] = invented(points[number], auc=0.6)
    words = sentences(groups_of(Results(sweep=results.sweep, folder=results.folder, records=records)))
    assert words[0].startswith("At epsilon 1 nothing beats the label holder alone (0.700)")


def test_infinite_and_unknown_in_the_table(results: Results) -> None:
    write_tables(results)
    with (results.folder / "results.csv").open(newline="") as file:
        central = list(csv.DictReader(file))[6]
    assert central["sound_epsilon"] == "inf"
    assert central["claimed_epsilon"] == ""
    assert not [name for name in central if "seconds" in name or "wall" in name]
    json.dumps(results.to_mapping(), allow_nan=False)


def test_time_to_target(results: Results) -> None:
    # the lowest loss is 0.4, so the target is 0.44: reached at the end of the second epoch
    assert results.targets[results.rows[0]["data"]].value == pytest.approx(0.44)
    assert results.rows[0]["time_to_target"] == 2.0
    sweep = parse_sweep(TINY + "[target]\nmetric = 'auc'\nvalue = 0.85\n")
    record = invented(sweep.points[0], auc=0.86)
    assert time_to_target(record, sweep.target) == 2.0
    assert time_to_target(invented(sweep.points[0], auc=0.84), sweep.target) is None


def test_attacks_are_compared_with_guessing() -> None:
    assert gain({"metric": "auc", "score": 0.75, "baseline": 0.5}) == 0.25
    assert gain({"metric": "mse", "score": 0.25, "baseline": 1.0}) == 0.75
    # an attacker whose error is small only because the features are
    assert gain({"metric": "mse", "score": 0.06, "baseline": 0.06}) == 0.0
    assert gain({"metric": "mse", "score": 0.0, "baseline": 0.0}) == 0.0


def test_intervals() -> None:
    assert interval([]) == (None, None, None)
    assert interval([0.5]) == (0.5, None, None)
    assert interval([0.5, 0.7]) == (0.6, None, None)
    # three values 1, 2, 3: s = 1, t = 4.30265, half width t / sqrt(3)
    assert interval([1, 2, 3]) == pytest.approx((2, 2 - 2.48414, 2 + 2.48414), abs=1e-5)


def test_axes_have_room_for_zero_and_infinity() -> None:
    axis = EpsilonAxis.around([0.0, 1.0, 100.0, math.inf])
    places = [axis(value) for value in (0.0, 1.0, 100.0, math.inf)]
    assert places == sorted(places)
    assert places[0] > 0 and places[-1] < 1
    labels = [text for _, text in axis.ticks()]
    assert (labels[0], labels[-1]) == ("0", "∞")
    assert EpsilonAxis.around([]).ticks()


def test_wide_gaps_are_moved_together() -> None:
    values = [0.5, 1.0, 8.0, 3e6, math.inf]
    plain = EpsilonAxis.around(values)
    broken = EpsilonAxis.around(values, broken=True)
    assert not plain.gaps() and len(broken.gaps()) == 1
    places = [broken(value) for value in (0.5, 1.0, 8.0, 20.0, 1e5, 3e6, math.inf)]
    assert places == sorted(places) and len(set(places)) == len(places)  # still in order, without jumps
    assert broken(8.0) < broken.gaps()[0] < broken(3e6)
    assert broken(8.0) - broken(0.5) > 2 * (plain(8.0) - plain(0.5))
    assert [text for _, text in broken.ticks()] == ["0.5", "1", "2", "4", "8", "3e6", "∞"]


@pytest.mark.parametrize(("low", "high"), [(0.5, 9), (1, 1e9), (1e-8, 1e12), (3, 3.1)])
def test_ticks_are_few_and_inside(low: float, high: float) -> None:
    ticks = log_ticks(low, high)
    assert len(ticks) <= 9
    assert all(low <= tick <= high for tick in ticks)


def test_parquet_has_stable_types(results: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    arrow: Any = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    write_tables(results)
    table = parquet.read_table(results.folder / "results.parquet")
    assert table.num_rows == 8
    assert table.schema.field("r2").type == arrow.float64()
    assert table.schema.field("stopped").type == arrow.string()
    assert table.column("sound_epsilon").to_pylist()[6] == math.inf


def test_templates_and_pictures_are_loaded_only_when_a_page_is_made() -> None:
    modules = "securevfl, securevfl.cli, securevfl.sweeps, securevfl.auditing, securevfl.auditing.page"
    code = f"import sys, {modules}; sys.exit(bool({{'jinja2', 'matplotlib'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
USE = """<script>
const heading = [...document.querySelectorAll(".points th")].find(th => th.textContent === "AUC");
heading.firstChild.click(); heading.firstChild.click();
const box = document.querySelector('[data-filter="epsilon"]');
box.value = "8.0"; box.dispatchEvent(new Event("change", {bubbles: true}));
const rows = [...document.querySelectorAll(".points tbody tr")];
document.title = JSON.stringify({
  order: rows.map(row => row.dataset.ids),
  rows: rows.filter(row => row.offsetHeight).map(row => row.dataset.ids),
  marks: [...document.querySelectorAll(".panel a.run:not(.hidden)")].map(mark => mark.dataset.ids),
  pareto: document.querySelector(".pareto path").getAttribute("d").split("H").length,
  width: document.documentElement.scrollWidth,
});
</script>"""


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
def test_the_table_sorts_and_filters_in_a_browser(results: Results, tmp_path: Path) -> None:
    (tmp_path / "sweep.html").write_text(render(results).replace("</body>", f"{USE}</body>"))
    flags = [
        "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync",
        "--disable-background-networking", "--disable-component-update", "--dump-dom",
    ]  # fmt: skip
    done = subprocess.run(
        [str(CHROMIUM), *flags, f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1280,900",
         (tmp_path / "sweep.html").as_uri()],
        capture_output=True, text=True, check=False, timeout=300,
    )  # fmt: skip
    found = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert found is not None, done.stderr
    seen = json.loads(found[1])
    best_first = sorted(results.finished, key=lambda row: -row["auc"])
    assert seen["order"] == [row["id"] for row in best_first]
    at_eight = {results.rows[2]["id"], results.rows[3]["id"]}
    assert set(seen["rows"]) == set(seen["marks"]) == at_eight
    assert seen["pareto"] == 1  # one mean is left
    assert seen["width"] <= 1280
