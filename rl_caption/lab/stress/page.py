"""The report of a stress test: a verdict in words, tables and charts, as Markdown and as one HTML page."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from importlib import resources
from typing import Any

import yaml
from markupsafe import Markup

from rl_caption.data.base import Row
from rl_caption.data.plain_files import single_spaced
from rl_caption.evaluation.results import LEFT_OUT, difference_rows, markdown
from rl_caption.lab.stress.sampling import SCENE_GOLD
from rl_caption.monitoring.probes import PROBES
from rl_caption.programs.report.charts import Series, figure, macros, number
from rl_caption.programs.report.gallery import gallery, source_of
from rl_caption.programs.report.pages import Cell, Page

Results = Mapping[str, Any]
"""``stress.json``."""
Table = tuple[list[str], list[list[str]], str]
"""Head, lines and a note."""
EXPLOITS = 30
"""Most exploits that the page shows."""
REFERENCE = "reference.json"
KNOWN_SAMPLES = 64
LEAST_GAIN = 0.425
"""Share of the possible gain at the best of these samples; rewards below ruined captions (docs/results_stress.md)."""
WORSE = 0.05
"""Fall of gold from which on captions got worse (docs/hacking.md)."""
ERRORS = "no threshold carries over: with one from other rewards, 17 to 70 % of harmless rewards were called harmful"
"""The errors of probes, best of n and push in docs/results_stress.md."""


def reference_table() -> dict[str, Any]:
    """The known rewards that the package ships: ``command``, ``note``, and ``rewards``, name -> ``summary``."""
    content: dict[str, Any] = json.loads(
        resources.files(__package__).joinpath(REFERENCE).read_text(encoding="utf-8")
    )
    return content


def verdict(results: Results) -> str:
    """One sentence: what training on the reward will do to captions, by what evidence, and how sure that is."""
    if results["constant"]:
        return (
            "This reward gave every caption the same score: it is constant here, and says nothing."
        )
    if "best_of_n" not in results:
        tested, sound, wrong, _ = _probe_groups(results["probes"])
        return (
            f"This reward orders {len(sound)} of {len(tested)} kinds of pairs better than chance and {len(wrong)} "
            "worse (95 % intervals); without a captioner, nothing says how far training would push it."
        )
    name, curve = next(iter(results["best_of_n"]["gold"].items()))
    choice = _choice(results["best_of_n"])
    if name != SCENE_GOLD:
        verb = (
            "hurts"
            if curve["turns"]
            else "helps"
            if curve["change_interval"][0] > 0
            else "does not help"
        )
        return (
            f"Choosing among samples by this reward {verb}: {choice}; training on it was not tried and may still ruin "
            "captions, as no threshold of this test carries over from other rewards."
        )
    lead = {
        True: "Training on this reward will probably make captions worse",
        False: "Training on this reward will probably do captions little harm",
        None: "It is open whether training on this reward makes captions worse",
    }[is_harmful(results)]
    training = ""
    if results.get("push"):
        free = _without_penalty(results["push"])
        changes = _changes(free)
        span = f"{_span(_short(min(changes)), _short(max(changes)))}, {len(free)} seeds"
        sure = span if len(free) > 1 else "one seed"
        training = f", and {free[0]['step'][-1]} steps of training change that score by {_short(_mean(changes))} ({sure})"
    return f"{lead}: {choice}{training}; but {ERRORS}."


def is_harmful(results: Results) -> bool | None:
    """Whether training on the reward will probably make captions worse; None where parts disagree or cannot say."""
    best = results.get("best_of_n")
    if results["constant"] or best is None or SCENE_GOLD not in best["gold"]:
        return None
    signs = {_chooses_badly(best)}
    if results.get("push"):
        signs.add(_mean(_changes(_without_penalty(results["push"]))) < -WORSE)
    return signs.pop() if len(signs) == 1 else None


def details(results: Results) -> list[str]:
    """Sentences on what the parts of the test found, beside the verdict."""
    if results["constant"]:
        return []
    sentences = _best_of_n_details(results["best_of_n"]) if "best_of_n" in results else []
    if results.get("push"):
        sentences.append(_push_details(results["push"]))
    return [*sentences, _probe_details(results["probes"])]


def _choice(best: Mapping[str, Any]) -> str:
    """What the best of all samples is worth."""
    name, curve = next(iter(best["gold"].items()))
    if curve["turns"]:
        span = _span(*(f"{end:.3f}" for end in curve["fall_interval"]))
        fall = f"{curve['fall']:.3f} (95 % interval {span})"
        return f"with the best of n samples by it, {name} falls by {fall} from n = {curve['peak']} to {best['n'][-1]}"
    if curve["lost"] is None:
        return f"the best of {best['n'][-1]} samples by it cannot be told from any other by {name}"
    gain, *interval = (
        f"{100 * (1 - lost):.0f}" for lost in (curve["lost"], *reversed(curve["lost_interval"]))
    )
    span = f"95 % interval {_span(*interval)} %"
    score = "truth (the oracle's score, 0 to 1)" if name == SCENE_GOLD else name
    return f"the best of {best['n'][-1]} samples by it gains {gain} % ({span}) of what could be gained in {score}"


def _chooses_badly(best: Mapping[str, Any]) -> bool | None:
    """Whether the choice by the reward is of the known rewards that ruined captions; None where that is not known."""
    curve = next(iter(best["gold"].values()))
    if curve["turns"] or curve["change_interval"][0] <= 0:
        return True
    if best["n"][-1] != KNOWN_SAMPLES or curve["lost"] is None:
        return None
    return bool(1 - curve["lost"] < LEAST_GAIN)


def _without_penalty(runs: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The runs with the smallest KL penalty, which is none."""
    least = min(run["factor"] for run in runs)
    return [run for run in runs if run["factor"] == least]


def _changes(runs: Sequence[Mapping[str, Any]]) -> list[float]:
    """Gold at the end of each run, less that at its start."""
    return [run["gold"][-1] - run["gold"][0] for run in runs]


def _best_of_n_details(best: Mapping[str, Any]) -> list[str]:
    name, curve = next(iter(best["gold"].items()))
    change = f"{_with_sign(curve['change'])} (95 % interval {_span(*map(_with_sign, curve['change_interval']))})"
    sentences = [f"From one sample to the best of {best['n'][-1]}, {name} changes by {change}."]
    if name == SCENE_GOLD and best["n"][-1] == KNOWN_SAMPLES:
        sentences.append(
            f"Known rewards with less than {100 * LEAST_GAIN:g} % of the possible gain made captions clearly worse in "
            "training, those with more hardly; that cut was read from these rewards."
        )
    return sentences


def _push_details(runs: Sequence[Mapping[str, Any]]) -> str:
    free = _without_penalty(runs)
    falls = _mean(max(run["gold"]) - run["gold"][-1] for run in free)
    alarms = [run["alarms"][0] for run in free if run["alarms"]]
    alarm = (
        f"the first alarm of the monitor came at step {min(alarms)}"
        if alarms
        else "the monitor raised no alarm"
    )
    return f"In training without a KL penalty, gold ends {number(falls)} below its best; {alarm}."


def _probe_groups(probes: Mapping[str, Any]) -> tuple[list[str], list[str], list[str], list[str]]:
    """Probes with pairs; those ordered better than chance, worse than chance, and mostly with equal scores."""
    tested = {name: result for name, result in probes.items() if result["interval"]}
    sound = [name for name, result in tested.items() if result["interval"][0] > 0.5]
    blind = [name for name, result in tested.items() if result["tied"] > 0.5]
    wrong = [
        name for name, result in tested.items() if result["interval"][1] < 0.5 and name not in blind
    ]
    return list(tested), sound, wrong, blind


def _probe_details(probes: Mapping[str, Any]) -> str:
    tested, sound, wrong, blind = _probe_groups(probes)
    return (
        f"Of {len(tested)} probes, the reward orders {len(sound)} better than chance. It prefers the worse caption in "
        f"{', '.join(wrong) or 'none'}; it gives both mostly equal scores in {', '.join(blind) or 'none'}."
    )


def summary(results: Results) -> dict[str, Any]:
    """The numbers by which rewards are put side by side; None what was not computed.

    ``probes``: mean over the probes of the share of pairs in the right order. ``change``, ``peak``, ``fall``: gold of
    the best of n samples (``monitoring.best_of_n.Curve``). ``push_change``, ``push_alarm``: gold after training without
    a KL penalty less that before, and the step of the first alarm.
    """
    line: dict[str, Any] = dict.fromkeys(
        ("change", "change_interval", "peak", "fall", "fall_interval")
    )
    line["probes"] = _mean(
        result["right"] for result in results["probes"].values() if result["right"] is not None
    )
    if "best_of_n" in results:
        curve = next(iter(results["best_of_n"]["gold"].values()))
        line |= {
            key: curve[key]
            for key in ("change", "change_interval", "peak", "fall", "fall_interval")
        }
    free = [run for run in results.get("push", []) if run["factor"] == 0]
    line["push_change"] = _mean(run["gold"][-1] - run["gold"][0] for run in free) if free else None
    line["push_alarm"] = min((step for run in free for step in run["alarms"][:1]), default=None)
    return line


def stress_report(results: Results) -> str:
    """The report as Markdown."""
    lines = [f"# Stress test of {results['signature']}", "", f"**{verdict(results)}**", ""]
    lines += [f"- {sentence}" for sentence in details(results)]
    for heading, (head, rows, note) in _tables(results).items():
        lines += ["", f"## {heading}", "", markdown(head, rows), "", note]
        if heading == "Probes":
            lines += _probe_examples(results["probes"])
    return "\n".join(lines)


def stress_page(results: Results, rows: Sequence[Row]) -> Page:
    """The report as a page. ``rows`` are those of the test, for the pictures of exploits."""
    tables = {
        heading: macros().table(note, head, [[Cell(text) for text in line] for line in lines])
        for heading, (head, lines, note) in _tables(results).items()
    }
    look = "verdict alarm" if is_harmful(results) else "verdict"
    opening = Markup('<div class="{}"><p><strong>{}</strong></p></div>').format(
        look, verdict(results)
    )
    sections: dict[str, Markup] = {"Verdict": opening + _list(details(results))}
    for heading in (
        "Best of n",
        "Push",
        "Mixtures",
        "Exploits",
        "Comparison",
        "Probes",
        "Known rewards",
    ):
        sections[heading] = _charts(heading, results) + tables.get(heading, Markup(""))
        if heading == "Exploits":
            sections[heading] += _exploit_gallery(results, rows)
        if heading == "Probes":
            sections[heading] += macros().folded(
                "Pairs that the reward orders worst", _list(_probe_examples(results["probes"])[3:])
            )
    config = yaml.safe_dump(dict(results["config"]), sort_keys=False, allow_unicode=True)
    seconds = [[stage, f"{value:.1f}"] for stage, value in results["seconds"].items()]
    sections["Settings"] = macros().table(
        "Time of each stage", ["stage", "seconds"], seconds
    ) + macros().folded("Configuration", Markup("<pre>{}</pre>").format(config))
    return Page(f"Stress test of {_title(results)}", results["signature"], sections)


def _title(results: Results) -> str:
    """The terms of the reward, with their weights where these are not 1."""
    terms = results["config"]["reward"]["terms"]
    return " + ".join(
        name if term["weight"] == 1 else f"{term['weight']:g} {name}"
        for name, term in terms.items()
    )


def _list(lines: Sequence[str]) -> Markup:
    items = Markup("").join(Markup("<li>{}</li>").format(line.removeprefix("- ")) for line in lines)
    return Markup("<ul>{}</ul>").format(items)


def _tables(results: Results) -> dict[str, Table]:
    """Heading -> table, of what was computed, in the order of the report."""
    tables: dict[str, Table] = {}
    if "best_of_n" in results:
        tables["Best of n"] = _best_of_n_table(results["best_of_n"])
    if results.get("push"):
        tables["Push"] = _push_table(results["push"])
    if results.get("mixing"):
        tables["Mixtures"] = _mixing_table(results["mixing"])
    if results.get("exploits"):
        tables["Exploits"] = _exploit_table(results["exploits"])
    if results.get("comparison"):
        tables["Comparison"] = _comparison_table(results["comparison"])
    tables["Probes"] = _probe_table(results["probes"], results["images"])
    tables["Known rewards"] = _known_table(results)
    return tables


def _best_of_n_table(best: Mapping[str, Any]) -> Table:
    curves = {"reward": best["reward"], **best["gold"]}
    lines = [
        [str(n), f"{best['kl'][at]:.2f}"]
        + [
            f"{number(curve['mean'][at])} ({_span(number(curve['low'][at]), number(curve['high'][at]))})"
            for curve in curves.values()
        ]
        for at, n in enumerate(best["n"])
    ]
    note = (
        f"Of n samples, the one with the highest reward: {best['images']} images, {best['samples']} samples each. KL: "
        "log n - (n - 1) / n, nats a caption. Means, with 95 % bootstrap intervals over images."
    )
    return ["n", "KL", *curves], lines, note


def _push_table(runs: Sequence[Mapping[str, Any]]) -> Table:
    lines = []
    for run in runs:
        kl = [value for value in run["kl"] if value is not None]
        first, last = (
            run["statistics"],
            {key: values[-1] for key, values in run["statistics"].items()},
        )
        lines.append(
            [
                f"{run['kl_coef']:g} ({run['factor']:g} sd)",
                str(run["seed"]),
                f"{number(run['reward'][0])} → {number(run['reward'][-1])}",
                f"{number(run['gold'][0])} → {number(run['gold'][-1])}",
                f"{number(max(run['gold']))}, step {run['step'][run['gold'].index(max(run['gold']))]}",
                f"{kl[-1]:.3f}" if kl else LEFT_OUT,
                f"step {run['alarms'][0]}" if run["alarms"] else "none",
                *(f"{number(first[key][0])} → {number(last[key])}" for key in first),
            ]
        )
    head = ["KL coefficient", "seed", "reward", "gold", "best gold", "KL", "first alarm"]
    head += ["length, words", "length / references", "repeated bigrams, share", "vocabulary, words"]
    note = (
        f"Self-critical training for {runs[0]['step'][-1]} steps, start → end, greedy captions of validation images. "
        "sd: the reward's standard deviation among the samples of an image. KL: to the starting policy, nats a token."
    )
    return head, lines, note


def _mixing_table(mixtures: Sequence[Mapping[str, Any]]) -> Table:
    lines = [
        [
            mixture["other"],
            f"{mixture['weight']:g}",
            mixture["normalize"],
            number(mixture["gold"]),
            f"{_with_sign(mixture['gain'])} ({_span(*map(_with_sign, mixture['gain_interval']))})",
        ]
        for mixture in mixtures
    ]
    note = (
        "The weight of another reward, beside 1 less that of this one, with the most gold at the best of all samples. "
        "Chosen on one half of the images, gold measured on the other; gain: against this reward alone."
    )
    return ["other reward", "its weight", "normalize", "gold", "gain"], lines, note


def _exploit_table(exploits: Mapping[str, Any]) -> Table:
    lines = [
        [
            kind,
            str(len(edits)),
            _with_sign(_mean(edit["reward"][1] - edit["reward"][0] for edit in edits)),
            _with_sign(_mean(edit["gold"][1] - edit["gold"][0] for edit in edits)),
            edits[0]["before"],
            edits[0]["after"],
        ]
        for kind, edits in _by_edit(exploits["edits"]).items()
    ]
    note = (
        f"Edits of captions that raise the reward while gold falls: {len(exploits['edits'])} of {exploits['images']} "
        "images have one. reward, gold: mean changes. The worst of each edit."
    )
    return ["edit", "images", "reward", "gold", "caption", "exploit"], lines, note


def _by_edit(edits: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for edit in edits:
        kinds.setdefault(edit["edit"], []).append(edit)
    return dict(sorted(kinds.items(), key=lambda item: -len(item[1])))


def _comparison_table(comparison: Mapping[str, Any]) -> Table:
    printed = difference_rows(comparison["differences"])
    lines = [
        [heading, *(value.replace("-", "−") for value in values)] for heading, *values in printed
    ]
    note = (
        f"second: {comparison['second']}. Difference: second minus first, on the same captions. Interval: paired "
        "bootstrap over images; p: two-sided approximate randomisation, not corrected for the number of lines."
    )
    return ["", "first", "second", "difference", "95 % interval", "p"], lines, note


def _probe_table(probes: Mapping[str, Any], images: int) -> Table:
    lines = []
    for name, result in probes.items():
        if result["right"] is None:
            lines.append([name, PROBES[name], "0", "does not apply", "", "", ""])
            continue
        low, high = result["interval"]
        effect = "" if result["effect"] is None else f"{result['effect']:+.2f}"
        shares = [
            f"{100 * result['right']:.1f}",
            f"{100 * low:.1f} to {100 * high:.1f}",
            f"{100 * result['tied']:.1f}",
        ]
        lines.append([name, PROBES[name], str(result["pairs"]), *shares, effect])
    note = (
        f"{images} images, at most one pair each. right: the better caption scores higher, equal scores do not count; "
        "Wilson's interval. effect: mean difference over its standard deviation."
    )
    return (
        ["probe", "the worse caption", "pairs", "right, %", "95 % interval", "equal, %", "effect"],
        lines,
        note,
    )


def _probe_examples(probes: Mapping[str, Any]) -> list[str]:
    lines = ["", "Pairs that the reward orders worst:", ""]
    for name, result in probes.items():
        wrong = [
            one for one in result["examples"] if one["score_of_better"] <= one["score_of_worse"]
        ]
        lines += [
            f"- {name}, {one['image_id']}: {one['score_of_better']:.4g} for “{single_spaced(one['better'])}”, "
            f"{one['score_of_worse']:.4g} for “{single_spaced(one['worse'])}”"
            for one in wrong
        ]
    return lines if len(lines) > 3 else []


def _known_table(results: Results) -> Table:
    table = reference_table()
    lines = [
        _known_line(name, line)
        for name, line in {"this reward": summary(results), **table["rewards"]}.items()
    ]
    head = [
        "reward",
        "probes, % right",
        "best of n",
        "highest at n",
        "then falls by",
        "push",
        "first alarm",
    ]
    note = (
        f"{table['note']} Made by {table['command']}. Changes of gold: best of n, from one sample to the best of all "
        "by the reward; push, by training. In brackets 95 % intervals."
    )
    return head, lines, note


def _known_line(name: str, line: Mapping[str, Any]) -> list[str]:
    def format_value(key: str, form: Callable[[float], str]) -> str:
        interval = line.get(f"{key}_interval")
        text = LEFT_OUT if line.get(key) is None else form(line[key])
        return f"{text} ({_span(*map(form, interval))})" if interval else text

    alarm = LEFT_OUT if line.get("push_change") is None else "none"
    seeds = f" ({line['seeds']} seeds, {line['runs']} of training)" if "seeds" in line else ""
    return [
        name + seeds,
        format_value("probes", lambda share: f"{100 * share:.1f}"),
        format_value("change", _with_sign),
        format_value("peak", str),
        format_value("fall", number),
        format_value("push_change", _with_sign),
        alarm if line.get("push_alarm") is None else f"step {line['push_alarm']}",
    ]


def _charts(heading: str, results: Results) -> Markup:
    """The charts of a section; empty where there are none."""
    if heading == "Best of n" and "best_of_n" in results:
        best = results["best_of_n"]
        curves, kl = (
            {"reward": best["reward"], **best["gold"]},
            [round(value, 2) for value in best["kl"]],
        )
        figures = [
            figure(
                f"{name}, 0 to 1" if name == SCENE_GOLD else name,
                [_curve(name, kl, curve, at > 0)],
                x_name="KL",
            )
            for at, (name, curve) in enumerate(curves.items())
        ]
        return macros().note(
            "Across: KL divergence of best of n, nats; bars are 95 % intervals."
        ) + macros().charts(figures)
    if heading == "Push" and results.get("push"):
        factors = sorted({run["factor"] for run in results["push"]})
        titles = {
            "reward": ("Reward", ""),
            "gold": ("Gold", "0 to 1"),
            "length": ("Length", "words"),
        }
        titles |= {
            "repeated_ngrams": ("Repeated bigrams", "share"),
            "vocabulary": ("Vocabulary", "different words"),
        }
        figures = []
        for key, (title, unit) in titles.items():
            lines = []
            for colour, factor in enumerate(factors):
                runs = [run for run in results["push"] if run["factor"] == factor]
                ys = [run[key] if key in run else run["statistics"][key] for run in runs]
                points = [
                    (x, _mean(values)) for x, *values in zip(runs[0]["step"], *ys, strict=True)
                ]
                lines.append(Series(f"KL {factor:g} sd", points, colour, dots=True))
            figures.append(figure(f"{title}, {unit}" if unit else title, lines))
        note = (
            "Across: optimizer steps; dots are validations, means over seeds. KL: coefficient of the penalty, in sd, "
            "the reward's standard deviation among the samples of an image."
        )
        return macros().note(note) + macros().charts(figures)
    return Markup("")


def _curve(name: str, xs: Sequence[float], curve: Mapping[str, Any], is_gold: bool) -> Series:
    halves = [(high - low) / 2 for low, high in zip(curve["low"], curve["high"], strict=True)]
    points = list(zip(xs, curve["mean"], strict=True))
    return Series(name, points, int(is_gold), dots=True, errors=dict(zip(xs, halves, strict=True)))


def _exploit_gallery(results: Results, rows: Sequence[Row]) -> Markup:
    """The worst exploits, one of each image, with pictures and both scores."""
    exploits = results.get("exploits")
    if not exploits or not exploits["edits"]:
        return Markup("")
    by_image: dict[str, Mapping[str, Any]] = {}
    for edit in exploits["edits"]:
        by_image.setdefault(edit["image_id"], edit)
    worst = dict(list(by_image.items())[:EXPLOITS])
    systems = {
        name: {image_id: edit[key] for image_id, edit in worst.items()}
        for name, key in (("caption", "before"), ("exploit", "after"))
    }
    scores = {
        score: {
            name: {image_id: edit[score][at] for image_id, edit in worst.items()}
            for at, name in enumerate(systems)
        }
        for score in ("reward", "gold")
    }
    chosen = [row for row in rows if row["image_id"] in worst]
    data = gallery(
        systems,
        scores,
        source_of(chosen),
        "Words that the caption did not have are marked.",
        EXPLOITS,
    )
    return macros().gallery(data)


def _mean(values: Any) -> float:
    numbers = list(values)
    return math.fsum(numbers) / len(numbers)


def _with_sign(value: float) -> str:
    return ("+" if value > 0 else "") + number(value)


def _short(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")


def _span(low: str, high: str) -> str:
    return f"{low} to {high}"
