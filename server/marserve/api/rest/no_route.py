"""What is there, for a request whose path or method has no route: the route that it may stand for, or the methods."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Final

from starlette.routing import BaseRoute, Match
from starlette.types import Scope

from marserve.api.rest.head_requests import NO_HEAD
from marserve.errors import MarserveError, MethodNotAllowed, RouteNotFound
from marserve.files.nearest import nearest

# Clients choose paths, and the event loop compares them.
MOST_COMPARED_CHARACTERS: Final = 64
# Of a route's beginning, in characters, its slash among them.
LEAST_BEGINNING: Final = 4
_MODEL: Final = "{model_name}"


class Routes:
    """The routes of a listener, read when a request has none. Those of inference are here by their descriptions."""

    def __init__(self, routes: Sequence[BaseRoute]) -> None:
        self._routes = routes

    def explain(self, status: int, scope: Scope, only_model: Callable[[], str | None]) -> MarserveError | None:
        """The error for a request that the framework refused with a status; None for what is not about its route.

        `only_model` finds the model that may be named where a route has a place for one.
        """
        method, path = str(scope["method"]), str(scope["path"])
        shown = path if len(path) <= MOST_COMPARED_CHARACTERS else f"{path[: MOST_COMPARED_CHARACTERS - 1]}…"
        if status == 405:
            methods = self._methods_of(scope)
            return MethodNotAllowed(f"{shown} takes {', '.join(methods)}, not {method}. {self._where_all_are}", methods)
        if status != 404:
            return None
        near = self.nearest(path)
        if near is not None and (only := only_model()) is not None:
            near = near.replace(_MODEL, only)
        hint = f"; did you mean {near}?" if near is not None else "."
        return RouteNotFound(f"There is no route {shown} here{hint} {self._where_all_are}")

    def nearest(self, path: str) -> str | None:
        """The route whose fixed segments are most like a path's, with the names that the path has; None without one."""
        if len(path) > MOST_COMPARED_CHARACTERS:
            return None
        segments = path.split("/")
        begun: list[str] = []
        like: list[str] = []
        for places, known in self._templates.items():
            word = _fixed(segments, places)
            if len(word) >= LEAST_BEGINNING:  # such as /predict of /predictions
                begun += [template for fixed, template in known.items() if fixed.startswith(word)]
            if (fixed := nearest(word, known)) is not None:
                like.append(_filled(known[fixed], segments))
        if begun:
            return _filled(min(begun, key=len), segments)
        return nearest(path, like, least=0.0)

    @cached_property
    def _templates(self) -> dict[frozenset[int], dict[str, str]]:
        """For the places that names have in a path: its fixed segments, and the shortest template with them."""
        templates: dict[frozenset[int], dict[str, str]] = {}
        paths = {route.path for route in self._routes if hasattr(route, "path")} - {"/"}  # any short path is near that
        for template in sorted(paths, key=lambda path: (len(path), path)):
            segments = template.split("/")
            places = frozenset(place for place, segment in enumerate(segments) if "{" in segment)
            templates.setdefault(places, {}).setdefault(_fixed(segments, places), template)
        return templates

    @cached_property
    def _where_all_are(self) -> str:
        has_page = "/openapi.json" in self._templates.get(frozenset(), {})
        return "GET /openapi.json has all routes." if has_page else "OPTIONS / has all routes."

    def _methods_of(self, scope: Scope) -> list[str]:
        found: set[str] = set()
        for route in self._routes:
            if route.matches(scope)[0] is not Match.NONE:
                found |= getattr(route, "methods", None) or set()
        return sorted(found | ({"HEAD"} if "GET" in found and scope["path"] not in NO_HEAD else set()))


def _fixed(segments: Sequence[str], places: frozenset[int]) -> str:
    """The segments at other places than these, joined."""
    return "/".join(segment for place, segment in enumerate(segments) if place not in places)


def _filled(template: str, segments: Sequence[str]) -> str:
    """A template with a path's segments in the places of its names."""
    return "/".join(
        segments[place] if segment[:1] == "{" and segment[-1:] == "}" and place < len(segments) else segment
        for place, segment in enumerate(template.split("/"))
    )
