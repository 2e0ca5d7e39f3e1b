"""Tests for the cause of death: from a wait status and what else is known to a class and a sentence."""

from __future__ import annotations

import signal

import pytest

from marserve.errors import OutOfMemory, WorkerDied
from marserve.messages import NotLoaded
from marserve.pool.worker_end.cause_of_death import Cause, Death, Evidence, classify_exit, death_of_load, error_of


def exited(code: int) -> int:
    """The wait status of a process that ended by itself."""
    return code << 8


@pytest.mark.parametrize(
    ("status", "cause", "said"),
    [
        (exited(0), Cause.EXIT, "exit status 0"),
        (exited(7), Cause.EXIT, "exit status 7"),
        (signal.SIGKILL, Cause.KILLED, "SIGKILL"),
        (signal.SIGSEGV, Cause.SIGNAL, "signal 11 (SIGSEGV)"),
        (signal.SIGSEGV | 0x80, Cause.SIGNAL, "signal 11 (SIGSEGV)"),
        (signal.SIGABRT, Cause.SIGNAL, "signal 6 (SIGABRT)"),
        (40, Cause.SIGNAL, "signal 40"),
        (None, Cause.KILLED, "could not be read"),
    ],
)
def test_a_wait_status_becomes_a_class_and_a_sentence(status: int | None, cause: Cause, said: str) -> None:
    """Core dumps, real-time signals and a status that nobody could read included."""
    death = classify_exit(status)

    assert death.cause is cause
    assert said in death.detail


def test_a_crash_over_a_lost_device_is_told_by_its_last_words() -> None:
    """C++ ends the process by an exception that nothing catches; a line of the author's own does not count."""
    words = "CUDA error: an illegal memory access was encountered"
    cpp = ["terminate called after throwing an instance of 'c10::AcceleratorError'", f"  what():  {words}"]

    deaths = [classify_exit(signal.SIGABRT, evidence=Evidence(last_lines=lines)) for lines in (cpp, [words])]

    assert [death.cause for death in deaths] == [Cause.DEVICE_LOST, Cause.SIGNAL]
    assert deaths[0].detail == "the device is lost to the worker, and the process ended by SIGABRT"


def test_what_the_server_knew_before_wins() -> None:
    """A worker killed for its time-out did not just get a SIGKILL."""
    known = Death(Cause.RESPONSE_TIMEOUT, "no answer within responseTimeout, 2 s")

    assert classify_exit(signal.SIGKILL, known=known) is known


@pytest.mark.parametrize("cause", [cause for cause in Cause if cause is not Cause.OUT_OF_MEMORY])
def test_a_client_is_told_that_its_worker_died_and_the_class_of_cause(cause: Cause) -> None:
    """The text is TorchServe's; the reason stays in the log and in describe."""
    error = error_of(Death(cause, "a secret path"))

    assert isinstance(error, WorkerDied)
    assert error.message == "Worker died."
    assert error.cause == cause.value


def test_a_worker_that_ran_out_of_memory_is_an_error_of_its_own() -> None:
    """Surfaces answer 507 for it."""
    error = error_of(Death(Cause.OUT_OF_MEMORY, ""))

    assert isinstance(error, OutOfMemory)
    assert error.message == "Worker died."


@pytest.mark.parametrize(
    ("status", "evidence", "cause", "said"),
    [
        (signal.SIGKILL, Evidence(was_killed_for_memory=True), Cause.OUT_OF_MEMORY, "killed by the kernel"),
        (None, Evidence(was_killed_for_memory=True), Cause.OUT_OF_MEMORY, "killed by the kernel"),
        (exited(0), Evidence(["MemoryError"]), Cause.EXIT, "exit status 0"),
        (exited(1), Evidence(["MemoryError"]), Cause.OUT_OF_MEMORY, "exit status 1"),
        (exited(1), Evidence(["x", "MemoryError: 5 GB", "bye"]), Cause.OUT_OF_MEMORY, "exit status 1"),
        (exited(1), Evidence(["no MemoryError here"]), Cause.EXIT, "exit status 1"),
        (signal.SIGABRT, Evidence(["  what():  std::bad_alloc"]), Cause.OUT_OF_MEMORY, "SIGABRT"),
        (signal.SIGABRT, Evidence(["assertion failed"]), Cause.SIGNAL, "SIGABRT"),
        (
            signal.SIGABRT,
            Evidence(["std::bad_alloc"], memory_limit_bytes=300),
            Cause.OUT_OF_MEMORY,
            "maxWorkerMemory is 300 bytes",
        ),
    ],
)
def test_what_the_kernel_counted_and_the_last_words_tell_of_memory(
    status: int | None, evidence: Evidence, cause: Cause, said: str
) -> None:
    """A SIGKILL alone does not; nor a word in the middle of a line."""
    death = classify_exit(status, evidence=evidence)

    assert death.cause is cause
    assert said in death.detail


def test_an_exit_keeps_its_status() -> None:
    """The restart policy looks at it."""
    assert classify_exit(exited(78)).exit_code == 78
    assert classify_exit(signal.SIGSEGV).exit_code is None


def test_there_are_about_a_dozen_causes_and_each_is_a_word() -> None:
    """They are labels and headers."""
    assert 10 <= len(Cause) <= 18
    assert all(cause.value.replace("_", "").isalpha() and cause.value.islower() for cause in Cause)


def test_a_load_that_failed_is_told_in_the_workers_own_word() -> None:
    """A word that is no cause counts as a load that failed; what was said is kept."""
    known = death_of_load(NotLoaded("missing_file", "FileNotFoundError: weights.pt", ""))
    unknown = death_of_load(NotLoaded("bad weather", "it rained", ""))

    assert known == Death(Cause.MISSING_FILE, "FileNotFoundError: weights.pt")
    assert unknown == Death(Cause.LOAD_FAILED, "it rained")
