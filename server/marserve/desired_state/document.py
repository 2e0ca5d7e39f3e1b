"""The desired state: one document that says which models a server has. Pure; it reads text and opens no files.

`read` makes a `DesiredState` of YAML (or JSON, which is YAML too), or lists everything that is wrong, each with its
line. Documents with the same meaning have the same canonical form; its digest shows whether two servers are to have the
same models. `schema.py` has the same rules for editors.

    models:
      digits:
        versions:
          "1.0": {url: digits.mar, workers: 2}
          "2.0": {url: "s3://models/digits-2.mar", sha256: 9f86…, minWorkers: 1, maxWorkers: 4, batchSize: 8}
        default: "1.0"
        labels: {stable: "1.0", canary: "2.0"}
        traffic: {weights: {"1.0": 95, "2.0": 5}, sticky: {header: X-User}}
        newVersions: {prefix: "s3://models/digits-", policy: canary}

A version's keys are those of a registration and those of the model's configuration; the latter take precedence over the
archive.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import yaml

from marserve.archive.reading.bounded_yaml import Marked, load_marked_yaml
from marserve.errors import BadArchive, BadDesiredState, BadInput
from marserve.files.nearest import did_you_mean, nearest
from marserve.model_options import DECLARABLE, read_value
from marserve.names import name_fault
from marserve.registry.catalogue.traffic import check_label, read_traffic
from marserve.registry.intake.effective_options import RUNTIMES
from marserve.registry.intake.registration import MOST_WORKERS
from marserve.registry.observing.shadow_spec import read_shadow
from marserve.settings.shown_address import hide_query, hide_quoted

LARGEST_DOCUMENT = 1 << 20
FORMAT = 1
MOST_PROBLEMS = 20

Policy = Literal["ignore", "load", "load-and-default", "canary"]
POLICIES: tuple[Policy, ...] = ("ignore", "load", "load-and-default", "canary")

# The members of a version that are not keys of a model's configuration.
VERSION_KEYS = ("url", "sha256", "handler", "runtime", "workers")
MODEL_KEYS = ("versions", "default", "labels", "traffic", "shadow", "newVersions")
DOCUMENT_KEYS = ("format", "models", "newVersions")

_DIGEST = re.compile(r"(?:sha256:)?([0-9a-fA-F]{64})")
_FRAGMENT = re.compile(r"(.*)#sha256=([0-9a-fA-F]{64})")


@dataclass(frozen=True, slots=True)
class DesiredVersion:
    """One version. `config` holds keys of a model's configuration as the document writes them.

    `sha256` is that of the archive, 64 lower hex digits. `handler` and `runtime` take the place of the manifest's.
    """

    url: str
    sha256: str | None = None
    handler: str | None = None
    runtime: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)

    @property
    def workers(self) -> tuple[int, int] | None:
        """Fewest and most workers; None if the document leaves them to the archive and the server."""
        if "minWorkers" not in self.config:
            return None
        return self.config["minWorkers"], self.config["maxWorkers"]

    @property
    def source(self) -> str:
        """The URL of its registration: the address, followed by the digest that the archive must have."""
        return self.url if self.sha256 is None else f"{self.url}#sha256={self.sha256}"

    @property
    def shown(self) -> str:
        """The address for logs and answers, without secrets, and that of weights apart from the archive."""
        weights = self.config.get("checkpoint")
        return hide_query(self.url) + (f", checkpoint {hide_query(weights)}" if weights else "")

    def without_secrets(self) -> DesiredVersion:
        """The same without the secrets that its addresses may carry."""
        weights = self.config.get("checkpoint")
        config = {**self.config, "checkpoint": hide_query(weights)} if weights else self.config
        return replace(self, url=hide_query(self.url), config=config)

    def document(self) -> dict[str, Any]:
        """Its members in canonical form."""
        own = {"url": self.url, "sha256": self.sha256, "handler": self.handler, "runtime": self.runtime}
        return {**{key: value for key, value in own.items() if value is not None}, **dict(sorted(self.config.items()))}


@dataclass(frozen=True, slots=True)
class NewVersions:
    """The policy for objects that appear below `prefix`, an address or the beginning of a name in the store."""

    prefix: str
    policy: Policy

    def document(self) -> dict[str, Any]:
        """Its members in the document."""
        return {"prefix": self.prefix, "policy": self.policy}


@dataclass(frozen=True, slots=True)
class DesiredModel:
    """One model. `default` is one of `versions`, and so are the targets of `labels`, `traffic` and `shadow`.

    `traffic` is in the shape of `PUT /models/{model}/traffic`; with None the default version answers. `shadow` is in
    the shape of its call, None without one.
    """

    versions: Mapping[str, DesiredVersion]
    default: str
    labels: Mapping[str, str] = field(default_factory=dict)
    traffic: Mapping[str, Any] | None = None
    shadow: Mapping[str, Any] | None = None
    new_versions: NewVersions | None = None

    def document(self) -> dict[str, Any]:
        """Its members in canonical form."""
        members = {
            "versions": {name: version.document() for name, version in sorted(self.versions.items())},
            "default": self.default,
            "labels": dict(sorted(self.labels.items())) or None,
            "traffic": _sorted(self.traffic),
            "shadow": _sorted(self.shadow),
            "newVersions": None if self.new_versions is None else self.new_versions.document(),
        }
        return {key: value for key, value in members.items() if value is not None}


@dataclass(frozen=True, slots=True)
class DesiredState:
    """All models of a server; `new_versions` are for prefixes that do not belong to one model."""

    models: Mapping[str, DesiredModel] = field(default_factory=dict)
    new_versions: tuple[NewVersions, ...] = ()

    def document(self) -> dict[str, Any]:
        """The canonical form: states with the same meaning have the same document."""
        members: dict[str, Any] = {
            "format": FORMAT,
            "models": {name: model.document() for name, model in sorted(self.models.items())},
        }
        if self.new_versions:
            members["newVersions"] = [each.document() for each in self.new_versions]
        return members

    @property
    def digest(self) -> str:
        """SHA-256 of the canonical form, hexadecimal."""
        text = json.dumps(self.document(), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    def write(self) -> bytes:
        """The document as YAML, in canonical form."""
        text: str = yaml.safe_dump(self.document(), sort_keys=False, allow_unicode=True, width=120)
        return text.encode()

    def shown(self) -> DesiredState:
        """The same without the secrets that addresses may carry; for people, not for applying."""
        models = {
            name: replace(
                model,
                versions={each: version.without_secrets() for each, version in model.versions.items()},
            )
            for name, model in self.models.items()
        }
        return replace(self, models=models)

    def policies(self) -> list[tuple[str | None, NewVersions]]:
        """Every watched prefix with its policy, and the model that it belongs to, None for any."""
        own: list[tuple[str | None, NewVersions]] = [
            (name, model.new_versions) for name, model in self.models.items() if model.new_versions is not None
        ]
        return [*own, *((None, each) for each in self.new_versions)]


def read(data: bytes, name: str = "models.yaml") -> DesiredState:
    """The desired state in a document; `name` is its name in errors.

    Raises BadDesiredState with up to twenty problems and their lines.
    """
    if len(data) > LARGEST_DOCUMENT:
        raise BadDesiredState(name, [f"it has {len(data)} bytes; at most {LARGEST_DOCUMENT} are read"])
    repeated: list[str] = []
    try:
        root = load_marked_yaml(data, name, repeated)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        where = f"line {mark.line + 1}: " if mark is not None else ""
        problem = getattr(error, "problem", None) or "this is no YAML"
        raise BadDesiredState(name, [f"{where}{problem}"]) from None
    except BadArchive as error:
        raise BadDesiredState(name, [str(error).rstrip(".")]) from None
    except (UnicodeError, ValueError, OverflowError):
        raise BadDesiredState(name, ["it is no YAML text"]) from None
    problems = [f"{sentence.partition(' stands in ')[0]} stands twice in one map" for sentence in repeated]
    reader = _Reader(problems)
    state = reader.document(root)
    if problems or state is None:
        raise BadDesiredState(name, problems[:MOST_PROBLEMS] or ["it says nothing; it must hold `models:`"])
    return state


class _Reader:
    """Reads the document piece by piece, and adds a sentence to `problems` for each invalid value."""

    def __init__(self, problems: list[str]) -> None:
        self._problems = problems

    def wrong(self, place: Marked, sentence: str) -> None:
        """Note a problem."""
        self._problems.append(f"line {place.key_line or place.line}: {sentence}")

    # ------------------------------------------------------------------------------------------- document, model

    def document(self, root: Marked | None) -> DesiredState | None:
        """Read the whole document."""
        if root is None:
            return None
        members = self._map(root, "the document", DOCUMENT_KEYS)
        if members is None:
            return None
        if "format" in members and members["format"].value != FORMAT:
            self.wrong(members["format"], f"format is {_show(members['format'])}; this server reads format {FORMAT}")
        if "models" not in members:
            self.wrong(root, "models is missing; `models: {}` is a server without any")
            return None
        place = members["models"]
        if place.value is None:
            place = Marked({}, place.line)
        if not isinstance(place.value, dict):
            self.wrong(place, f"models is {_show(place)}; it must be a map of names to models")
            return None
        models: dict[str, DesiredModel] = {}
        for name, value in place.value.items():
            if not _is_name(name):
                self.wrong(
                    value,
                    f"{name!r} is no name of a model: it is empty, too long, a dot or two, or holds control characters",
                )
            model = self._model(name, value)
            if model is not None:
                models[name] = model
        return DesiredState(models, self._prefixes(members.get("newVersions")))

    def _prefixes(self, place: Marked | None) -> tuple[NewVersions, ...]:
        if place is None:
            return ()
        if not isinstance(place.value, list):
            self.wrong(place, "newVersions of the document must be a list of prefixes, each with its policy")
            return ()
        found = [self._new_versions(item, "the document") for item in place.value]
        return tuple(each for each in found if each is not None)

    def _model(self, name: str, place: Marked) -> DesiredModel | None:
        what = f"model {name}"
        members = self._map(place, what, MODEL_KEYS, also=(*VERSION_KEYS, *DECLARABLE))
        if members is None:
            return None
        if "versions" not in members:
            self.wrong(place, f'versions of {what} is missing; it must be a map, as in versions: {{"1.0": {{url: …}}}}')
            return None
        versions = self._versions(name, members["versions"])
        labels = self._labels(name, members.get("labels"), versions)
        default = self._default(name, place, members.get("default"), versions)
        traffic = self._traffic(name, members.get("traffic"), versions)
        shadow = self._shadow(name, members.get("shadow"), versions)
        if shadow is not None and shadow["version"] == default and (traffic is None or len(versions) < 2):
            self.wrong(members["shadow"], f"the shadow of {what} is {default}, which answers all its requests itself")
        return DesiredModel(
            versions,
            default,
            labels,
            traffic,
            shadow,
            self._new_versions(members["newVersions"], what) if "newVersions" in members else None,
        )

    def _versions(self, model: str, place: Marked) -> dict[str, DesiredVersion]:
        if not isinstance(place.value, dict) or not place.value:
            self.wrong(place, f"versions of model {model} is {_show(place)}; it must be a map with a version or more")
            return {}
        versions: dict[str, DesiredVersion] = {}
        for name, value in place.value.items():
            if not _is_name(name) or name == "all":
                self.wrong(value, f"{name!r} is no name of a version")
            version = self._version(model, name, value)
            if version is not None:
                versions[name] = version
        return versions

    def _default(self, model: str, whole: Marked, place: Marked | None, versions: Mapping[str, DesiredVersion]) -> str:
        if place is None:
            if len(versions) > 1:
                self.wrong(whole, f"default of model {model} is missing: it has {len(versions)} versions")
            return next(iter(versions), "")
        return self._target(place, f"default of model {model}", versions)

    def _target(self, place: Marked, what: str, versions: Collection[str]) -> str:
        """The name of one of the versions."""
        name = place.text
        if isinstance(place.value, dict | list) or name not in versions:
            hint = did_you_mean(name, versions, f"; it has {_words(versions)}" if versions else "", least=0.5)
            self.wrong(place, f"{what} is {_show(place)}, which is not one of its versions{hint}")
        return name

    # ------------------------------------------------------------------------------------------- version

    def _version(self, model: str, name: str, place: Marked) -> DesiredVersion | None:
        what = f"version {name} of model {model}"
        if isinstance(place.value, str):
            place = Marked({"url": place}, place.line)
        members = self._map(place, what, (*VERSION_KEYS, *DECLARABLE))
        if members is None:
            return None
        url = self._text(members, "url", what)
        if url is None:
            if "url" not in members:
                self.wrong(place, f"url of {what} is missing: the archive's name in the model store, or its address")
            url = ""
        found = _FRAGMENT.fullmatch(url)
        sha256 = self._digest(members.get("sha256"), what)
        if found is not None:
            url, digest = found[1], found[2].lower()
            if sha256 not in (None, digest):
                self.wrong(members["sha256"], f"sha256 of {what} is not the one that stands in its url")
            sha256 = digest
        runtime = self._text(members, "runtime", what)
        if runtime is not None and runtime not in RUNTIMES:
            self.wrong(members["runtime"], f"runtime of {what} is {runtime!r}; it must be {' or '.join(RUNTIMES)}")
        config = self._config(members, what)
        return DesiredVersion(url, sha256, self._text(members, "handler", what), runtime, config)

    def _digest(self, place: Marked | None, what: str) -> str | None:
        if place is None:
            return None
        found = _DIGEST.fullmatch(place.text)
        if found is None:
            self.wrong(place, f"sha256 of {what} is {_show(place)}; it must be 64 hexadecimal digits")
            return None
        return found[1].lower()

    def _config(self, members: Mapping[str, Marked], what: str) -> dict[str, Any]:
        config: dict[str, Any] = {}
        for name, place in members.items():
            if name in VERSION_KEYS:
                continue
            value = place.plain()
            try:
                json.dumps(value, allow_nan=False)
                read_value(name, value)
            except (TypeError, ValueError) as error:
                must = error if isinstance(error, ValueError) and not isinstance(error, TypeError) else "plain JSON"
                self.wrong(place, f"{name} of {what} is {_show(place)}; it must be {must}")
                continue
            config[name] = value
        self._workers(members, config, what)
        return config

    def _workers(self, members: Mapping[str, Marked], config: dict[str, Any], what: str) -> None:
        """Read the bounds: `workers: 2` sets both, and one bound alone sets the other too."""
        if "workers" in members:
            place = members["workers"]
            if "minWorkers" in members or "maxWorkers" in members:
                self.wrong(place, f"workers of {what} stands beside minWorkers or maxWorkers; write one of the two")
            if type(place.value) is not int or not 0 <= place.value <= MOST_WORKERS:
                self.wrong(place, f"workers of {what} is {_show(place)}; it must be from 0 to {MOST_WORKERS}")
                return
            config["minWorkers"] = config["maxWorkers"] = place.value
        if "minWorkers" not in config and "maxWorkers" not in config:
            return
        config.setdefault("minWorkers", config.get("maxWorkers"))
        config.setdefault("maxWorkers", config["minWorkers"])
        least, most = config["minWorkers"], config["maxWorkers"]
        place = members.get("minWorkers") or members.get("maxWorkers") or members["workers"]
        if least < 0 or most > MOST_WORKERS:
            self.wrong(place, f"minWorkers and maxWorkers of {what} must be between 0 and {MOST_WORKERS}")
        elif most < least:
            self.wrong(place, f"maxWorkers of {what} is {most}, which is less than its minWorkers, {least}")

    # ------------------------------------------------------------------------------------------- traffic

    def _labels(self, model: str, place: Marked | None, versions: Collection[str]) -> dict[str, str]:
        if place is None:
            return {}
        if not isinstance(place.value, dict):
            self.wrong(place, f"labels of model {model} is {_show(place)}; it must be a map of labels to versions")
            return {}
        labels = {}
        for label, target in place.value.items():
            try:
                check_label(label)
            except BadInput as error:
                self.wrong(target, error.message.rstrip("."))
            if label in versions:
                self.wrong(target, f"the label {label} of model {model} is the name of one of its versions")
            labels[label] = self._target(target, f"the label {label} of model {model}", versions)
        return labels

    def _traffic(self, model: str, place: Marked | None, versions: Collection[str]) -> Mapping[str, Any] | None:
        """The traffic, in the shape of `PUT /models/{model}/traffic`."""
        if place is None or place.value is None:
            return None
        try:
            traffic = read_traffic(place.plain())
        except BadInput as error:
            self.wrong(place, f"traffic of model {model}: {error.message.rstrip('.')}")
            return None
        weights = place.value["weights"].value
        for version in traffic.weights:
            if version not in versions:
                self._target(replace(weights[version], text=version), f"a weight of model {model}", versions)
        return traffic.document()

    def _shadow(self, model: str, place: Marked | None, versions: Collection[str]) -> Mapping[str, Any] | None:
        if place is None or place.value is None:
            return None
        if not isinstance(place.value, dict) or "version" not in place.value:
            self.wrong(place, f'shadow of model {model} must be a map that names its version, as {{version: "2.0"}}')
            return None
        document = {**place.plain(), "version": place.value["version"].text}
        try:
            shadow = read_shadow(document)
        except BadInput as error:
            self.wrong(place, f"shadow of model {model}: {error.message.rstrip('.')}")
            return None
        self._target(place.value["version"], f"shadow of model {model}", versions)
        return shadow.document()

    def _new_versions(self, place: Marked, what: str) -> NewVersions | None:
        members = self._map(place, f"newVersions of {what}", ("prefix", "policy"))
        if members is None:
            return None
        prefix = self._text(members, "prefix", f"newVersions of {what}")
        if not prefix:
            self.wrong(place, f"prefix of newVersions of {what} is missing: the address below which versions appear")
        policy = members["policy"].text if "policy" in members else "load"
        if policy not in POLICIES:
            hint = did_you_mean(policy, POLICIES, f"; it must be {', '.join(POLICIES)}")
            self.wrong(members["policy"], f"policy of newVersions of {what} is {policy!r}{hint}")
        return NewVersions(prefix or "", cast(Policy, policy))

    # ------------------------------------------------------------------------------------------- small

    def _map(
        self, place: Marked, what: str, known: Collection[str], *, also: Collection[str] = ()
    ) -> dict[str, Marked] | None:
        """The members of a map, without unknown ones; `also` are keys that belong elsewhere."""
        if not isinstance(place.value, dict):
            self.wrong(place, f"{what} is {_show(place)}; it must be a map of keys and values")
            return None
        for key, value in place.value.items():
            if key in known:
                continue
            near = nearest(key, [*known, *also], is_loose=True)
            if near in also and near not in known:
                self.wrong(value, f"{key} is no key of {what}; {near} belongs to a version, below its versions")
                continue
            self.wrong(value, f"{key} is no key of {what}" + (f"; did you mean {near}?" if near else ""))
        return {key: value for key, value in place.value.items() if key in known}

    def _text(self, members: Mapping[str, Marked], key: str, what: str) -> str | None:
        place = members.get(key)
        if place is None or place.value is None:
            return None
        if not isinstance(place.value, str) or not place.value or not place.value.isprintable():
            self.wrong(place, f"{key} of {what} is {_show(place)}; it must be text")
            return None
        return place.value


def _is_name(name: str) -> bool:
    return 0 < len(name) <= 200 and name.isprintable() and name == name.strip() and name_fault("", name) is None


def _words(names: Collection[str]) -> str:
    shown = sorted(names)[:6]
    return ", ".join(shown) + (", …" if len(names) > 6 else "")


def _show(place: Marked) -> str:
    show: Callable[[Any], str] = repr
    text = show(place.plain()) if isinstance(place.value, dict | list) else place.text or show(place.value)
    text = hide_quoted(text)
    return text if len(text) <= 60 else text[:57] + "…"


def _sorted(value: Any) -> Any:
    """The same with the keys of its maps sorted."""
    if isinstance(value, Mapping):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list | tuple):
        return [_sorted(item) for item in value]
    return value
