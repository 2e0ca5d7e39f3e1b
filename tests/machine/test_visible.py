"""Which devices workers may see: the vendors' variables, as TorchServe reads them and as marserve does."""

from __future__ import annotations

import pytest

from marserve.errors import BadSettings
from marserve.machine.accelerators import Accelerator, Vendor
from marserve.machine.finding import read_nvidia, with_instances
from marserve.machine.visible import choose_visible, order_of_devices
from support.machines import EIGHT_H100, MIG_LIST, MIG_TABLE

EIGHT = read_nvidia(EIGHT_H100)[0]
CUT = with_instances(*read_nvidia(MIG_TABLE), MIG_LIST)
FIRST, SECOND = "MIG-c6d4f1ef-42e4-5de3-91c7-45d71c87eb3f", "MIG-cba663e8-9bed-5b25-b243-5985ef7c9beb"


def numbered(count: int) -> list[Accelerator]:
    """Devices of which nothing is known but how many there are."""
    return [Accelerator("GPU", str(number), str(number)) for number in range(count)]


def choose(value: str) -> tuple[Accelerator, ...]:
    """The devices of eight that CUDA_VISIBLE_DEVICES shows."""
    return choose_visible(EIGHT, "nvidia", {"CUDA_VISIBLE_DEVICES": value}, is_strict=True)


def seen(value: str, *, is_strict: bool = True, installed: list[Accelerator] = EIGHT) -> list[str]:
    """The handles of the devices that CUDA_VISIBLE_DEVICES shows."""
    devices = choose_visible(installed, "nvidia", {"CUDA_VISIBLE_DEVICES": value}, is_strict=is_strict)
    return [device.handle for device in devices]


@pytest.mark.parametrize(
    ("value", "visible"),
    [("0,1", "01"), ("3", "3"), ("0, 2", "02"), ("", ""), ("-1", ""), ("0,9,1", "0"), ("0,0,1", "0"), ("3,2", "32")],
)
def test_torchserve_reads_numbers_as_cuda_does(value: str, visible: str) -> None:
    """The list ends at the first number that is no device."""
    assert seen(value, is_strict=False, installed=numbered(4)) == list(visible)


@pytest.mark.parametrize("value", ["GPU-1f3a", "0;1", "a,b", "0,,1"])
def test_visible_devices_that_are_no_numbers_stop_torchserve(value: str) -> None:
    """Its message, with the variable, its value and an example."""
    with pytest.raises(
        BadSettings, match=r"^Invalid format: The env defining visible devices must be integers separated by commas"
    ) as error:
        seen(value, is_strict=False)

    assert f"CUDA_VISIBLE_DEVICES is '{value}'" in str(error.value)


@pytest.mark.parametrize("is_strict", [False, True])
def test_only_the_own_vendors_variable_counts(is_strict: bool) -> None:
    """Each vendor has a variable; without it all devices are visible."""

    def count(installed: int, vendor: Vendor | None, **environment: str) -> int:
        return len(choose_visible(numbered(installed), vendor, environment, is_strict=is_strict))

    assert count(4, "amd", CUDA_VISIBLE_DEVICES="0", HIP_VISIBLE_DEVICES="0,1") == 2
    assert count(4, "intel", XPU_VISIBLE_DEVICES="2") == 1
    assert count(4, "nvidia") == 4
    assert count(1, "apple", CUDA_VISIBLE_DEVICES="") == 1
    assert count(0, None, CUDA_VISIBLE_DEVICES="x") == 0


@pytest.mark.parametrize("is_strict", [False, True])
@pytest.mark.parametrize(
    ("environment", "handles"),
    [
        ({"ZE_AFFINITY_MASK": "1,3"}, ["1", "3"]),
        ({"ZE_AFFINITY_MASK": " "}, ["0", "1", "2", "3"]),
        ({"ZE_AFFINITY_MASK": "0.1, 2"}, ["0.1", "2"]),
        ({"ZE_AFFINITY_MASK": "1,3", "XPU_VISIBLE_DEVICES": "1"}, ["3"]),
        ({"XPU_VISIBLE_DEVICES": "2,0"}, ["2", "0"]),
    ],
)
def test_intels_devices_are_those_of_the_mask_that_torch_goes_by(
    environment: dict[str, str], handles: list[str], is_strict: bool
) -> None:
    """Among those TorchServe's variable chooses; both are read whatever is started."""
    seen = choose_visible(numbered(4), "intel", environment, is_strict=is_strict)

    assert [device.handle for device in seen] == handles


@pytest.mark.parametrize("value", ["0,7", "x", "0.a", "0,"])
def test_a_mask_that_names_no_device_is_refused(value: str) -> None:
    """`torchserve` leaves out what is none, as Level Zero does."""
    with pytest.raises(BadSettings, match=r"^ZE_AFFINITY_MASK is .* names no device: there are 0, 1, 2, 3\."):
        choose_visible(numbered(4), "intel", {"ZE_AFFINITY_MASK": value}, is_strict=True)

    assert len(choose_visible(numbered(4), "intel", {"ZE_AFFINITY_MASK": value}, is_strict=False)) <= 1


def test_uuids_name_devices() -> None:
    """In the order that is given, in full or as far as no other begins so; workers are shown them under these names."""
    wanted = [EIGHT[6].uuid, EIGHT[2].uuid]

    assert seen(",".join(wanted)) == wanted
    assert seen("GPU-66,GPU-2222") == wanted


# What torch's parser makes of a list, by the places of the entries that it takes; None: it drops one of them.
LISTS = [
    ("0,1", [0, 1]),
    ("0, 1", [0, 1]),
    (" 3", [3]),
    ("03", [3]),
    ("0,-1,2", [0]),
    ("GPU-00,GPU-11", [0, 1]),
    ("GPU-11,-1", [1]),
    ("GPU-00,0", None),
    ("0,GPU-00", None),
    ("GPU-00, GPU-11", None),
    (" GPU-00", None),
    ("gpu-00", None),
    ("GPU-00,gpu-11", None),
    ("GPU-00,MIG-11", None),
    ("MIG-00,GPU-00", None),
    ("MIG-00,0", None),
]


@pytest.mark.parametrize(("value", "places"), LISTS)
def test_a_list_is_read_as_torch_reads_it(value: str, places: list[int] | None) -> None:
    """What torch would drop in silence is an error with the entry and how to write it."""
    if places is None:
        with pytest.raises(BadSettings, match="CUDA stops reading it at") as error:
            seen(value)
        assert "for example CUDA_VISIBLE_DEVICES=GPU-" in str(error.value)
    else:
        assert [device.label for device in choose(value)] == [str(place) for place in places]


@pytest.mark.torch
def test_the_table_of_lists_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row against torch's own parser: a list of which it drops an entry, or all, is one that is refused here."""
    cuda = pytest.importorskip("torch.cuda", reason="needs the extra `torch`")
    for value, places in LISTS:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", value)
        taken = cuda._parse_visible_devices()
        entries = [entry.strip() for entry in value.split(",")]
        ended = entries[: entries.index("-1")] if "-1" in entries else entries
        if places is None:
            assert len(taken) < len(ended), (value, taken)
        else:
            assert len(taken) == len(places), (value, taken)
            if isinstance(taken[0], int):
                assert taken == places, value


@pytest.mark.parametrize("value", ["NoDevFiles", "none", "-1", "", " "])
def test_words_for_none_show_none(value: str) -> None:
    """Slurm writes the first for a job without devices."""
    assert seen(value) == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("0,9", "there is no device 9: there are 0 (GPU-00000000-"),
        ("GPU-9", "there is no device GPU-9: there are"),
        ("GPU-", "there is no device GPU-"),
        ("MIG-1", "there is no device MIG-1"),
        ("0,0", "names device 0 twice"),
        ("GPU-2222,GPU-22222222", "names device GPU-22222222 twice"),
        ("0;1", "'0;1' names no device: name devices by number or by UUID, for example CUDA_VISIBLE_DEVICES=0,1"),
        ("0,,1", "'' names no device"),
    ],
)
def test_a_device_that_is_not_there_stops_the_server(value: str, reason: str) -> None:
    """Whoever named it meant it: variable, value, what there is, and the next step."""
    with pytest.raises(BadSettings) as error:
        seen(value)

    assert str(error.value).startswith(f"CUDA_VISIBLE_DEVICES is {value!r}")
    assert reason in str(error.value)


def test_without_a_variable_all_instances_and_whole_gpus_are_visible() -> None:
    """In the order of their GPUs."""
    devices = choose_visible(CUT, "nvidia", {}, is_strict=True)

    assert [device.handle for device in devices] == ["0", FIRST, SECOND, "2"]


@pytest.mark.parametrize(
    ("value", "handles"),
    [(SECOND, [SECOND]), (f"{SECOND},{FIRST}", [SECOND, FIRST]), ("1", [FIRST, SECOND]), ("2,1", ["2", FIRST, SECOND])],
)
def test_instances_are_named_by_uuid_or_by_their_gpu(value: str, handles: list[str]) -> None:
    """The number of a GPU that is cut stands for all of its instances."""
    assert seen(value, installed=CUT) == handles


def test_a_uuid_is_believed_where_the_tool_tells_none() -> None:
    """The runtime will know."""
    assert seen("GPU-abc,GPU-def", installed=numbered(2)) == ["GPU-abc", "GPU-def"]
    assert seen("MIG-GPU-abc/1/0", installed=numbered(2)) == ["MIG-GPU-abc/1/0"]


def test_rocms_two_variables_count_one_after_the_other() -> None:
    """Numbers of the second are places in the first one's list; HIP reads CUDA's name where its own is missing."""

    def handles(*, is_strict: bool = True, **environment: str) -> list[tuple[str, str]]:
        devices = choose_visible(numbered(8), "amd", environment, is_strict=is_strict)
        return [(device.label, device.handle) for device in devices]

    assert handles(ROCR_VISIBLE_DEVICES="4,5") == [("4", "0"), ("5", "1")]
    assert handles(ROCR_VISIBLE_DEVICES="4,5", HIP_VISIBLE_DEVICES="1") == [("5", "1")]
    assert handles(CUDA_VISIBLE_DEVICES="3") == [("3", "3")]
    assert len(handles(CUDA_VISIBLE_DEVICES="3", is_strict=False)) == 8


def test_workers_are_told_to_count_as_the_tool_does_unless_the_operator_said_otherwise() -> None:
    """CUDA's own order puts the fastest first: on a machine of different GPUs a number would mean two devices."""
    assert order_of_devices("nvidia", {}) == {"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    assert order_of_devices("nvidia", {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}) == {}
    assert order_of_devices("amd", {}) == {}
    assert order_of_devices(None, {}) == {}


def test_in_an_order_that_only_cuda_knows_a_number_is_no_certain_device() -> None:
    """Nothing is said of its memory or its place then; a UUID is certain in any order."""
    different = [EIGHT[0], EIGHT[1]._replace(name="NVIDIA L4")]
    order = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}

    unknown = choose_visible(different, "nvidia", order, is_strict=True)
    certain = choose_visible(different, "nvidia", order | {"CUDA_VISIBLE_DEVICES": EIGHT[1].uuid}, is_strict=True)

    assert [(device.handle, device.label, device.memory_bytes) for device in unknown] == [("0", "", 0), ("1", "", 0)]
    assert [device.label for device in certain] == ["1"]
    assert choose_visible(EIGHT, "nvidia", order, is_strict=True) == tuple(EIGHT)
