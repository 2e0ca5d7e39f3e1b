"""Which targets are inference routes, and what becomes of a request (contract §1.2)."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marserve.api.http.inference import MAX_KNOWN_TARGETS, InferenceSurface, Route, read_route
from marserve.api.open_inference.mark import MARK
from marserve.api.open_inference.packed_bodies import PackedBodies
from marserve.api.open_inference.shared_tensors import SharedTensors
from marserve.errors import BadInput, UnknownEncoding
from marserve.messages import PACKED_BODY, Answer, Part
from support.fake_data_plane import FakeDataPlane

PREDICTIONS = [("url_path", ""), ("explain", "False")]
EXPLANATIONS = [("url_path", ""), ("explain", "True")]
FALSE, TRUE = [("explain", "False")], [("explain", "True")]


def route(model: str | None, version: str | None = None, headers: list[tuple[str, str]] | None = None) -> Route:
    """A route without query parameters."""
    headers = headers or []
    return Route(model, version, headers, [], ("explain", "True") in headers, protocol="v2" if MARK in headers else "")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/v2/models/m/infer", route("m", None, [("explain", "False"), MARK])),
        ("/v2/models/m/versions/2.0/infer", route("m", "2.0", [("explain", "False"), MARK])),
        ("/v2/models/m/versions/canary/explain", route("m", "canary", [("explain", "True"), MARK])),
        ("/v2/models/m/versions//infer", None),
        ("/v2/models/m/versions/2.0", None),
        ("/v1/models/m:predict", route("m", None, FALSE)),
        ("/predictions/m", route("m", None, PREDICTIONS)),
    ],
)
def test_routes_of_the_open_inference_protocol_are_marked_where_it_is_spoken(
    target: str, expected: Route | None
) -> None:
    """And may name a version, which they may not elsewhere; other routes are as ever."""
    assert read_route(target.encode(), marks_open_inference=True) == expected
    if "/versions/" in target:
        assert read_route(target.encode()) is None


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/predictions/m", route("m", None, PREDICTIONS)),
        ("/predictions/m/", route("m", None, PREDICTIONS)),
        ("/predictions/m///", route("m", None, PREDICTIONS)),
        ("/predictions/m/1.0", route("m", "1.0", PREDICTIONS)),
        ("/predictions/m/1.0/", route("m", "1.0", PREDICTIONS)),
        ("/predictions/m/1.0/a/b", route("m", "1.0", [("url_path", "a/b"), ("explain", "False")])),
        ("/predictions/m/1.0/a%20b/c%2Fd", route("m", "1.0", [("url_path", "a b/c/d"), ("explain", "False")])),
        ("/predictions/m?data=abc", route("m", None, PREDICTIONS)),
        ("/predictions/spaced%20name", route("spaced name", None, PREDICTIONS)),
        ("/predictions/a%2Fb", route("a/b", None, PREDICTIONS)),
        ("/predictions/%2e%2e", route("..", None, PREDICTIONS)),
        ("/predictions/../x", route("..", "x", PREDICTIONS)),
        ("/predictions/m%00", route("m\0", None, PREDICTIONS)),
        ("/predictions/%C3%A9", route("é", None, PREDICTIONS)),
        ("/predictions/%FF", route("\ufffd", None, PREDICTIONS)),
        ("/predictions/dotted.name-1_x", route("dotted.name-1_x", None, PREDICTIONS)),
        ("/predictions/predictions", route("predictions", None, PREDICTIONS)),
        ("/explanations/m", route("m", None, EXPLANATIONS)),
        ("/explanations/m/2/x", route("m", "2", [("url_path", "x"), ("explain", "True")])),
        ("/v1/models/m:predict", route("m", None, FALSE)),
        ("/v1/models/m:explain", route("m", None, TRUE)),
        ("/v1/models/m:predict/", route("m", None, FALSE)),
        ("/v1/models/m%3Apredict", route("m", None, FALSE)),
        ("/v2/models/m/infer", route("m", None, FALSE)),
        ("/v2/models/m/explain", route("m", None, TRUE)),
        ("/invocations", route(None)),
        ("/invocations/", route(None)),
        ("/models/m/invoke", route("m")),
        ("/m/predict", route("m")),
        ("/m/1.0/predict", route("m", "1.0")),
        ("http://host/predictions/m", route("m", None, PREDICTIONS)),
        ("HTTPS://host:1/predictions/m?x", route("m", None, PREDICTIONS)),
    ],
)
def test_an_inference_route_is_read(target: str, expected: Route) -> None:
    """Split first, decoded then; slashes at the end do not count."""
    assert read_route(target.encode()) == expected


@pytest.mark.parametrize(
    "target",
    ["/", "//", "", "*", "/ping", "/ping/predict", "/predictions", "/predictions/", "/predictions//x",
     "/predictions/m//x", "/explanations", "/v1/models/m", "/v1/models", "/v1/models/:predict", "/v1/models/m:other",
     "/v2/models/m", "/v2/models/m/ready", "/v2/models/m/versions/1/infer", "/v2/health/ready", "/v2",
     "/models", "/models/m", "/models/a/b", "/models/m/1.0", "/models//invoke", "/models/m/predict", "/models/predict",
     "/api-description", "/api-description/predict", "/wfpredict", "/m", "/m/other",
     "/a/b/c/predict", "//predict", "/a//predict", "/PREDICTIONS/m", "/invocations/x", "//predictions/m",
     "ftp://host/predictions/m", "host:80"],
)  # fmt: skip
def test_everything_else_is_left_to_the_application(target: str) -> None:
    """Which knows what to say of it."""
    assert read_route(target.encode()) is None


@pytest.mark.parametrize("path", ["/m/predict", "/m/1/predict", "/models/m/invoke", "/invocations"])
def test_the_query_is_an_input_on_three_families(path: str) -> None:
    """Decoded like a form."""
    found = read_route(f"{path}?data=a+b&n=%31".encode())

    assert found is not None
    assert found.query_parts == [Part("data", b"a b"), Part("n", b"1")]


def test_invocations_take_the_model_from_the_query() -> None:
    """Which stays an input, as recorded."""
    found = read_route(b"/invocations?model_name=m%20n")

    assert found == Route("m n", None, [], [Part("model_name", b"m n")])
    assert read_route(b"/invocations?model_name=") == Route(None, None, [], [Part("model_name", b"")])


def test_an_endless_query_is_bad_input() -> None:
    """It would be as many inputs."""
    with pytest.raises(BadInput):
        read_route(b"/m/predict?" + b"&".join([b"a"] * 2000))


@given(st.text(alphabet="/%.:?&=abcmpredict0129~;\\", max_size=60))
def test_any_target_is_a_route_or_none(target: str) -> None:
    """No target raises."""
    read_route(b"/" + target.encode())


class Waiting:
    """A receiver that keeps what it got."""

    def __init__(self) -> None:
        self.answers: list[Answer] = []

    def on_answer(self, answer: Answer) -> None:
        """Keep it."""
        self.answers.append(answer)

    def on_piece(self, piece: Answer, last: bool) -> None:
        """Never called here."""

    def on_error(self, error: Exception) -> None:
        """Never called here."""


def predict(
    plane: FakeDataPlane, target: str, body: bytes = b"", content_type: str | None = None
) -> tuple[str, str | None, list[Part]]:
    """What the data plane sees of a request."""
    surface = InferenceSurface(plane)
    found = surface.match(target.encode())
    assert found is not None
    surface.predict(found, "id", [(b"A", b"b")], content_type, body, Waiting())
    job = plane.submitted[-1]
    assert (job.request.id, job.request.headers) == ("id", [(b"A", b"b")])
    return job.model, job.version, job.request.parts


def test_a_body_without_bytes_is_still_an_input() -> None:
    """`body`, of zero bytes; after the query where that counts."""
    assert predict(FakeDataPlane(), "/predictions/m") == ("m", None, [Part("body", b"")])
    assert predict(FakeDataPlane(), "/m/predict?n=1") == ("m", None, [Part("n", b"1"), Part("body", b"")])


@pytest.mark.parametrize(
    ("target", "is_explain", "names_version"),
    [("/predictions/m", False, False), ("/explanations/m/2", True, True), ("/v1/models/m:explain", True, False),
     ("/m/1/predict", False, True)],
)  # fmt: skip
def test_the_data_plane_is_told_what_was_asked_for(target: str, is_explain: bool, names_version: bool) -> None:
    """Explanations are kept apart, and so are requests that named a version."""
    plane = FakeDataPlane()

    predict(plane, target)

    request = plane.submitted[0].request
    assert (request.is_explain, request.names_version) == (is_explain, names_version)


class AllDeclare:
    """All models declare their tensors; no server header comes of shared memory."""

    def takes_tensors(self, model: str, version: str | None = None) -> bool:
        """Whether one does."""
        return (model, version) == ("m", "canary")

    def header(self, *_: Any) -> None:
        """Where tensors lie: read in bodies that came as they are."""
        raise BadInput("was read")


def test_in_a_compressed_body_no_shared_memory_is_looked_for() -> None:
    """Its version may be asked for by a header; the client's header of that name is not the server's."""
    plane, shared = FakeDataPlane(), cast(SharedTensors, AllDeclare())
    surface = InferenceSurface(
        plane, marks_open_inference=True, shared_tensors=shared, packed_bodies=PackedBodies(AllDeclare(), 9)
    )
    found = surface.match(b"/v2/models/m/infer")
    assert found is not None
    lines = [(b"Content-Encoding", b"gzip")]

    surface.predict(found, "id", lines, None, b"x", Waiting(), asked_version="canary")

    assert plane.submitted[0].request.server_headers == [*found.server_headers, (PACKED_BODY, "gzip 9")]
    for refused, header in ((UnknownEncoding, lines), (BadInput, [(PACKED_BODY.encode(), b"gzip 9")])):
        with pytest.raises(refused):
            surface.predict(found, "id", header, None, b"x", Waiting())


def test_fields_of_the_body_win_over_the_query() -> None:
    """They come later."""
    parts = predict(FakeDataPlane(), "/m/predict?n=1", b"n=2", "application/x-www-form-urlencoded")[2]

    assert parts == [Part("n", b"1"), Part("n", b"2")]


def test_invocations_find_their_model() -> None:
    """By the query, else the only start-up model, else the field `model_name` (contract §1.2)."""
    form = "application/x-www-form-urlencoded"
    with_one = FakeDataPlane(only_startup_model="one")

    assert predict(with_one, "/invocations?model_name=m")[0] == "m"
    assert predict(with_one, "/invocations", b"model_name=field", form)[0] == "one"
    assert predict(FakeDataPlane(), "/invocations", b"model_name=x&model_name=field", form)[0] == "field"


@pytest.mark.parametrize("target", ["/invocations", "/invocations?model_name=", "/invocations?other=1"])
def test_invocations_without_a_model_are_bad_input(target: str) -> None:
    """In the contract's words."""
    with pytest.raises(BadInput, match=r"^Parameter model_name is required\.$"):
        predict(FakeDataPlane(), target, b"x", "text/plain")


def test_targets_are_remembered_within_a_bound() -> None:
    """The table of targets must not grow with what clients make up (RELIABILITY A12)."""
    surface = InferenceSurface(FakeDataPlane())

    first = surface.match(b"/predictions/m")
    assert surface.match(b"/predictions/m") is first
    for n in range(3 * MAX_KNOWN_TARGETS):
        surface.match(b"/predictions/%d" % n)
    surface.match(b"/predictions/" + b"x" * 8000)

    assert len(surface._known) <= MAX_KNOWN_TARGETS
    assert all(len(target) < 1000 for target in surface._known)


@pytest.mark.parametrize(("path", "model"), [("/mine/predict", None), ("/predictions/predict", "predict")])
def test_a_further_route_goes_before_models_named_by_a_bare_path(path: str, model: str | None) -> None:
    """`/{model}/predict` is any path of two words; `/predictions/{model}` says what it means."""
    surface = InferenceSurface(FakeDataPlane(), further_route=path)

    route = surface.match(path.encode())

    assert route is not None
    assert route.model == model


def test_a_further_route_predicts_with_the_only_model_of_the_start() -> None:
    """Whatever its query; the paths beside it are nobody's."""
    plane = FakeDataPlane(only_startup_model="m")
    surface = InferenceSurface(plane, further_route="/v1/endpoints/1:predict")

    route = surface.match(b"/v1/endpoints/1:predict?alt=json")
    assert route is not None
    surface.predict(route, "id", [], None, b"body", Waiting())

    (job,) = plane.submitted
    assert (job.model, job.body, job.request.server_headers) == ("m", b"body", [("explain", "False")])
    assert surface.match(b"/v1/endpoints/1") is None
    assert surface.match(b"/v1/endpoints/1:predict/more") is None
    assert InferenceSurface(plane).match(b"/v1/endpoints/1:predict") is None
