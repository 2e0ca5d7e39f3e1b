"""Brings a server to its desired state, keeps it there, and goes back. One change at a time.

A change is one transaction over all its models. All new versions load beside those that serve. When all are ready,
everything is switched between two awaits. After a failure the old versions go on, and the new ones end.

    document → `diff.compare` with what is registered → load, wait → history → the document's place → commit → retire

The history's entry and the document are written before the switch. A server that is killed therefore comes back with
one of two states, never with a mixture: the document's, or the one in force before.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar

from marserve.desired_state.adoption import Name, adopt, as_document, problems
from marserve.desired_state.diff import Diff, Step, compare, is_as_wanted
from marserve.desired_state.document import DesiredState, DesiredVersion, NewVersions, read
from marserve.desired_state.document_place import ABSENT, DocumentMissing, DocumentPlace, DocumentUnreadable, Found
from marserve.desired_state.history import Applied, History
from marserve.errors import (
    ApplyFailed,
    ApplyUnderWay,
    BadArchive,
    BadDesiredState,
    BadInput,
    ClientError,
    DesiredStateDecides,
    LoadFailed,
    MarserveError,
    NothingToUndo,
    WouldUnload,
)
from marserve.registry.catalogue.versions import Version
from marserve.registry.changes.transaction import Commit, Transaction
from marserve.registry.intake.registration import RegisterParameters
from marserve.registry.models import Registry

log = logging.getLogger("marserve.rollout")

By = Literal["start", "apply", "undo", "watch", "adopt"]
Unnamed = Literal["refuse", "prune", "adopt"]
"""What to do with versions that no document names, on a server where no document decides: see `Diff.unnamed`."""
Result = TypeVar("Result")
# The most changes that may wait; one more is refused.
MOST_WAITING = 64
# How often a failed document of the place is tried again, and the first pause; each next pause is twice as long.
MOST_RETRIES = 5
FIRST_RETRY_S = 30.0
# The name of a document that came with a call.
SENT = "the document"


@dataclass(frozen=True, slots=True)
class Failure:
    """A document of the place that could not be applied, after the last of `tries` in a row.

    `at` and `retry_at` are in seconds since the epoch. Without a `retry_at` it is tried again only when it changes or a
    call asks for it. `tag` is the document's.
    """

    message: str
    at: float
    tag: str
    tries: int = 1
    retry_at: float | None = None

    def document(self) -> dict[str, Any]:
        """The failure in the answer to a client."""
        members = {"message": self.message, "at": self.at, "tries": self.tries}
        return members if self.retry_at is None else {**members, "retryAt": self.retry_at}


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a change did: the history's entry that is in force now, the steps, and its time in seconds.

    `state` is the document with the adopted versions, None without any.
    """

    entry: Applied | None
    diff: Diff
    seconds: float = 0.0
    state: DesiredState | None = None

    def document(self) -> dict[str, Any]:
        """As clients get it."""
        adopted = [{"model": model, "version": version} for model, version in self.diff.adopted]
        return {
            **({"adopted": adopted} if adopted else {}),
            **({"document": self.state.shown().write().decode()} if self.state is not None else {}),
            "applied": self.entry.number if self.entry is not None else None,
            "digest": self.entry.digest if self.entry is not None else None,
            "steps": [step.document() for step in self.diff.steps],
            "seconds": round(self.seconds, 3),
        }


@dataclass(slots=True)
class Counts:
    """The numbers behind the metrics."""

    applied: int = 0
    failed: int = 0
    unreadable: int = 0
    last_seconds: float = 0.0
    last_at: float = 0.0


class Reconciler:
    """The desired state of one server. Every method is called on the event loop.

    Without a `place` documents come with calls, and other calls may change the models as well.
    """

    def __init__(
        self,
        registry: Registry,
        history: History,
        place: DocumentPlace | None = None,
        *,
        interval_s: float = 10.0,
        undo_window_s: float = 0.0,
        first_retry_s: float = FIRST_RETRY_S,
        weigh: Callable[[DesiredVersion], int | None] = lambda version: None,
        find_trouble: Callable[[DesiredVersion], str | None] = lambda version: None,
        now: Callable[[], float] = time.time,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`weigh` estimates the memory of a version in bytes, None if unknown; it blocks.

        `find_trouble` says why a version's archive is not available now, None if it seems available; it blocks, too.

        `interval_s` is the pause between looks at the place; `chance` jitters it. The registry keeps replaced versions
        loaded for `undo_window_s`. A failed document is tried again after `first_retry_s` at the earliest.
        """
        self._registry = registry
        self._history = history
        self.place = place
        self._interval_s = interval_s
        self._undo_window_s = undo_window_s
        self._first_retry_s = first_retry_s
        self._weigh = weigh
        self._find_trouble = find_trouble
        self._now = now
        self._chance = chance
        self._lock = asyncio.Lock()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._seen: str | None = None
        self._current: DesiredState | None = None
        # Whether the models in force came by calls, and undo has brought them back.
        self._is_found = False
        self.failure: Failure | None = None
        self.unreadable: str | None = None
        self.under_way: dict[str, Any] | None = None
        self.counts = Counts()

    # ------------------------------------------------------------------------------------------- asking

    @property
    def current(self) -> DesiredState | None:
        """The state in force; None if none was applied since the start."""
        return self._current

    def policies(self) -> list[tuple[str | None, NewVersions]]:
        """The watched prefixes with their policies, each with the model that it belongs to, None for any."""
        return [] if self._current is None else self._current.policies()

    def remarks(self) -> list[str]:
        """Sentences for readiness probes: the server is ready, but not with the document's models."""
        sentences = []
        if self.failure is not None:
            sentences.append(f"the desired state is not in force: {self.failure.message}")
        if self.unreadable is not None:
            sentences.append(f"the desired state is as it was last read: {self.unreadable}")
        return sentences

    def describe(self) -> dict[str, Any]:
        """The state in force, a change under way, and the last failure, in the answer to a client."""
        newest = self._history.newest
        described: dict[str, Any] = {
            "source": None if self.place is None else self.place.shown,
            "digest": None if self._current is None else self._current.digest,
            "applied": None if newest is None or self._current is None else newest.number,
            "models": sorted(self._current.models) if self._current is not None else [],
        }
        if keeps := self._registry.kept():
            described["keeps"] = keeps
        if self.under_way is not None:
            described["underWay"] = self.under_way
        if self.failure is not None:
            described["failure"] = self.failure.document()
        if self.unreadable is not None:
            described["unreadable"] = self.unreadable
        return described

    def kept_by_model(self) -> dict[str, float]:
        """The number of versions that stay loaded for undo, by model."""
        return dict(Counter(kept["model"] for kept in self._registry.kept()))

    def history(self) -> list[dict[str, Any]]:
        """The documents that were applied, newest first."""
        newest = self._history.newest
        return [
            entry.describe(is_current=entry is newest and self._current is not None)
            for entry in reversed(self._history.entries)
        ]

    def entry(self, number: int) -> Applied | None:
        """An entry of the history by its number, None if it is not kept."""
        return self._history.find(number)

    async def plan(self, data: bytes | None = None, unnamed: Unnamed = "refuse") -> Diff:
        """The steps that applying this document (None: the one in the place) would take. Changes nothing.

        Raises BadDesiredState, DocumentUnreadable, and BadInput as `apply`.
        """
        state, _ = await self._wanted(data)
        state, adopted = await self._with_existing(state, None, unnamed)
        diff = await self._named(self._compare(state, None), undoing=False)
        return await self._weighed(replace(diff, adopted=adopted), state)

    def _compare(self, state: DesiredState, undone_to: str | None) -> Diff:
        """The steps to a state, and which of its versions are still loaded. Undo goes to the digest `undone_to`.

        A kept version with an archive digest is exactly the wanted one. Without a digest its address may have something
        else by now, and so may a place of weights beside it, so it is used only to go back to the state that it served.
        """
        diff = compare(self._registry.actual(), state)

        def is_loaded(step: Step) -> bool:
            if step.kind != "load" or step.version is None:
                return False
            found = self._registry.find_kept(step.model, step.version, None)
            if step.after.sha256 is None or (found is not None and found.has_weights_beside):
                found = self._registry.find_kept(step.model, step.version, undone_to or "none")
            return found is not None and is_as_wanted(found, step.after)

        steps = (replace(step, is_loaded=is_loaded(step)) for step in diff.steps)
        return replace(diff, steps=tuple(steps), undo_window_s=0.0 if undone_to else self._undo_window_s)

    async def _named(self, diff: Diff, *, undoing: bool) -> Diff:
        """The steps, and on a server where no document decides the versions that they unload and no document named.

        Undo also looks at the newest entry, because no state is in force after a restart.
        """
        if self.place is not None:
            return diff
        actual = self._registry.actual()  # before the first await: the steps were made of the same state
        entry = self._history.newest if undoing else None
        newest = None if entry is None else await asyncio.to_thread(entry.state)
        by_call = None if self._is_found else self._current

        def is_named(model: str, version: str) -> bool:
            if by_call is not None and actual[model].versions[version].declared is not None:
                return model in by_call.models and version in by_call.models[model].versions
            return newest is not None and model in newest.models and version in newest.models[model].versions

        gone = [(step.model, step.version) for step in diff.of("unload") if step.version and not step.replaced]
        return replace(diff, unnamed=tuple(name for name in gone if not is_named(*name)))

    async def _with_existing(
        self, state: DesiredState, undone_to: str | None, unnamed: Unnamed
    ) -> tuple[DesiredState, tuple[Name, ...]]:
        """The state, with the versions that it would unload if these are to be adopted; and their names."""
        if unnamed != "adopt":
            return state, ()
        if self.place is not None:
            raise BadInput(
                f"{self.place.shown} decides which models this server has, so there are none to adopt: a model stays "
                "if the new document names it."
            )
        steps = self._compare(state, undone_to).of("unload")
        names = tuple((step.model, step.version) for step in steps if step.version and not step.replaced)
        whole = adopt(state, self._registry.actual(), names)
        if names and (wrong := await asyncio.to_thread(problems, whole, names, is_shown=undone_to is None)):
            raise BadInput("; ".join(wrong) + ".")
        return whole, names

    async def _wanted(self, data: bytes | None) -> tuple[DesiredState, Found | None]:
        """The state that is asked for, and the document that is in the place now."""
        found = await self._in_place(may_be_absent=data is not None)
        if data is not None:
            return await asyncio.to_thread(read, data, SENT), found
        if found is None or self.place is None:
            raise BadDesiredState(SENT, ["there is none: send one, or start the server with --desired-state"])
        return await asyncio.to_thread(read, found.data, self.place.shown), found

    async def _in_place(self, *, may_be_absent: bool) -> Found | None:
        """The document that is in the place now; None without a place.

        With `may_be_absent` a missing document is an empty one with the tag ABSENT.
        """
        if self.place is None:
            return None
        try:
            return await asyncio.to_thread(self.place.read)
        except DocumentMissing:
            if not may_be_absent:
                raise
            return Found(b"", ABSENT)

    async def _weighed(self, diff: Diff, state: DesiredState) -> Diff:
        """The steps with the memory that they take, and the archives that are not available."""
        actual = self._registry.actual()

        def cost(step: Step) -> int | None:
            if step.version is None or step.kind not in ("load", "unload"):
                return None
            if step.is_loaded:
                return 0
            if step.kind == "load":
                return self._weigh(state.models[step.model].versions[step.version])
            model = actual.get(step.model)
            gone = None if model is None else model.versions.get(step.version)
            if gone is None:  # a call has unloaded it meanwhile
                return None
            config = {key: gone.config[key] for key in ("checkpoint",) if key in gone.config}
            config |= {"minWorkers": gone.workers[0], "maxWorkers": gone.workers[1]}
            weight = self._weigh(DesiredVersion(gone.source, config=config))
            return None if weight is None else -weight

        def problems() -> list[str]:
            coming = [step for step in diff.of("load") if not step.is_loaded]
            found = [(step, self._find_trouble(step.after)) for step in coming]
            return [f"{step.model} {step.version}: {trouble}" for step, trouble in found if trouble is not None]

        costs = await asyncio.to_thread(lambda: [cost(step) for step in diff.steps])
        return replace(diff.with_costs(costs), problems=tuple(await asyncio.to_thread(problems)))

    # ------------------------------------------------------------------------------------------- changing

    async def apply(
        self,
        data: bytes | None = None,
        *,
        if_digest: str | None = None,
        wait: bool = False,
        unnamed: Unnamed = "refuse",
    ) -> Outcome:
        """Apply this document, or (None) the one in the place, even if that has failed before.

        A document of the call replaces the one in the place. `if_digest` is the digest that must be in force now. With
        `wait` the call waits for a change that is under way. If no document decides, `unnamed` says what happens to
        versions that came by calls and that the document does not name. Raises BadDesiredState, ApplyUnderWay,
        ApplyFailed, DesiredStateMoved, DocumentUnreadable, WouldUnload, and BadInput for versions that cannot be
        adopted; then nothing was changed.
        """
        return await self._alone(self._apply(data, if_digest, unnamed), wait=wait)

    async def _apply(self, data: bytes | None, if_digest: str | None, unnamed: Unnamed) -> Outcome:
        state, found = await self._wanted(data)
        if if_digest is not None and (self._current is None or self._current.digest != if_digest):
            raise DesiredStateIsAnother(self._current)
        writes = (
            found
            if data is not None and found is not None and not await asyncio.to_thread(_says, found, state)
            else None
        )
        state, adopted = await self._with_existing(state, None, unnamed)
        outcome = await self._bring_about(
            state, "apply", data if writes is not None else None, found, may_unload=unnamed == "prune"
        )
        return replace(outcome, diff=replace(outcome.diff, adopted=adopted), state=state if adopted else None)

    async def undo(self, *, unnamed: Unnamed = "refuse") -> Outcome:
        """Go back to the document before the one in force, and write it into the place.

        If no document decides, undo also goes back to the models before the first document, even after a restart.
        Raises NothingToUndo, and as `apply`.
        """
        return await self._alone(self._undo(unnamed))

    async def plan_undo(self, unnamed: Unnamed = "refuse") -> Diff:
        """The steps that `undo` would take. Raises NothingToUndo, and BadInput as `apply`."""
        target = self._before()
        state, adopted = await self._with_existing(await asyncio.to_thread(target.state), target.digest, unnamed)
        diff = await self._named(self._compare(state, target.digest), undoing=True)
        return await self._weighed(replace(diff, adopted=adopted), state)

    def _before(self) -> Applied:
        newest = self._history.newest
        target = self._history.find(newest.before) if newest is not None else None
        if target is None or (self._current is None and self.place is not None):
            raise NothingToUndo
        return target

    async def _undo(self, unnamed: Unnamed) -> Outcome:
        target = self._before()
        found = await self._in_place(may_be_absent=True)
        data = target.document.encode()
        state, adopted = await self._with_existing(await asyncio.to_thread(target.state), target.digest, unnamed)
        outcome = await self._bring_about(
            state,
            "undo",
            data,
            found,
            what=f"back to entry {target.number}",
            undone_to=target,
            may_unload=unnamed == "prune",
        )
        self._is_found = target.is_found and not adopted
        return replace(outcome, diff=replace(outcome.diff, adopted=adopted))

    async def change(self, edit: Callable[[DesiredState], DesiredState], what: str) -> Outcome:
        """Apply the place's document with one edit, and write it back. Changes wait for one another.

        `edit` may raise any error; nothing is changed then.
        """
        return await self._alone(self._change(edit, what), wait=True)

    async def _change(self, edit: Callable[[DesiredState], DesiredState], what: str) -> Outcome:
        assert self.place is not None
        found = await asyncio.to_thread(self.place.read)
        state = edit(await asyncio.to_thread(read, found.data, self.place.shown))
        return await self._bring_about(state, "adopt", state.write(), found, what=what)

    async def let_go(self, gone: Sequence[tuple[str | None, NewVersions]]) -> None:
        """Unload versions that policies of an earlier document let in and that the one in force does not name.

        Applying the document in force removed those that were there; others may still have been loading. To be called
        when these policies have ended.
        """
        try:
            await self._alone(self._let_go(gone), wait=True)
        except MarserveError as error:
            log.error("What an earlier desired state let in is not unloaded: %s", error)

    async def _let_go(self, gone: Sequence[tuple[str | None, NewVersions]]) -> None:
        state, actual = self._current, self._registry.actual()
        if state is None:
            return
        unwanted = [
            (step.model, actual[step.model].versions[step.version].source)
            for step in compare(actual, state).of("unload")
            if step.version is not None and not step.replaced
        ]
        if any(
            model in (None, name) and source.startswith(each.prefix)
            for name, source in unwanted
            for model, each in gone
        ):
            await self._bring_about(state, "watch", None, None)

    async def _alone(self, work: Coroutine[Any, Any, Result], *, wait: bool = False) -> Result:
        """Run a change to its end, even if the caller is cancelled; another one meanwhile is refused, or waits."""
        if self._lock.locked() and (not wait or len(self._tasks) >= MOST_WAITING):
            work.close()
            raise ApplyUnderWay

        async def locked() -> Result:
            async with self._lock:
                return await work

        task = asyncio.create_task(locked())
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not isinstance(error, MarserveError):
            log.error("A change of the desired state failed", exc_info=error)

    async def stop(self) -> None:
        """Wait until no change is under way. The registry, which stops first, gives up what loads."""
        while self._tasks:
            await asyncio.wait(self._tasks)

    async def _bring_about(
        self,
        state: DesiredState,
        by: By,
        writes: bytes | None,
        found: Found | None,
        *,
        what: str | None = None,
        undone_to: Applied | None = None,
        may_unload: bool = False,
    ) -> Outcome:
        """Carry a change out. `writes` is the document that is to replace `found` in the place.

        `undone_to` is the entry that undo goes back to. With `may_unload` versions that no document named may go.
        """
        began = time.monotonic()
        if writes is not None and self.place is not None and not self.place.can_write:
            remedy = "It cannot be written from here: put the document there instead."
            raise DesiredStateDecides(self.place.shown, remedy)
        name = SENT if self.place is None or writes is not None else self.place.shown
        digest = None if undone_to is None else undone_to.digest
        diff = self._compare(state, digest)
        earlier = None
        if self.place is None:
            # Calls may change models while files are read: compare again until nothing changed meanwhile.
            while True:
                looked = await self._named(diff, undoing=undone_to is not None)
                if looked.unnamed and not may_unload:
                    raise WouldUnload(looked.unnamed)
                earlier = await self._as_found() if by == "apply" else None
                again = self._compare(state, digest)
                if again == diff:
                    break
                diff = again
        entry = self._history.newest
        is_known = self._current is not None or (self.place is None and earlier is None)
        is_new = not is_known or entry is None or entry.digest != state.digest
        if diff.is_empty and not is_new and writes is None:
            self._in_force(state, found.tag if found is not None else None)
            return Outcome(entry, diff, time.monotonic() - began)
        try:
            served = earlier or self._current
            change = _Change(self._registry.begin_change(), diff, self._tell)
            try:
                change.take_back()
                await change.load()
                commit = change.commit_of(state)
                tag = found.tag if found is not None else None
                added: list[Applied] = []
                try:
                    if is_new:
                        said = f"{what}: {_in_words(diff)}" if by == "undo" else what or _in_words(diff)
                        added = await asyncio.to_thread(self._remember_both, earlier, state, by, said, undone_to)
                        entry = added[-1]
                    if writes is not None and found is not None and self.place is not None:
                        tag = await asyncio.to_thread(self.place.write, writes, found.tag)
                        self.unreadable = None
                    left = change.transaction.commit(commit)
                except BaseException:
                    for each in reversed(added):
                        await asyncio.to_thread(self._history.take_back, each)
                    raise
            except BaseException:
                await change.transaction.abandon()
                raise
            # A second undo goes further back, so the versions that an undo replaced need not be kept.
            change.transaction.retire(left, keep_of=None if by == "undo" else served.digest if served else "")
        except (LoadFailed, ApplyFailed) as error:
            failures = error.failures if isinstance(error, ApplyFailed) else [_sentence("a version", error)]
            failed = ApplyFailed(name, failures, is_authors=isinstance(error, ApplyFailed) and error.is_authors)
            self._note_failure(failed, found if writes is None else None, by)
            raise failed from error
        except OSError as error:
            raise ApplyFailed(name, [f"the history cannot be written ({error.strerror})"]) from error
        except MarserveError as error:
            self._note_failure(error, found if writes is None else None, by)
            raise
        finally:
            self.under_way = None
        self._in_force(state, tag)
        self.counts.applied += 1
        self.counts.last_at, self.counts.last_seconds = self._now(), time.monotonic() - began
        log.info("Desired state %s is in force (%s): %s", state.digest[:12], by, _in_words(diff))
        return Outcome(entry, diff, self.counts.last_seconds)

    async def _as_found(self) -> DesiredState | None:
        """The server's models as a document, if calls have changed them since the newest document.

        None if they are the same, or if a document cannot have them; undo will not bring those back.
        """
        actual, newest = self._registry.actual(), self._history.newest
        known = self._current or (await asyncio.to_thread(newest.state) if newest is not None else None)
        if known is not None and compare(actual, known).is_empty:
            return None
        state = as_document(actual, self._current)
        try:
            await asyncio.to_thread(problems, state, [], is_shown=False)
        except BadDesiredState as error:
            log.warning("What the server has is not remembered, and `undo` will not go back to it: %s", error)
            return None
        return state

    def _remember_both(
        self, earlier: DesiredState | None, state: DesiredState, by: By, what: str, target: Applied | None
    ) -> list[Applied]:
        """Write the state before the document (`earlier`), if there is one to remember, and the document. Blocks.

        `target` is the entry that undo goes back to. Raises OSError; nothing is written then.
        """
        before = None if target is None else target.before
        is_found = target is not None and target.is_found and target.digest == state.digest
        added = []
        if earlier is not None:
            said = f"{len(earlier.models)} models, as calls had left them"
            added.append(self._history.add(earlier, at=self._now(), by="found", what=said, is_found=True))
        try:
            added.append(self._history.add(state, at=self._now(), by=by, what=what, before=before, is_found=is_found))
        except OSError:
            for each in added:
                self._history.take_back(each)
            raise
        return added

    def _in_force(self, state: DesiredState, tag: str | None) -> None:
        self._current, self.failure, self._is_found = state, None, False
        if tag is not None:
            self._seen = tag

    def _note_failure(self, error: MarserveError, found: Found | None, by: By) -> None:
        """Log a failure. A document of the place is tried again a few times, as the cause may end by itself.

        Such causes are a missing archive, or memory in use. A document that came with a call is not tried again.
        """
        self.counts.failed += 1
        log.error("The desired state was not applied (%s), what served goes on: %s", by, error)
        if found is None:
            return
        now, last = self._now(), self.failure
        tries = last.tries + 1 if last is not None and last.tag == found.tag else 1
        retry_at = None
        if tries <= MOST_RETRIES and not isinstance(error, BadDesiredState):
            pause_s = self._first_retry_s * 2.0 ** (tries - 1)
            retry_at = now + pause_s
            log.info("The desired state is tried again in %g s, unless it changes before", pause_s)
        self.failure = Failure(str(error), now, found.tag, tries, retry_at)

    def _is_retry_due(self) -> bool:
        return self.failure is not None and self.failure.retry_at is not None and self._now() >= self.failure.retry_at

    def _tell(self, phase: str, done: int, total: int) -> None:
        self.under_way = {"phase": phase, "done": done, "of": total}

    # ------------------------------------------------------------------------------------------- start

    def newest(self) -> Applied | None:
        """The entry that was in force when the server last ended."""
        return self._history.newest

    async def start(self, found: Found | None) -> tuple[list[str], list[str]]:
        """Load the document's models into a server without any; returns the models, and sentences about failures.

        Requests find versions as soon as these begin to load. If one of them fails, the state in force before is loaded
        in place of the document's; if that is the same, or missing, the versions that load serve. `found` is the
        document, None if it could not be read.
        """
        return await self._alone(self._start(found))

    async def _start(self, found: Found | None) -> tuple[list[str], list[str]]:
        newest = self._history.newest
        wanted: DesiredState | None = None
        if found is not None and self.place is not None:
            self._seen = found.tag
            try:
                wanted = await asyncio.to_thread(read, found.data, self.place.shown)
            except BadDesiredState as error:
                self._note_failure(error, found, "start")
        fallback = newest.state() if newest is not None and (wanted is None or newest.digest != wanted.digest) else None
        if wanted is not None:
            failures = await self._load_first(wanted, is_whole=fallback is not None)
            if failures and fallback is not None:
                name = self.place.shown if self.place is not None else SENT
                self._note_failure(ApplyFailed(name, failures), found, "start")
            else:
                if newest is None or newest.digest != wanted.digest:
                    await self._remember(wanted, found)
                self._current = wanted
                return sorted(wanted.models), failures
        if fallback is None:
            return [], [self.failure.message] if self.failure is not None else []
        assert newest is not None
        log.warning("What was in force before is loaded: entry %d of the history", newest.number)
        failures = await self._load_first(fallback, is_whole=False)
        self._current = fallback
        return sorted(fallback.models), failures

    async def _remember(self, state: DesiredState, found: Found | None) -> None:
        what = f"{len(state.models)} models"
        try:
            await asyncio.to_thread(lambda: self._history.add(state, at=self._now(), by="start", what=what))
        except OSError as error:
            log.error("The history of desired states cannot be written: %s", error)

    async def _load_first(self, state: DesiredState, *, is_whole: bool) -> list[str]:
        """Load all versions; with `is_whole` none stays after a failure. Returns sentences about failures."""
        change = _Change(self._registry.begin_change(), compare(self._registry.actual(), state), self._tell)
        try:
            failures = await change.load_first(state)
            if failures and is_whole:
                await change.transaction.abandon()
            return failures
        except MarserveError as error:
            await change.transaction.abandon()
            return [str(error)]
        finally:
            self.under_way = None

    # ------------------------------------------------------------------------------------------- watching

    async def watch(self) -> None:
        """Look at the place from time to time, and apply a new document. Runs until cancelled."""
        if self.place is None:
            return
        looked: str | None = None
        while True:
            # Jitter, so that servers that were started together do not look at the same time.
            await asyncio.sleep(self._interval_s * (0.75 + 0.5 * self._chance()))
            try:
                looked = await self.look(looked)
            except Exception:
                # A border: after any error the next look must follow.
                log.exception("A look at the desired state failed; what is in force stays, and the next look follows")

    async def look(self, looked: str | None) -> str | None:
        """Look once; `looked` is the last look's result, None at first. Returns this one's."""
        assert self.place is not None
        if self._lock.locked():
            return looked
        try:
            mark = await asyncio.to_thread(self.place.look)
            is_due = self._is_retry_due()
            if mark == looked and self.unreadable is None and not is_due:
                return mark
            found = await asyncio.to_thread(self.place.read)
        except DocumentUnreadable as error:
            if self.unreadable is None:
                log.error("%s; what is in force stays", error)
            self.unreadable = str(error)
            self.counts.unreadable += 1
            return None
        self.unreadable = None
        is_retry = is_due and self.failure is not None and self.failure.tag == found.tag
        if found.tag == self._seen and not is_retry:
            return mark
        try:
            await self._alone(self._take(found))
        except ApplyUnderWay:
            return looked
        except MarserveError:
            pass  # it is logged, shown by `describe`, and tried again if that may help
        return mark

    async def _take(self, found: Found) -> None:
        """Apply the document that was found in the place."""
        assert self.place is not None
        self._seen = found.tag
        try:
            state = await asyncio.to_thread(read, found.data, self.place.shown)
        except BadDesiredState as error:
            self._note_failure(error, found, "watch")
            raise
        await self._bring_about(state, "watch", None, found)


class DesiredStateIsAnother(ClientError):
    """The state in force is not the one that the caller made the change from."""

    cause = "desired_state"

    def __init__(self, current: DesiredState | None) -> None:
        now = "none" if current is None else current.digest
        super().__init__(f"The desired state in force has the digest {now}; the change was made from another one.")


def _says(found: Found, state: DesiredState) -> bool:
    """Whether the document in the place has the same meaning as `state`."""
    try:
        return found.tag != ABSENT and read(found.data).digest == state.digest
    except BadDesiredState:
        return False


def _in_words(diff: Diff) -> str:
    """The steps of a change in a few words."""
    words = []
    for kinds, word in ((("load",), "loaded"), (("unload",), "unloaded"), (("scale-up", "scale-down"), "scaled")):
        named = dict.fromkeys(f"{step.model} {step.version}" for step in diff.steps if step.kind in kinds)
        if word == "unloaded":
            loaded = {f"{step.model} {step.version}" for step in diff.of("load")}
            named = {name: None for name in named if name not in loaded}
        if named:
            names = list(named)
            words.append(f"{word} {', '.join(names[:4])}" + (f" and {len(names) - 4} more" if len(names) > 4 else ""))
    others = dict.fromkeys(f"{step.kind} of {step.model}" for step in diff.of("default", "labels", "traffic", "shadow"))
    words += list(others)[:4]
    tuned = dict.fromkeys(f"{step.model} {step.version}" for step in diff.of("tune"))
    if tuned:
        words.append(f"tuned {', '.join(list(tuned)[:4])}")
    return "; ".join(words) or "nothing to do"


class _Change:
    """One change under way: the steps, and the versions that were begun."""

    def __init__(self, transaction: Transaction, diff: Diff, tell: Callable[[str, int, int], None]) -> None:
        self.transaction = transaction
        self._diff = diff
        self._tell = tell
        self._loaded: list[Version] = []
        self._taken: list[Version] = []

    def take_back(self) -> None:
        """Take back versions that are still loaded; end other kept versions of the models that have to load."""
        for step in self._diff.of("load"):
            if step.is_loaded:
                assert step.version is not None
                self._taken.append(self.transaction.take_back(step.model, step.version))
        self.transaction.make_way(step.model for step in self._diff.of("load") if not step.is_loaded)

    async def load(self) -> None:
        """Load all new versions beside those that serve, and wait until all are ready. Raises ApplyFailed."""
        steps = [step for step in self._diff.of("load") if not step.is_loaded]
        works: list[Coroutine[Any, Any, Version]] = [self.transaction.prepare(_registration(step)) for step in steps]
        self._loaded = await self._together("load", [f"{step.model} {step.version}" for step in steps], works)
        widened = []
        for step in self._diff.of("scale-up"):
            assert step.version is not None
            widened.append(self.transaction.widen(step.model, step.version, *step.after))
        waiting = [*self._loaded, *self._taken, *widened]
        names = [f"{version.model} {version.name}" for version in waiting]
        await self._together("wait-ready", names, [self.transaction.wait(version) for version in waiting])

    async def _together(self, phase: str, names: list[str], works: list[Coroutine[Any, Any, Result]]) -> list[Result]:
        """Run the works side by side. After the first failure the others are given up. Raises ApplyFailed."""
        tasks = [asyncio.ensure_future(work) for work in works]
        pending = set(tasks)
        self._tell(phase, 0, len(tasks))
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            self._tell(phase, len(tasks) - len(pending), len(tasks))
            if any(task.exception() is not None for task in done):
                break
        failed = [(name, task.exception()) for name, task in zip(names, tasks, strict=True) if task.done()]
        errors = [(name, error) for name, error in failed if error is not None]
        if not errors:
            return [task.result() for task in tasks]
        if phase == "load":
            # An intake cannot be given up half way; its version is abandoned with the others.
            await asyncio.gather(*pending, return_exceptions=True)
        else:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        for _, error in errors:
            if not isinstance(error, MarserveError):
                raise error
        is_authors = all(isinstance(error, ClientError | BadArchive) for _, error in errors)
        raise ApplyFailed(SENT, [_sentence(name, error) for name, error in errors], is_authors=is_authors)

    def commit_of(self, state: DesiredState) -> Commit:
        """What comes into force at the switch."""
        diff = self._diff
        commit = Commit(publish=[*self._loaded, *self._taken])
        for step in diff.steps:
            if step.version is not None and step.kind == "unload" and not step.replaced:
                commit.remove.append((step.model, step.version))
            elif step.version is not None and step.kind == "tune":
                size, delay = step.after.get("batchSize"), step.after.get("maxBatchDelay")
                commit.tune[step.model, step.version] = size, None if delay is None else delay / 1000
            elif step.version is not None and step.kind == "scale-down":
                commit.narrow[step.model, step.version] = step.after
            elif step.kind == "default":
                commit.defaults[step.model] = step.after
            elif step.kind == "labels":
                commit.labels[step.model] = step.after
            elif step.kind == "traffic":
                commit.traffic[step.model] = step.after
            elif step.kind == "shadow":
                commit.shadow[step.model] = step.after
        for name, model in state.models.items():
            for version, wanted in model.versions.items():
                commit.declare[name, version] = wanted.document()
        return commit

    async def load_first(self, state: DesiredState) -> list[str]:
        """Load everything into a server without models; requests find versions at once. Sentences about failures."""
        steps = self._diff.of("load")
        works = [self.transaction.prepare(_registration(step), publish=True) for step in steps]
        ends = await asyncio.gather(*works, return_exceptions=True)
        failures = [
            _sentence(f"{step.model} {step.version}", end)
            for step, end in zip(steps, ends, strict=True)
            if isinstance(end, BaseException)
        ]
        loaded = [end for end in ends if isinstance(end, Version)]
        self._loaded = loaded
        there = {(version.model, version.name) for version in loaded}
        commit = self.commit_of(state)
        commit.remove.clear()
        commit.defaults = {model: name for model, name in commit.defaults.items() if (model, name) in there}
        commit.declare = {key: declared for key, declared in commit.declare.items() if key in there}
        whole = {
            model for model, wanted in state.models.items() if all((model, name) in there for name in wanted.versions)
        }
        for settings in (commit.labels, commit.traffic, commit.shadow):
            for model in [model for model in settings if model not in whole]:
                del settings[model]
        self.transaction.commit(commit, keeps_open=True)
        waits = await asyncio.gather(*(self.transaction.wait(version) for version in loaded), return_exceptions=True)
        for version, end in zip(loaded, waits, strict=True):
            if isinstance(end, BaseException):
                failures.append(_sentence(f"{version.model} {version.name}", end))
        return failures


def _registration(step: Step) -> RegisterParameters:
    wanted: DesiredVersion = step.after
    return RegisterParameters(
        url=wanted.source,
        model_name=step.model,
        handler=wanted.handler,
        runtime=wanted.runtime,
        declared=wanted.document(),
        version=step.version,
    )


def _sentence(what: str, error: BaseException) -> str:
    if isinstance(error, LoadFailed):
        reason = (error.reason or str(error)).strip().splitlines()
        return f"{what} did not load: {reason[-1] if reason else error}"
    if isinstance(error, MarserveError):
        return f"{what}: {error.message.rstrip('.')}"
    return f"{what}: an unexpected error; the log says more"
