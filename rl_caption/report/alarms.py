"""What the monitor of reward hacking found, in plain language."""

from __future__ import annotations

from rl_caption.report.folders import RunFolder
from rl_caption.report.markup import Markup, element, join


def monitor_section(run: RunFolder) -> Markup:
    """Alarms with their evidence, or that there was none; empty for a run without a monitor."""
    watched = run.series("hacking/alarm")
    if not watched:
        return Markup("")
    count = f"{len(watched)} validation{'s' if len(watched) != 1 else ''}"
    if not run.alarms:
        text = (
            f"At each of {count} the monitor compared the captions with those of the starting policy, with the "
            "references and by judges that are not in the reward. It found no sign that the reward is being hacked."
        )
        return element("div", element("p", element("strong", "No alarm. "), text), class_="verdict quiet")
    first = run.alarms[0]
    lines = [
        element("p", element("strong", f"Signs of reward hacking from step {first}. "), _meaning(run, first)),
        _evidence(run),
        element("p", f"Alarm at {len(run.alarms)} of {count}: {_steps(run.alarms)}."),
        element("p", _advice(run, first)),
    ]
    return element("div", *lines, class_="verdict alarm", role="note")


def _meaning(run: RunFolder, step: int) -> str:
    values = dict(run.series("val/reward"))
    began = next(iter(values.values()), None)
    rose = f" rose from {began:.4g} to {values[step]:.4g}" if began is not None and step in values else " rose"
    return f"The reward{rose} on the validation images, but the captions got worse:"


def _evidence(run: RunFolder) -> Markup:
    alarm = run.state.get("notes", {}).get("hacking", {}).get("first_alarm")
    if not alarm or not alarm.get("evidence"):
        return element("p", "The evidence is in the log of the run.")
    return element("ul", *(element("li", f"{text[:1].upper()}{text[1:]}.") for text in alarm["evidence"]))


def _steps(steps: list[int]) -> str:
    if len(steps) <= 8:
        return ", ".join(f"step {step}" for step in steps)
    return f"from step {steps[0]} to step {steps[-1]}"


def _advice(run: RunFolder, first: int) -> str:
    best = run.state.get("best_step")
    stopped = run.state.get("stopped")
    parts = [f"The run was ended there: {stopped}."] if stopped else []
    if best is not None:
        when = "before" if best < first else "at or after"
        parts.append(f"export/best is the policy of step {best}, {when} the first alarm.")
    parts.append("Read the captions below before believing the reward or the judges.")
    return " ".join(parts)


def alarm_word(run: RunFolder) -> str:
    """``none``, ``from step N``, or that nobody watched."""
    if not run.series("hacking/alarm"):
        return "not watched"
    return f"from step {run.alarms[0]}" if run.alarms else "none"


def verdicts(runs: dict[str, RunFolder]) -> Markup:
    """The monitor's findings of several runs."""
    found = {name: monitor_section(run) for name, run in runs.items()}
    return join(*(join(element("h3", name), section) for name, section in found.items() if section))
