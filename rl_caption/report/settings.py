"""How a run was made: configuration, environment, command line, signature."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

import yaml

from rl_caption.report.folders import RunFolder
from rl_caption.report.markup import Markup, element, join, pairs


def settings_section(runs: Mapping[str, RunFolder]) -> Markup:
    """Signature, command line and versions of every run, with its configuration folded away."""
    parts = []
    for name, run in runs.items():
        parts += [element("h3", name)] if len(runs) > 1 else []
        parts.append(_one(run))
    return join(*parts)


def _one(run: RunFolder) -> Markup:
    env = run.env
    versions = {name: version for name, version in env.get("versions", {}).items() if version}
    values: dict[str, str] = {
        "folder": str(run.path),
        "signature": element("code", str(env.get("signature") or run.state.get("signature") or "none")),
    }
    if "command" in env:
        values["command"] = element("code", shlex.join(map(str, env["command"])))
    if "processes" in env:
        values["processes"] = str(env["processes"])
    if "python" in env:
        values["Python"] = f"{env['python']} on {env.get('platform', 'an unknown platform')}"
    values["packages"] = ", ".join(f"{name} {version}" for name, version in versions.items()) or "not recorded"
    if not run.config:
        return join(pairs(values), element("p", "There is no config.yaml.", class_="note"))
    text = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
    folded = element("details", element("summary", "Configuration, resolved"), element("pre", text), class_="block")
    return join(pairs(values), folded)
