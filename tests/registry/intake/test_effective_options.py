"""Tests for which value wins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from marserve.archive.contents.model_config import ModelConfig
from marserve.errors import BadInput, NotEnoughDevices
from marserve.model_options import NOTHING, Said, say
from marserve.option_values import ParallelPlan, Sample
from marserve.pool.options import PoolOptions, RayOptions
from marserve.registry.catalogue.snapshot import SnapshotVersion
from marserve.registry.intake.effective_options import effective_options, effective_runtime, layers_of
from marserve.registry.intake.registration import RegisterParameters, RegistryOptions
from marserve.settings import ModelDefaults


def choose(
    requested: RegisterParameters | None = None,
    archive: Mapping[str, Any] | None = None,
    configured: ModelDefaults | None = None,
    server: RegistryOptions | None = None,
    **rest: Any,
) -> tuple[PoolOptions, list[str]]:
    """The effective options of version 1.0 of model m."""
    parameters = replace(requested or asks(), restored=rest.get("restored"))
    layers = layers_of(
        parameters, ModelConfig(Said(archive or {})), configured or ModelDefaults(), rest.get("declared", {})
    )
    options = replace(server or RegistryOptions(), gpu_count=rest.get("gpu_count", 0))
    return effective_options(
        "m",
        "1.0",
        layers,
        options,
        at_startup=rest.get("at_startup", False),
        declares_coroutine=rest.get("declares_coroutine", False),
    )


def asks(**parameters: Any) -> RegisterParameters:
    """A registration."""
    workers = parameters.pop("initial_workers", None)
    return RegisterParameters("m.mar", options=Said(parameters), initial_workers=workers)


def test_what_nobody_sets_has_the_contract_s_defaults() -> None:
    """One request a batch, 100 ms, 120 s, no workers."""
    options, warnings = choose()

    assert options == PoolOptions("m", "1.0", 0, 0, batch_size=1, max_batch_delay_s=0.1, queue_size=100)
    assert warnings == []


def test_the_request_wins_over_the_archive_over_the_models_setting_for_batches() -> None:
    """Each source in turn is taken away."""
    request, archive = asks(batch_size=9, max_batch_delay_s=0.011), {"batch_size": 4}
    configured = ModelDefaults(say(batch_size=6, max_batch_delay_s=0.04))

    assert choose(request, archive, configured)[0].batch_size == 9
    assert choose(None, archive, configured)[0].batch_size == 4
    assert choose(None, archive, configured)[0].max_batch_delay_s == 0.04
    assert choose(configured=configured)[0].batch_size == 6


def test_a_batch_delay_of_nothing_is_a_value_in_every_source() -> None:
    """0 is not the same as not given (contract, Q25)."""
    assert choose(asks(max_batch_delay_s=0.0))[0].max_batch_delay_s == 0.0
    assert choose(archive={"max_batch_delay_s": 0.0})[0].max_batch_delay_s == 0.0
    assert choose(configured=ModelDefaults(say(max_batch_delay_s=0.0)))[0].max_batch_delay_s == 0.0


def test_time_outs_that_the_archive_sets_win_and_those_it_does_not_set_do_not_count() -> None:
    """An archive with a configuration does not pin what it does not mention (contract, Q11)."""
    request = asks(response_timeout_s=13, startup_timeout_s=15)
    archive = {"startup_timeout_s": 33}

    options, _ = choose(
        request,
        archive,
        ModelDefaults(say(response_timeout_s=25)),
        RegistryOptions(defaults=say(response_timeout_s=41)),
    )

    assert (options.response_timeout_s, options.startup_timeout_s) == (13, 33)


def test_the_models_setting_wins_over_the_configured_default_time_out() -> None:
    """And the configured default over the built-in one."""
    server = RegistryOptions(defaults=say(response_timeout_s=41, startup_timeout_s=42))

    options, _ = choose(configured=ModelDefaults(say(response_timeout_s=25)), server=server)

    assert (options.response_timeout_s, options.startup_timeout_s) == (25, 42)


@pytest.mark.parametrize(
    ("archive", "expected"),
    [
        ({"min_workers": 1, "max_workers": 2}, (1, 2)),
        ({"min_workers": 3, "max_workers": 2}, (5, 5)),
        ({"min_workers": 3}, (5, 5)),
        ({"min_workers": 0, "max_workers": 2}, (5, 5)),
        ({"min_workers": 0, "max_workers": 2, "idle_timeout_s": 60.0}, (0, 2)),
        ({"max_workers": 3}, (5, 5)),
    ],
)
def test_only_a_whole_pair_of_worker_numbers_in_the_archive_counts(archive: Said, expected: tuple[int, int]) -> None:
    """Half a pair, or one that contradicts itself, is told of and not used."""
    options, warnings = choose(asks(initial_workers=5), archive)

    assert (options.min_workers, options.max_workers) == expected
    assert bool(warnings) == (expected == (5, 5))


def test_the_models_setting_has_workers_only_at_start_up() -> None:
    """A registration by API does not see them (contract 2.1)."""
    configured = ModelDefaults(say(min_workers=2, max_workers=3))

    by_api, _ = choose(configured=configured, server=RegistryOptions(workers_by_api=1, workers_at_startup=1))
    at_start, _ = choose(
        configured=configured, server=RegistryOptions(workers_by_api=1, workers_at_startup=1), at_startup=True
    )

    assert (by_api.min_workers, by_api.max_workers) == (1, 1)
    assert (at_start.min_workers, at_start.max_workers) == (2, 3)


def test_the_most_workers_are_never_fewer_than_the_fewest() -> None:
    """A `models` entry that names only one of the two still gives a usable pair."""
    lonely_least, _ = choose(configured=ModelDefaults(say(min_workers=4)), at_startup=True)
    lonely_most, _ = choose(
        configured=ModelDefaults(say(max_workers=1)), server=RegistryOptions(workers_at_startup=2), at_startup=True
    )

    assert (lonely_least.min_workers, lonely_least.max_workers) == (4, 4)
    assert (lonely_most.min_workers, lonely_most.max_workers) == (2, 2)


def test_a_model_uses_all_accelerators_unless_it_says_otherwise() -> None:
    """Device ids that the server has narrow the choice."""
    assert choose(gpu_count=2)[0].gpu_ids == (0, 1)
    assert choose(archive={"device_ids": (1,)}, gpu_count=2)[0].gpu_ids == (1,)
    assert choose(archive={"device_type": "cpu"}, gpu_count=2)[0].gpu_ids == ()


def test_one_wrong_device_id_spoils_the_whole_list() -> None:
    """So says the contract (7.1); we tell of it."""
    options, warnings = choose(archive={"device_ids": (0, 7)}, gpu_count=2)

    assert options.gpu_ids == (0, 1)
    assert "deviceIds [0, 7]" in warnings[0]


def test_a_gpu_model_on_a_machine_without_one_runs_on_the_cpu() -> None:
    """And describe says so."""
    options, warnings = choose(archive={"device_type": "gpu"})

    assert options.gpu_ids == ()
    assert "no accelerator" in warnings[0]


def test_the_rest_comes_from_the_archive_alone() -> None:
    """Queue, tickets, client time-out, retries and our own keys."""
    archive = {
        "queue_size": 3,
        "use_job_ticket": True,
        "client_timeout_s": 0.25,
        "default_priority": 3,
        "max_retry_timeout_s": 1.0,
        "retry_on_worker_death": False,
        "batch_isolation": False,
        "worker_start": "fresh",
        "batch_policy": "fixed",
    }

    options, _ = choose(archive=archive)

    assert options == PoolOptions(
        "m",
        "1.0",
        0,
        0,
        batch_policy="fixed",
        client_timeout_s=0.25,
        default_priority=3,
        queue_size=3,
        use_job_ticket=True,
        max_retry_timeout_s=1.0,
        retry_on_worker_death=False,
        batch_isolation=False,
        worker_start="fresh",
    )


def test_the_archives_memory_limit_and_readiness_rule_win_over_the_servers() -> None:
    """0 is a limit of none, which an archive may ask for."""
    server = RegistryOptions(defaults=say(max_worker_memory_bytes=500, readiness_rule="min"))

    unset, _ = choose(server=server)
    own, _ = choose(archive={"max_worker_memory_bytes": 0, "readiness_rule": "all"}, server=server)

    assert (unset.max_worker_memory_bytes, unset.readiness_rule) == (500, "min")
    assert (own.max_worker_memory_bytes, own.readiness_rule) == (0, "all")


def test_the_bounds_of_a_workers_life_come_from_the_archive() -> None:
    """Recycling, restarts, and what a crash means."""
    archive = {
        "max_restarts": 5,
        "no_restart_exit_codes": (3,),
        "on_crash": "fail",
        "max_requests_per_worker": 1000,
        "max_worker_age_s": 60.0,
        "max_worker_growth_bytes": 7,
        "health_interval_s": 5.0,
    }

    assert choose(archive=archive)[0] == PoolOptions(
        "m",
        "1.0",
        0,
        0,
        max_restarts=5,
        no_restart_exit_codes=(3,),
        on_crash="fail",
        max_requests_per_worker=1000,
        max_worker_age_s=60.0,
        max_worker_growth_bytes=7,
        health_interval_s=5.0,
    )


def test_a_client_time_out_of_nothing_is_none() -> None:
    """0 means that clients wait for ever (contract 7.1)."""
    assert choose(archive={"client_timeout_s": 0.0})[0].client_timeout_s is None


@pytest.mark.parametrize(
    ("requested", "configured", "manifest", "runtime"),
    [
        ("python", "python3", "python", "python3"),
        ("python3", None, "python", "python3"),
        (None, None, "python3", "python3"),
        (None, None, None, "python"),
        (None, "ruby", "python3", "python3"),
    ],
)
def test_the_models_setting_wins_over_request_and_manifest_for_the_runtime(
    requested: str | None, configured: str | None, manifest: str | None, runtime: str
) -> None:
    """The order of contract 2.1."""
    assert effective_runtime(requested, ModelDefaults(runtime_type=configured), manifest) == runtime


def test_the_archive_decides_whether_workers_follow_the_need_before_the_server_does() -> None:
    """`autoscale` of the model's configuration, then the setting."""
    on = RegistryOptions(defaults=say(autoscale=True))

    assert not choose()[0].autoscale
    assert choose(server=on)[0].autoscale
    assert not choose(archive={"autoscale": False}, server=on)[0].autoscale
    assert choose(archive={"autoscale": True})[0].autoscale


def test_an_idle_time_out_counts_only_where_there_may_be_no_worker() -> None:
    """With a least number of one or more nobody sleeps."""
    asleep, _ = choose(archive={"min_workers": 0, "max_workers": 2, "idle_timeout_s": 60.0})
    awake, _ = choose(archive={"min_workers": 1, "max_workers": 2, "idle_timeout_s": 60.0})

    assert asleep.idle_timeout_s == 60.0
    assert awake.idle_timeout_s is None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"min_workers": 2}, "minWorkers 2 of the model's configuration is not used: it needs maxWorkers beside it"),
        ({"max_workers": 2}, "maxWorkers 2 of the model's configuration is not used: it needs minWorkers beside it"),
        (
            {"min_workers": 3, "max_workers": 2},
            "minWorkers 3 and maxWorkers 2 of the model's configuration are not used: maxWorkers must not be below "
            "minWorkers",
        ),
    ],
)
def test_numbers_of_workers_that_are_not_used_name_what_the_file_says_and_what_is_missing(
    config: dict[str, int], words: str
) -> None:
    """And no number that stands nowhere."""
    assert choose(archive=config)[1] == [words]


def test_a_goal_needs_its_latency_and_finds_its_batch_size_itself() -> None:
    """Without `latencyGoalMs` the policy is not used, and a warning says so; a named batch size stays the bound."""
    kept, no_warnings = choose(archive={"batch_policy": "goal", "latency_goal_s": 0.2, "length_from": "body_bytes"})
    bounded, _ = choose(archive={"batch_policy": "goal", "latency_goal_s": 0.2, "batch_size": 8})
    left_out, warnings = choose(archive={"batch_policy": "goal", "length_from": "body_bytes"})

    assert (kept.batch_policy, kept.latency_goal_s, kept.batch_size) == ("goal", 0.2, 64)
    assert kept.length_from == "body_bytes"
    assert no_warnings == []
    assert bounded.batch_size == 8
    assert (left_out.batch_policy, left_out.batch_size, left_out.length_from) == ("idle", 1, None)
    assert "latencyGoalMs" in warnings[0]


def test_a_model_with_samples_is_checked_before_it_is_given_batches() -> None:
    """Unless its configuration says otherwise; without samples there is nothing to check with."""
    samples = (Sample(body=b"x"),)

    assert choose(archive={"samples": samples})[0].batch_check == "refuse"
    assert choose(archive={"samples": samples, "batch_check": "warn"})[0].batch_check == "warn"
    assert choose(archive={"samples": samples, "batch_check": "off"})[0].batch_check == "off"
    assert choose()[0].batch_check == "off"
    for config in ({"warm_up": True}, {"batch_check": "refuse"}):
        assert choose(archive=config)[1] == [
            "warmUp and batchCheck of the model's configuration are not used: it has no samples"
        ]


def test_there_are_as_many_workers_of_several_devices_as_there_are_devices_for() -> None:
    """Contract 10.5: both numbers are cut, which describe says."""
    config = {"parallel_type": "tp", "parallel_level": 2, "min_workers": 3, "max_workers": 4}

    options, warnings = choose(archive=config, gpu_count=5)

    assert (options.min_workers, options.max_workers, options.most_workers) == (2, 2, 2)
    assert (options.parallel_type, options.parallel_level, options.ranks) == ("tp", 2, 2)
    assert warnings == ["there are at most 2 workers: each has 2 of 5 devices"]
    on_cpu, warnings = choose(archive=config)
    assert (on_cpu.min_workers, on_cpu.max_workers, on_cpu.ranks, warnings) == (3, 4, 2, [])
    custom = {"parallel_type": "custom", "parallel_level": 2}
    assert choose(archive=custom, gpu_count=4)[0].ranks == 0


def test_too_few_devices_for_one_worker_are_an_error() -> None:
    """Rather than a version that can never have a worker."""
    with pytest.raises(NotEnoughDevices):
        choose(archive={"parallel_type": "pp", "parallel_level": 4}, gpu_count=2)


def restored_with(least: int, most: int, said: Said = NOTHING) -> SnapshotVersion:
    """A version of a snapshot with so many workers."""
    always = say(batch_size=5, max_batch_delay_s=0.03, response_timeout_s=7, startup_timeout_s=8)
    workers = say(min_workers=least, max_workers=most)
    return SnapshotVersion("m", "1.0", "m.mar", True, Said(always, workers, said))


RESTORED = restored_with(2, 3, say(parallel_level=2))


def test_a_snapshot_goes_before_everything() -> None:
    """Workers, batches and time-outs; what it says nothing of comes from the archive."""
    archive = {
        "min_workers": 9,
        "max_workers": 9,
        "batch_size": 9,
        "max_batch_delay_s": 0.9,
        "response_timeout_s": 90,
        "startup_timeout_s": 90,
        "queue_size": 4,
    }

    options, warnings = choose(asks(batch_size=1), archive, restored=RESTORED)

    assert (options.min_workers, options.max_workers, options.batch_size, options.queue_size) == (2, 3, 5, 4)
    assert (options.max_batch_delay_s, options.response_timeout_s, options.startup_timeout_s) == (0.03, 7, 8)
    assert warnings == []


def test_the_devices_of_a_worker_come_from_the_snapshot_if_it_names_some() -> None:
    """And else from the archive."""
    archive = {"parallel_type": "pp", "parallel_level": 4, "device_type": "gpu"}

    assert choose(archive=archive, restored=RESTORED, gpu_count=8)[0].parallel_level == 2
    assert choose(archive=archive, restored=restored_with(2, 3), gpu_count=8)[0].parallel_level == 4


def test_a_plan_says_by_itself_how_many_ranks_a_restored_worker_has() -> None:
    """What the snapshot has of it is no word beside it."""
    archive = {"parallel": ParallelPlan({"tp": 4}, {"up": "colwise", "down": "rowwise"})}

    assert choose(archive=archive, restored=RESTORED)[0].ranks == 4


def test_a_version_without_workers_is_restored_without() -> None:
    """Unless it is one that wakes when it is asked."""
    none = restored_with(0, 3)

    assert choose(restored=none)[0].max_workers == 0
    assert choose(archive={"idle_timeout_s": 60.0}, restored=none)[0].max_workers == 3


# ------------------------------------------------------------------------------------------------- memory


def test_what_a_registration_says_of_memory_goes_before_the_models_setting_and_that_before_the_archive() -> None:
    """Each of the three by itself; nobody's word is nobody's."""
    archive = {"memory_bytes": 1, "load": "start", "is_pinned": True}
    configured = ModelDefaults(say(memory_bytes=2, load="on_demand"))

    options, _ = choose(archive=archive, configured=configured, requested=asks(memory_bytes=3))

    assert (options.memory_bytes, options.is_pinned) == (3, True)
    assert options.idle_timeout_s == math.inf
    assert choose()[0].memory_bytes is None


def test_a_model_that_is_loaded_on_demand_has_no_worker_before_it_is_asked() -> None:
    """Its least number is how many the first request brings, one at least; an idle time-out counts on."""
    own = {"load": "on_demand", "min_workers": 2, "max_workers": 4}

    options, _ = choose(archive=own)
    by_default, _ = choose(server=RegistryOptions(defaults=say(load="on_demand")))
    idle, _ = choose(archive={"load": "on_demand", "idle_timeout_s": 60.0})
    not_it, _ = choose(
        archive={"load": "start"}, server=RegistryOptions(defaults=say(load="on_demand"), workers_by_api=1)
    )

    assert (options.min_workers, options.max_workers, options.least_awake) == (0, 4, 2)
    assert (by_default.min_workers, by_default.max_workers, by_default.least_awake) == (0, 1, 1)
    assert idle.idle_timeout_s == 60.0
    assert (not_it.min_workers, not_it.idle_timeout_s) == (1, None)


@pytest.mark.parametrize(("minimum", "maximum"), [(2, 3), (0, 0)])
def test_a_snapshot_of_a_scaled_model_is_restored_as_it_was(minimum: int, maximum: int) -> None:
    """Somebody wanted its workers always, or never: it is not loaded on demand."""
    restored = restored_with(minimum, maximum, say(load="on_demand"))

    options, _ = choose(restored=restored)

    assert (options.min_workers, options.max_workers, options.idle_timeout_s) == (minimum, maximum, None)


def test_a_snapshot_of_a_model_on_demand_is_restored_asleep() -> None:
    """Whatever the server's own setting says by then."""
    restored = restored_with(0, 3, say(memory_bytes=5, load="on_demand", is_pinned=True))

    options, _ = choose(restored=restored)

    assert (options.min_workers, options.max_workers, options.idle_timeout_s) == (0, 3, math.inf)
    assert (options.memory_bytes, options.is_pinned) == (5, True)


def test_a_model_for_a_cluster_has_no_devices_of_this_machine() -> None:
    """Its resources are in the configuration's words, one CPU where they say nothing."""
    config = {
        "launcher": "ray",
        "worker_resources": {"cpus": 2.0, "gpus": 0.5, "memory": 1 << 30, "tpu": 4.0},
        "worker_placement": "pack",
    }

    options, warnings = choose(archive=config, gpu_count=8)

    assert options.gpu_ids == ()
    assert options.ray == RayOptions(2.0, 0.5, 1 << 30, {"tpu": 4.0}, "pack")
    assert choose(archive={"launcher": "ray"})[0].ray == RayOptions(1.0)
    assert warnings == []


def test_resources_without_a_cluster_are_not_used_and_that_is_said() -> None:
    """A forgotten `launcher: ray`."""
    options, warnings = choose(archive={"worker_resources": {"cpus": 2.0}})

    assert options.ray is None
    assert warnings == ["workerResources of the model's configuration are not used: they need launcher ray"]


def test_a_worker_of_several_processes_does_not_go_to_a_cluster() -> None:
    """Both keys are named."""
    with pytest.raises(BadInput, match="launcher is ray and parallelType tp"):
        choose(archive={"launcher": "ray", "parallel_type": "tp", "parallel_level": 2})


@pytest.mark.parametrize(
    ("archive", "most"),
    [
        ({}, 64),
        ({"most_concurrent": 200}, 200),
        ({"batch_size": 4}, 64),
        ({"is_concurrent": False}, None),
        ({"sequence_batching": True, "sequence_max_idle_s": 1.0}, None),
        ({"continuous_batching": True}, None),
        ({"batch_policy": "goal", "latency_goal_s": 1.0}, None),
        ({"batch_check": "refuse"}, None),
        ({"parallel_type": "tp", "parallel_level": 2}, None),
    ],
)
def test_a_declared_coroutine_runs_as_such_where_nothing_speaks_against_it(
    archive: dict[str, Any], most: int | None
) -> None:
    """Its worker waits for slow clients, as it does for every other declared handler."""
    options, warnings = choose(archive=archive, declares_coroutine=True)

    assert (options.most_concurrent if options.is_concurrent else None) == most
    assert options.holds_coroutines is (most is not None)
    assert not any("asyncCommunication" in warning for warning in warnings)


def test_the_key_s_own_coroutines_are_torchserve_s() -> None:
    """A thousand of them, none of which waits for a slow client."""
    options, _ = choose(archive={"is_concurrent": True}, declares_coroutine=True)

    assert (options.is_concurrent, options.most_concurrent, options.holds_coroutines) == (True, 1000, False)


@pytest.mark.parametrize(
    "archive",
    [
        {"is_concurrent": True},
        {"continuous_batching": True},
        {"sequence_batching": True, "sequence_max_idle_s": 1.0},
        {"batch_policy": "fixed"},
        {"parallel_type": "tp", "parallel_level": 2},
    ],
)
def test_preprocess_is_not_overlapped_where_batches_are_not_sent_one_by_one(archive: dict[str, Any]) -> None:
    """A sentence says so; without the key nobody hears of it."""
    options, warnings = choose(archive={"overlap_preprocess": True, **archive}, gpu_count=2)
    _, before = choose(archive=archive, gpu_count=2)

    assert options.overlap_preprocess is False
    [warning] = [warning for warning in warnings if warning not in before]
    assert warning.startswith("overlapPreprocess of the model's configuration is not used")


@pytest.mark.parametrize("policy", ["idle", "goal"])
def test_preprocess_is_overlapped_where_batches_may_be_sent_ahead(policy: str) -> None:
    """With the ordinary policy, and with a goal."""
    options, warnings = choose(archive={"overlap_preprocess": True, "batch_policy": policy, "latency_goal_s": 1.0})

    assert options.overlap_preprocess is True
    assert warnings == []
