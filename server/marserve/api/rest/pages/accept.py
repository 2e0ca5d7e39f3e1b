"""Whether a client would rather have HTML or JSON (RFC 9110, 12.5.1). Pure."""

from __future__ import annotations


def prefers_html(accept: str) -> bool:
    """Whether an `Accept` names `text/html`, and does not ask for JSON more.

    `*/*`, which curl and most libraries send, gets JSON.
    """
    html, json = 0.0, 0.0
    for line in accept.split(","):
        kind, _, parameters = line.partition(";")
        match kind.strip().lower():
            case "text/html":
                html = max(html, _quality(parameters))
            case "application/json":
                json = max(json, _quality(parameters))
    return html > 0 and html >= json


def _quality(parameters: str) -> float:
    """The `q` among a range's parameters; 1 without one, 0 for a value that is no number."""
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        if name.strip().lower() == "q":
            try:
                return float(value)
            except ValueError:
                return 0.0
    return 1.0
