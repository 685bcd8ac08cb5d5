"""The report as one page of HTML that needs nothing else: no scripts, and no resources from anywhere."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib import resources

from kvcore_conformance.report.events import interleaved
from kvcore_conformance.report.markdown import facts
from kvcore_conformance.report.model import Check, Report, RuleResult, Story

POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def page(report: Report) -> str:
    """The whole page."""
    title = escape(f"{report.about.backend} and the kvcore transfer contract {report.about.contract}")
    style = resources.files("kvcore_conformance.report").joinpath("page.css").read_text(encoding="utf-8")
    return f"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{title}: {escape(report.verdict)}</title>
<style>
{style}</style>
<main>
{_head(report)}
{"".join(_failures(report))}
{"".join(_groups(report))}
</main>
</html>
"""


def _head(report: Report) -> str:
    counts = "".join(f"<li class='{_class(outcome)}'><b>{number}</b> {outcome}</li>" for outcome, number in report.counts().items())
    rows = "".join(f"<dt>{name}</dt><dd>{escape(value)}</dd>" for name, value in facts(report))
    faults = "".join(f"<li>{escape(fault)}</li>" for fault in report.faults)
    return f"""<header class="{"passed" if report.holds else "failed"}">
<h1>{escape(report.about.backend)} <small>and the kvcore transfer contract {escape(report.about.contract)}</small></h1>
<p class="verdict">{"holds" if report.holds else "does not hold"}</p>
<ul class="counts">{counts}</ul>
<p>Levels: <b>{escape(report.standing)}</b></p>
{f"<h2>Faults of the run</h2><ul class='faults'>{faults}</ul>" if faults else ""}
<dl>{rows}</dl>
</header>"""


def _failures(report: Report) -> Iterator[str]:
    """Links to what failed, for who wants nothing else."""
    failed = [rule for rule in report.rules if rule.outcome == "failed"]
    if failed:
        links = " ".join(f"<a href='#{rule.id}'>{rule.id}</a>" for rule in failed)
        yield f"<nav>Failed: {links}</nav>"


def _groups(report: Report) -> Iterator[str]:
    longest = max((rule.seconds for rule in report.rules), default=0.0) or 1.0
    for group, rules in report.groups().items():
        passed = sum(rule.outcome == "passed" for rule in rules)
        seconds = sum(rule.seconds for rule in rules)
        yield f"<section><h2>{escape(group.capitalize())} <small>{passed} of {len(rules)} passed, {seconds:.1f} s</small></h2>\n"
        yield from (_rule(rule, longest, report.seed) for rule in rules)
        yield "</section>\n"


def _rule(rule: RuleResult, longest: float, seed: int) -> str:
    """A rule that failed is open."""
    opened = " open" if rule.outcome == "failed" else ""
    why = f"<p class='why'>{escape(rule.why)}</p>" if rule.why else ""
    time = f"<i style='width:{100 * rule.seconds / longest:.0f}%'></i>{rule.seconds:.2f} s" if rule.checks else ""
    return f"""<details id="{rule.id}" class="rule {_class(rule.outcome)}"{opened}>
<summary><b class="id">{rule.id}</b><span class="outcome">{rule.outcome}</span><span class="text">{_prose(rule.text)}</span>
<span class="time">{time}</span></summary>
<p class="whole">{_prose(rule.text)} <small>{rule.requirement}</small></p>{why}
{_checks(rule.checks)}
{"".join(_failure(check, seed) for check in rule.failed)}</details>
"""


def _checks(checks: Sequence[Check]) -> str:
    rows = "".join(
        f"<tr class='{_class(_outcome(check))}'><td>{_outcome(check)}</td><td><code>{escape(check.name)}</code></td>"
        f"<td>{escape(check.level)}</td><td class='number'>{check.seconds:.2f} s</td></tr>"
        for check in checks
    )
    return f"<div class='wide'><table>{rows}</table></div>" if rows else ""


def _failure(check: Check, seed: int) -> str:
    return f"""<div class="failure"><h3>{escape(check.name)}</h3>
<p class="headline">{escape(check.headline)}</p>
<p>Replay it with <code>-k "{escape(_called(check.name))}"</code> and the seed {seed}: <code>--seed</code> of the command,
<code>--kvcore-seed</code> of pytest</p>
<details><summary>How it failed, as pytest shows it</summary><pre>{escape(check.problem)}</pre></details>
{_events(check.stories)}</div>
"""


def _called(name: str) -> str:
    """The test's name without file and parameters."""
    return name.rpartition("::")[2].partition("[")[0]


def _events(stories: Sequence[Story]) -> str:
    if not stories:
        return ""
    who = " and ".join(f"<b class='{_class(story.role)}'>{escape(story.role)}</b> ({story.pid})" for story in stories)
    rows = "".join(
        f"<tr class='{_class(line.role)}'><td class='number'>{line.clock}</td><td>{escape(line.role)}</td><td>{escape(line.text)}</td></tr>"
        for line in interleaved(stories)
    )
    caption = f"The last events of {who}, in seconds before the end"
    return f"<div class='wide events' tabindex='0'><table><caption>{caption}</caption>{rows}</table></div>"


def _outcome(check: Check) -> str:
    return "passed" if check.passed else "failed" if check.ran else "not run"


def _class(name: str) -> str:
    """A name as a class of the style sheet."""
    return escape(re.sub(r"[^a-z0-9]+", "-", name.lower()))


def _prose(text: str) -> str:
    """The contract's text: code and emphasis."""
    return re.sub(r"\*([^*\s][^*]*)\*", r"<em>\1</em>", re.sub(r"`([^`]+)`", r"<code>\1</code>", escape(text)))
