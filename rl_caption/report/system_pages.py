"""Reports of evaluations side by side, and of an ablation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rl_caption.evaluation.judge import JUDGE
from rl_caption.evaluation.table import COLUMNS, Column
from rl_caption.report.alarms import alarm_word
from rl_caption.report.chart import Series
from rl_caption.report.figure import figure
from rl_caption.report.folders import AblationFolder, EvaluationFolder, Member, RunFolder
from rl_caption.report.gallery import MAX_IMAGES, Gallery, gallery_data, reference_scores
from rl_caption.report.markup import Markup, element, join, table
from rl_caption.report.page import Page, Section
from rl_caption.report.panels import compared_curves
from rl_caption.report.settings import settings_section
from rl_caption.report.sources import Source, rows_of_config
from rl_caption.report.tables import (
    System,
    evaluation_notes,
    one_evaluation,
    over_seeds,
    systems_tables,
)

ALPHA_KEYS = ("CIDEr", "BLEU-4", "METEOR", "oracle/f1", "length/mean", "captions/repeated_ngrams")


def evaluations_page(
    evaluations: Mapping[str, EvaluationFolder], source: Source | None = None, images: int = MAX_IMAGES
) -> Page:
    """One or several evaluations: tables, and captions of the same images.

    Args:
        evaluations: name of a system -> what ``evaluate.py`` wrote; changes are against the first.
        source: references and images; None takes the data that an ablation noted, where one did.
        images: most images of the gallery.

    Raises:
        RewardError: a metric of the gallery failed.
    """
    source = source or _noted(next(iter(evaluations.values())))
    systems = {name: found.captions for name, found in evaluations.items() if found.captions}
    rows = [one_evaluation(found, name) for name, found in evaluations.items()]
    several = len(evaluations) > 1
    return Page(
        title=" / ".join(evaluations) if len(evaluations) < 4 else f"{len(evaluations)} systems",
        subtitle="Evaluations side by side" if several else "Evaluation of captions",
        tiles=[] if several else _tiles(rows[0]),
        sections=[Section("Results", join(systems_tables(rows), evaluation_notes(evaluations)))],
        gallery=_captions(systems, source, images, ""),
    )


def ablation_page(ablation: AblationFolder, source: Source | None = None, images: int = MAX_IMAGES) -> Page:
    """A grid of rewards: means over seeds, alpha against metrics, curves, captions of the first seed of each system.

    Args:
        ablation, source, images: as for ``evaluations_page``.
    """
    groups: dict[str, list[Member]] = {}
    for member in ablation.members:
        groups.setdefault(member.system, []).append(member)
    rows = [over_seeds(name, [member.evaluation for member in found]) for name, found in groups.items()]
    first = {name: found[0].evaluation for name, found in groups.items()}
    source = source or (_noted(next(iter(first.values()))) if first else Source())
    runs = {name: [member.run for member in found if member.run is not None] for name, found in groups.items()}
    runs = {name: found for name, found in runs.items() if found}
    missing = [element("p", f"Missing: {text}") for text in ablation.missing]
    warning = element("div", *missing, class_="verdict alarm") if missing else Markup("")
    return Page(
        title=ablation.name,
        subtitle="Ablation: rewards side by side",
        tiles=_ablation_tiles(rows, [run for found in runs.values() for run in found]),
        sections=[
            Section("Results", join(warning, systems_tables(rows), evaluation_notes(first))),
            Section("Monitor", _alarms(runs)),
            Section("Alpha", _alpha(groups)),
            Section("Curves", compared_curves(runs)),
        ],
        gallery=_captions(
            {name: found.captions for name, found in first.items()}, source, images, "One seed of each system."
        ),
        after=[Section("Settings", settings_section({name: found[0] for name, found in runs.items()}))],
    )


def _captions(systems: Mapping[str, Mapping[str, str]], source: Source, images: int, note: str):
    systems = {name: captions for name, captions in systems.items() if captions}
    if not systems:
        return None
    if len(systems) > 1:
        note = f"{note} Words that {next(iter(systems))} did not say are marked.".strip()
    return gallery_data(Gallery(systems, reference_scores(systems, source.rows), source, note), images)


def _noted(evaluation: EvaluationFolder) -> Source:
    return rows_of_config(evaluation.settings.get("data"), evaluation.settings.get("split", "test"))


def _tiles(system: System) -> Sequence[tuple[str, str, str]]:
    wanted = [key for key in ("CIDEr", "BLEU-4", "METEOR", "SPICE") if key in system.cells]
    tiles = [(f"{key} (x100)", f"{100 * system.cells[key].value:.2f}", "") for key in wanted]
    return [("captions", system.note.split()[0], ""), *tiles]


def _ablation_tiles(rows: Sequence[System], runs: Sequence[RunFolder]) -> Sequence[tuple[str, str, str]]:
    tiles = [("systems", str(len(rows)), f"{len(runs)} runs")]
    for key in ("CIDEr", "METEOR", "oracle/f1"):
        scored = [row for row in rows if key in row.cells]
        if scored:
            best = max(scored, key=lambda row: row.cells[key].value)
            column = COLUMNS[key]
            value = f"{best.cells[key].value * column.factor:.{column.decimals}f}"
            tiles.append(
                (f"highest {column.heading}", best.name, value if "%" in column.heading else f"{value} (x100)")
            )
    watched = [run for run in runs if run.series("hacking/alarm")]
    if watched:
        alarmed = sum(bool(run.alarms) for run in watched)
        tiles.append(("runs with an alarm", f"{alarmed} of {len(watched)}", "signs of reward hacking"))
    return tiles


def _alarms(runs: Mapping[str, Sequence[RunFolder]]) -> Markup:
    rows = []
    for name, seeds in runs.items():
        words = [alarm_word(run) for run in seeds]
        alarmed = sum(bool(run.alarms) for run in seeds)
        first = min((run.alarms[0] for run in seeds if run.alarms), default=None)
        watched = any(word != "not watched" for word in words)
        count = f"{alarmed} of {len(seeds)}" if watched else "not watched"
        rows.append([name, count, "none" if first is None else f"step {first}"])
    caption = "Runs whose reward rose while their captions got worse, by the monitor of reward hacking"
    return table(["system", "runs with an alarm", "earliest"], rows, caption) if rows else Markup("")


def _alpha(groups: Mapping[str, Sequence[Member]]) -> Markup:
    """Charts of alpha against metrics; empty where no cell has an alpha."""
    cells = [(found[0].alpha, name) for name, found in groups.items() if found[0].alpha is not None]
    if len(cells) < 2:
        return Markup("")
    rows = {name: over_seeds(name, [member.evaluation for member in found]) for name, found in groups.items()}
    bases = list(dict.fromkeys(_base(name) for _, name in cells))
    keys = list(dict.fromkeys(key for system in rows.values() for key in system.cells))
    charts = []
    for key in [*filter(keys.__contains__, ALPHA_KEYS), *(key for key in keys if key.startswith(JUDGE))]:
        column = COLUMNS.get(key, Column(key.removeprefix(JUDGE), 1.0, 4))
        series = []
        for index, base in enumerate(bases):
            here = [(alpha, rows[name].cells) for alpha, name in sorted(cells) if _base(name) == base]
            found = [(alpha, cell[key]) for alpha, cell in here if key in cell]
            if not found:
                continue
            points = [(alpha, column.factor * cell.value) for alpha, cell in found]
            errors = [column.factor * (cell.deviation or 0.0) for _, cell in found]
            series.append(Series(base or "mean over seeds", points, index, True, errors))
            starts = [name for name, members in groups.items() if members[0].seed is None and _base(name) == base]
            if starts and key in rows[starts[0]].cells:
                value = column.factor * rows[starts[0]].cells[key].value
                series.append(Series(starts[0], [(points[0][0], value), (points[-1][0], value)], 3))
        title = f"{column.heading} (x100)" if column.factor == 100 and "%" not in column.heading else column.heading
        charts.append(figure(title, series, x_name="alpha"))
    note = "Dots are means over seeds, bars one standard deviation; the dashed line is the starting policy."
    return join(element("p", note, class_="note"), element("div", *charts, class_="charts"))


def _base(system: str) -> str:
    return system.rpartition("/")[0]
