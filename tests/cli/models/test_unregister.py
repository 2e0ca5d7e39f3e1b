"""`marserve unregister`."""

from __future__ import annotations

from marserve.errors import VersionInUse
from support.command_line import marserve
from support.fake_apis import fake_apis


def test_a_model_is_taken_out_by_its_name() -> None:
    """The server's words are repeated."""
    with fake_apis() as apis:
        apis.answer("DELETE /models/digits", {"status": 'Model "digits" unregistered'})

        ran = marserve("unregister", "digits", "--management", apis.url)

    assert (ran.status, ran.out) == (0, 'Model "digits" unregistered\n')


def test_one_version_is_taken_out_alone() -> None:
    """A script gets what was asked and what was answered."""
    with fake_apis() as apis:
        apis.answer("DELETE /models/digits/1.0", {"status": "done"})

        ran = marserve("unregister", "digits", "--version", "1.0", "--json", "--management", apis.url)

    assert ran.document == {"model": "digits", "version": "1.0", "status": "done"}


def test_a_version_that_is_taken_out_is_named() -> None:
    """The server's words are TorchServe's, which name the model alone, as though all of it were gone."""
    with fake_apis() as apis:
        apis.answer("DELETE /models/digits/1.0", {"status": 'Model "digits" unregistered'})

        ran = marserve("unregister", "digits", "--version", "1.0", "--management", apis.url)

    assert (ran.status, ran.out) == (0, "Version 1.0 of model digits unregistered\n")


def test_a_version_in_use_is_taken_out_by_force() -> None:
    """Nothing is forced that was not asked for."""
    with fake_apis() as apis:
        apis.answer("DELETE /models/digits/1.0", {"status": "done"})

        for more in ([], ["--force"]):
            marserve("unregister", "digits", "--version", "1.0", *more, "--management", apis.url)

    assert [asked.parameters for asked in apis.asked] == [{}, {"force": "true"}]


def test_an_unknown_model_is_a_failure() -> None:
    """Status 1 and the server's words."""
    with fake_apis() as apis:
        ran = marserve("unregister", "nothing", "--management", apis.url)

    assert ran.status == 1
    assert "Model not found" in ran.err


def test_a_refusal_names_the_options_of_the_command() -> None:
    """`force=true` is a parameter of the API."""
    with fake_apis() as apis:
        refusal = VersionInUse("net", "2.0", has_weight=True, labels=[])
        apis.answer("DELETE /models/net/2.0", {"code": 409, "message": str(refusal)}, 409)

        ran = marserve("unregister", "net", "--version", "2.0", "--management", apis.url)

    assert ran.status == 1
    assert "unregister it with --force" in ran.err
    assert "`marserve traffic net --reset`" in ran.err
    assert "force=true" not in ran.err
