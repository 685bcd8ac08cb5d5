"""The badge: which version of the contract, and which levels of it are kept."""

from __future__ import annotations

from html import escape

from kvcore_conformance.report.model import Report

GREEN, YELLOW, RED = "#2e7d32", "#8a6d00", "#b3261e"
NARROW, WIDE = "iljft.,:;|!'1 ", "mwMW@%"


def badge(report: Report) -> str:
    """An SVG image of its own."""
    left, right = f"kvcore contract {report.about.contract}", report.verdict
    waived = any(rule.outcome == "waived" for rule in report.rules)
    colour = RED if not report.holds else YELLOW if waived else GREEN
    start, end = _width(left), _width(left) + _width(right)
    title = escape(f"{left}: {right}")
    return f"""<svg xmlns="http://www.w3.org/2000/svg" width="{end}" height="20" role="img" aria-label="{title}">
<title>{title}</title>
<rect width="{end}" height="20" rx="3" fill="{colour}"/>
<path d="M{start} 0v20H3a3 3 0 0 1-3-3V3a3 3 0 0 1 3-3z" fill="#444"/>
<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">
{_text(left, 0, start)}
{_text(right, start, end)}
</g>
</svg>
"""


def _text(text: str, start: int, end: int) -> str:
    """In the middle of its field, and made to fit whatever the font is."""
    return f'<text x="{start + 6}" y="14" textLength="{end - start - 12}" lengthAdjust="spacingAndGlyphs">{escape(text)}</text>'


def _width(text: str) -> int:
    """Pixels of a field with a text, about as Verdana has it."""
    return 12 + round(sum(4.0 if letter in NARROW else 10.0 if letter in WIDE else 7.0 for letter in text))
