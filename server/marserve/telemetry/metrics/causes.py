"""Every cause for which a request is refused or fails, or a worker ends: the label `cause` of marserve's metrics.

The words are those of `x-marserve-cause` and of describe. A word that does not stand here is shown as `other`, so that
there are never more series than lines in this table; a test finds the words of the code that it lacks.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

OTHER: Final = "other"

CAUSES: Final[dict[str, str]] = {
    # Refused before a model was reached.
    "malformed": "what came is no request of the protocol",
    "unreadable": "what came cannot be parsed at all",
    "too_large": "a body, a header, or an answer is larger than it may be",
    "too_slow": "header or body came too slowly",
    "slow_reader": "the client took its answer too slowly, or not at all",
    "connections": "there are as many connections as may be",
    "bytes_in_flight": "bodies and answers hold as much memory as they may",
    "bytes_in_flight_slow": "a body that waited for memory would have come too slowly",
    "foreign_origin": "a browser's page of another origin asked",
    "foreign_host": "the address in the request is not the server's",
    "token": "the key is missing, wrong or too old",
    "key_not_replaced": "the file with the new key cannot be written",
    "management_closed": "management needs the server's own machine, or a key",
    "control_closed": "the protocol's control is not open on this listener",
    "model_api_disabled": "changes of models are switched off",
    "logs": "as many calls read logs as may",
    "uploads": "as many archives are being uploaded as may be",
    "uploads_closed": "uploads are not open",
    "scrapes": "as many clients take the metrics page as may",
    "unknown": "the refusal has no cause of its own, as for an address that does not exist",
    # A model did not take the request.
    "no_worker": "no worker could ever take it",
    "queue_full": "the queue is full",
    "no_ticket": "no worker is idle, and the model queues nothing (useJobTicket)",
    "predicted_wait": "it would wait longer than its deadline",
    "deadline": "its deadline passed",
    "draining": "the server or the version stops",
    "hangs": "the model's workers hang",
    "refused_fingerprint": "a body like this one has killed two workers",
    "no_memory": "there is no memory to load the model",
    "no_devices": "there is no accelerator to load the model on",
    "too_many_sequences": "there are as many sequences as may be",
    "sequence_queue_full": "as many requests of its sequence wait as may",
    "no_sequence_idle_limit": "the model's sequences have no end of their own",
    "sequence_lost": "its sequence ended with its worker",
    "sequence_ended": "its sequence was ended by the handler",
    "sequence_expired": "its sequence was idle for too long",
    # An accepted request failed.
    "handler": "the handler raised",
    "bad_input": "the handler says that the input is wrong",
    "client_gone": "the client hung up",
    "worker_busy": "a workflow's node was refused as its model is busy",
    "node_timeout": "a workflow's node took too long",
    "not_json": "a workflow's node gave an answer that is no JSON",
    "bad_answer": "an answer is not what the request asked for",
    "comparison": "an answer of a shadow differs, or cannot be compared",
    # A worker ended; the requests that it had fail by the same word.
    "killed": "killed by a signal that is sent from outside",
    "signal": "ended by a signal of its own doing, such as a crash",
    "exit": "it exited by itself",
    "out_of_memory": "there was no memory, of the host or of a device",
    "device_lost": "its accelerator is lost",
    "response_timeout": "no answer came within responseTimeout",
    "startup_timeout": "it did not load within startupTimeout",
    "import_error": "an import raised at load",
    "missing_module": "a Python package is missing",
    "missing_file": "a file of the archive is missing",
    "load_failed": "the load raised",
    "fork_refused": "the template could not fork it",
    "bad_frame": "it broke the protocol between server and worker",
    "out_of_step": "the ranks of a group did not end a call alike",
    "node_lost": "its machine is lost",
    "node_unfit": "its machine cannot run it",
    "stopped": "the server ended it",
    # Registrations and what else management refuses.
    "desired_state": "the desired state decides about this model",
    "not_in_store": "the archive is not in the model store",
    "address_not_allowed": "the archive's address is not allowed",
    "archive_exists": "an archive of that name is there already",
    "archive_in_use": "the archive is in use",
    "download_failed": "the archive cannot be fetched",
    "digest_mismatch": "the archive is not the one that was named",
    "trusted_name": "the name is kept for trusted models",
    "store_not_writable": "the model store cannot be written",
    "cannot_replay": "a recorded request cannot be run again, or not now",
    "cannot_profile": "a version cannot be profiled, or not now",
    "rollout": "a roll-out of the model is under way",
    "rollouts_unread": "the records of roll-outs cannot be read",
    "version_in_use": "the version has traffic, or a label",
    "swap_under_way": "a swap of the model is under way",
    "interpreter_refused": "the archive's interpreter is not allowed",
    "requirements_not_installed": "the archive's requirements cannot be installed",
    "requirements_refused": "the archive's requirements are not allowed",
    "venv_not_made": "the environment for the requirements cannot be made",
    OTHER: "a word that is not in this table",
}


def by_known_cause(counts: Mapping[str, int]) -> Mapping[str, int]:
    """The counts by causes of the table; those of other words together."""
    if counts.keys() <= CAUSES.keys():
        return counts
    known: dict[str, int] = {}
    for word, count in counts.items():
        word = word if word in CAUSES else OTHER if word else "unknown"
        known[word] = known.get(word, 0) + count
    return known
