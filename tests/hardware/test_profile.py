"""The whole profile, taken for real with the least effort, kept until the machine changes, and put into words."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ssdtune
from ssdtune.errors import ConfigError, FormatError, StorageError
from ssdtune.hardware.effort import FULL, QUICK
from ssdtune.hardware.figures import (
    BlockPoint,
    BlockProfile,
    Contention,
    CopyPoint,
    OtherLoad,
)
from ssdtune.hardware.limits import limits, sentences
from ssdtune.hardware.machine import describe_machine, machine_id
from ssdtune.hardware.measure import cached, measure
from ssdtune.hardware.profile import HardwareProfile, check_file, read_profile, save
from tests.hardware.tiny import TINY


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("drive")


SAID: list[tuple[str, float]] = []


@pytest.fixture(scope="module")
def profile(folder: Path) -> HardwareProfile:
    SAID.clear()
    return measure(
        [folder, folder / "later"],
        effort=TINY,
        backend="python",
        device="cpu",
        progress=lambda text, share: SAID.append((text, share)),
    )


@pytest.fixture
def never_measured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("measured anew")

    monkeypatch.setattr("ssdtune.hardware.measure.measure", fail)
    yield


def test_every_figure_is_there(profile: HardwareProfile, folder: Path) -> None:
    first, second = profile.directories
    assert second == replace(first, path=str(folder / "later"))  # one file system, measured once
    assert first.backend == "python" and profile.backends["python"] == ""
    assert profile.together is not None and profile.together.num_file_systems == 1
    assert profile.memory[0].threads == 1
    assert all(
        point.copy_bytes_per_s > 0 and point.triad_bytes_per_s > 0 for point in profile.memory
    )
    assert {point.form for point in profile.adam} >= {"numpy"}
    assert profile.contention is not None
    assert profile.copies == ()  # host memory is used in place
    (block,) = profile.blocks
    assert (block.shape, block.device) == ("llama, hidden 768", "cpu")
    assert block.parameters == block.active_parameters == 4 * 768**2 + 3 * 768 * 2048 + 2 * 768
    assert {point.dtype for point in block.points} == {"fp32", "bf16"}
    assert "fp32" in profile.compute_dtypes
    assert profile.seconds > 0 and profile.effort == TINY.name
    assert list(folder.iterdir()) == []


def test_progress_goes_from_0_to_1(profile: HardwareProfile) -> None:
    shares = [share for _, share in SAID]
    assert shares == sorted(shares) and 0 <= shares[0] < 0.5 and SAID[-1] == ("done", 1.0)
    told = " ".join(text for text, _ in SAID)
    for part in ("filling", "AdamW and drives at once", "memory", "block (llama, hidden 768)"):
        assert part in told


def test_the_planned_times_keep_to_the_promises() -> None:
    assert FULL.total_s + FULL.together_s < 100
    assert QUICK.total_s < 7


def test_rates(profile: HardwareProfile) -> None:
    rates = profile.rates()
    assert profile.together is not None
    assert rates.read_bytes_per_s == profile.together.read_bytes_per_s
    assert rates.adam_parameters_per_s == max(p.parameters_per_s for p in profile.adam)
    assert 0 < rates.adam_with_io_parameters_per_s <= rates.adam_parameters_per_s
    assert 0 < rates.io_with_adam_bytes_per_s <= rates.mixed_bytes_per_s
    assert rates.h2d_bytes_per_s is rates.d2h_bytes_per_s is rates.both_bytes_per_s is None
    assert set(rates.forward_flop_per_s) == set(rates.backward_flop_per_s) == {"fp32", "bf16"}
    assert profile.rates("small") == rates
    # a block that was not measured: the largest stands for it
    assert profile.rates("another") == rates
    bare = replace(
        profile, directories=(), together=None, contention=None, blocks=(), adam=(), memory=()
    )
    assert bare.rates().mixed_bytes_per_s == bare.rates().adam_with_io_parameters_per_s == 0
    assert sentences(bare) == []
    assert bare.text()


def with_blocks(profile: HardwareProfile, *blocks: BlockProfile) -> HardwareProfile:
    return replace(profile, blocks=blocks)


def a_block(digest: str, parameters: int, *rates: tuple[str, int, float]) -> BlockProfile:
    """Return a block with points of (dtype, tokens, FLOP per second); backward at half of it."""
    points = tuple(
        BlockPoint(
            dtype=dtype, sequences=1, sequence=tokens, forward_s=1.0, backward_s=4.0, forward_flop=rate
        )
        for dtype, tokens, rate in rates
    )  # fmt: skip
    return BlockProfile(
        shape=digest, digest=digest, device="cpu", parameters=parameters, active_parameters=parameters,
        hidden_size=1, points=points,
    )  # fmt: skip


def test_rates_between_measured_micro_batches(profile: HardwareProfile) -> None:
    # In no order, and in another dtype too.
    block = a_block(
        "a", 100, ("fp32", 1600, 30.0), ("fp32", 100, 10.0), ("bf16", 100, 7.0), ("fp32", 400, 40.0)
    )
    machine = with_blocks(profile, block)

    def rate(tokens: float | None) -> float:
        rates = machine.rates("a", tokens=tokens)
        assert rates.forward_flop_per_s["bf16"] == 7.0  # measured at one size: that
        assert rates.backward_flop_per_s["fp32"] == pytest.approx(
            rates.forward_flop_per_s["fp32"] / 2
        )
        return rates.forward_flop_per_s["fp32"]

    assert [rate(n) for n in (100, 400, 1600)] == pytest.approx([10, 40, 30])
    assert rate(200) == pytest.approx(25)  # half way, as 200 is twice 100 and half of 400
    assert rate(800) == pytest.approx(35)  # it may fall
    assert rate(1) == rate(0) == rate(99.5) == pytest.approx(10)  # nothing beyond what was measured
    assert rate(1e9) == rate(None) == 30


def test_rates_are_those_of_the_nearest_block(profile: HardwareProfile) -> None:
    small, middle, large = (
        a_block(name, size, ("fp32", 8, rate))
        for name, size, rate in (
            ("small", 10**6, 1.0),
            ("middle", 10**8, 2.0),
            ("large", 10**9, 3.0),
        )
    )
    machine = with_blocks(profile, middle, large, small)

    def rate(digest: str | None = None, **options: Any) -> float:
        return machine.rates(digest, **options).forward_flop_per_s["fp32"]

    assert rate() == 3.0
    assert rate("small") == rate("small", parameters=10**9) == 1.0  # measured itself
    assert [rate(None, parameters=n) for n in (1, 10**6, 9 * 10**6, 2 * 10**7, 10**10)] == [
        1,
        1,
        1,
        2,
        3,
    ]
    assert rate("unknown", parameters=10**8) == 2.0  # a model that wasn't measured
    assert with_blocks(profile).rates("small", parameters=5).forward_flop_per_s == {}


def test_a_dtype_that_the_nearest_block_lacks_is_taken_from_the_next(
    profile: HardwareProfile,
) -> None:
    near, next_, far = (
        a_block("near", 100, ("bf16", 8, 1.0)),
        a_block("next", 1000, ("bf16", 8, 2.0), ("fp32", 8, 3.0)),
        a_block("far", 10**6, ("fp32", 8, 4.0)),
    )
    rates = with_blocks(profile, far, near, next_).rates(parameters=100)
    assert rates.forward_flop_per_s == {"bf16": 1.0, "fp32": 3.0}


def a_machine(profile: HardwareProfile) -> HardwareProfile:
    """Return a machine with round figures and a card."""
    point = BlockPoint(
        dtype="bf16", sequences=4, sequence=512, forward_s=1.0, backward_s=4.0, forward_flop=100e12
    )
    block = BlockProfile(
        shape="x", digest="x", device="cuda:0", parameters=10, active_parameters=10, hidden_size=1,
        points=(replace(point, sequences=1, forward_s=9.0), point),
    )  # fmt: skip
    return replace(
        profile,
        directories=(replace(profile.directories[0], mixed_bytes_per_s=2.6e9),),
        adam=(replace(profile.adam[0], parameters_per_s=1e9),),
        memory=(replace(profile.memory[0], copy_bytes_per_s=64e9),),
        contention=Contention(
            threads=8, adam_parameters_per_s=2.0, adam_with_io_parameters_per_s=1.0,
            io_bytes_per_s=10.0, io_with_adam_bytes_per_s=10.0,
        ),
        copies=tuple(
            CopyPoint(device="cuda:0", pinned=pinned, direction=direction, bytes_per_s=rate)
            for pinned, rate in ((False, 1e9), (True, 20e9))
            for direction in ("h2d", "d2h", "both")
        ),
        compute_dtypes=("fp32", "bf16"),
        blocks=(block,),
    )  # fmt: skip


def test_what_limits_training(profile: HardwareProfile) -> None:
    machine = a_machine(profile)
    rates = machine.rates()
    assert rates.adam_with_io_parameters_per_s == 0.5e9
    assert rates.h2d_bytes_per_s == 20e9
    assert rates.forward_flop_per_s == {"bf16": 100e12}
    assert rates.backward_flop_per_s == {"bf16": 50e12}
    found = limits(machine)
    # 26 bytes at 2.6 GB/s; AdamW at half its rate; 64 bytes at 64 GB/s; 4 bytes at 20 GB/s.
    assert found.per_parameter == pytest.approx(
        {"drives": 10e-9, "AdamW": 2e-9, "memory": 1e-9, "link": 0.2e-9}
    )
    assert found.compute_per_token == pytest.approx(4 / 100e12 + 4 / 50e12)
    assert found.binding == "drives"
    assert found.break_even_tokens == pytest.approx(10e-9 / 120e-15)
    text = machine.text()
    for part in (
        "14+12 bytes per parameter (bf16)",
        "10 ns per parameter",
        "83.3k tokens per step",
        "pinned",
    ):
        assert part in text
    assert "share the cores" not in text
    slow = replace(machine, adam=(replace(machine.adam[0], parameters_per_s=1e6),))
    assert limits(slow).binding == "AdamW"
    assert "share the cores" in " ".join(sentences(replace(machine, copies=())))


def test_table(profile: HardwareProfile) -> None:
    failed = replace(profile.directories[0], path="/other", problem="only 1 GB", read_bytes_per_s=0)
    cached_drive = replace(profile.directories[0], caches=("write",), warnings=("[bold] is odd",))
    others = OtherLoad(cores=2, programs_cores=1.3, stolen_cores=0.0)
    text = replace(profile, directories=(failed, cached_drive), others=others).text()
    for part in (
        "AdamW numpy, threads: 1", "GB/s", "best with python", "/other: only 1 GB", "A cache of drive or host",
        "What limits full fine-tuning here:", "Warning: [bold] is odd", "python: works",
        "Warning: other programs used 1.3 of 2 cores",
    ):  # fmt: skip
        assert part in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_round_trip_through_json(profile: HardwareProfile, tmp_path: Path) -> None:
    values = json.loads(json.dumps(profile.to_dict(), allow_nan=False))
    values["directories"][0]["key of a later version"] = 1
    assert HardwareProfile.from_dict({**values, "key of a later version": 1}) == profile
    path = tmp_path / "a folder" / "profile.json"
    save(profile, path)
    assert read_profile(path) == profile
    assert [file.name for file in path.parent.iterdir()] == ["profile.json"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"schema_version": 99}',
        '{"schema_version": "2"}',
        '"x"',
        "\x00",
        "\udcff",
        "[" * 10**5,
    ],
    ids=lambda text: text[:20] or "empty",
)
def test_files_that_are_no_profile(tmp_path: Path, text: str) -> None:
    path = tmp_path / "profile.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(
        FormatError,
        match=r"is no hardware profile: .*make it anew on its machine with ssdtune profile",
    ):
        read_profile(path)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(
        FormatError, match=r"no such file or directory\. Name a file that ssdtune profile"
    ):
        read_profile(tmp_path / "missing.json")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v["together"].update(read_bytes_per_s=-1), "together.read_bytes_per_s is -1"),
        (lambda v: v["memory"][0].update(copy_bytes_per_s=float("nan")), r"memory\[0\].copy_bytes_per_s is nan"),
        (lambda v: v["directories"][0].pop("direct"), r"directories\[0\] has no direct"),
        (lambda v: v["directories"][0].update(direct=1), "must be true or false, not 1"),
        (lambda v: v["directories"][0].update(queue_depth=1.5), "queue_depth must be a whole number, not 1.5"),
        (lambda v: v.update(effort=None), "effort must be text, not None"),
        (lambda v: v.update(adam={}), "adam must be a list"),
        (lambda v: v.update(machine=[]), "machine must be an object"),
        (lambda v: v.update(contention="x"), "contention must be an object"),
        (lambda v: v["directories"][0].update(read_bytes_per_s=1e30), r"read_bytes_per_s is 1e\+30; nothing has more"),
        (lambda v: v["directories"][0].update(read_bytes_per_s=1e-3), "at least 1, or 0 if it was not measured"),
        (lambda v: v["directories"][0].update(free_bytes=10**30), "free_bytes is a number of 31 digits"),
        (lambda v: v["directories"][0].update(path="nvme"), "has the path 'nvme'; it must be absolute"),
        (lambda v: v["adam"][0].update(parameters_per_s=10**400), "is a number of 401 digits"),
        (lambda v: v["adam"][0].update(threads=0), "threads is 0; it must be at least 1"),
        (lambda v: v["blocks"][0].update(parameters=0), "parameters is 0; it must be at least 1"),
        (lambda v: v["blocks"][0]["points"][0].update(forward_s=0), "forward_s is 0; it must be above 0"),
        (lambda v: v["machine"].update(memory_bytes=10**30), "machine.memory_bytes is a number of 31 digits"),
        (lambda v: v["machine"].update(cores="two"), "machine.cores is 'two'; it must be a whole number"),
    ],
)  # fmt: skip
def test_absurd_values_are_named(profile: HardwareProfile, change: Any, message: str) -> None:
    values = copy.deepcopy(json.loads(json.dumps(profile.to_dict())))
    change(values)
    with pytest.raises(ValueError, match=message):
        HardwareProfile.from_dict(values)


def keep(profile: HardwareProfile, path: Path, folder: Path) -> list[Path]:
    save(profile, path)
    return [folder, folder / "later"]


@pytest.mark.usefixtures("never_measured")
def test_a_kept_profile_is_used_until_something_changes(
    profile: HardwareProfile, folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "profile.json"
    wanted = keep(profile, path, folder)
    caplog.set_level(logging.INFO, "ssdtune")
    assert cached(wanted, path, effort=TINY) == profile
    save(replace(profile, effort="full"), path)
    assert cached(wanted, path, effort=TINY).effort == "full"  # the better one will do
    machine = {**profile.machine, "ssdtune": "0.0.1"}
    for changed, reason in (
        (replace(profile, machine_id="0" * 16), "of another machine"),
        (replace(profile, machine=machine), "of version 0.0.1"),
        (replace(profile, schema_version=1), "schema_version is 1"),
        (replace(profile, directories=profile.directories[:1]), "of other directories"),
        (None, "no figures"),
    ):
        caplog.clear()
        path.unlink()
        if changed is not None:
            save(changed, path)
        with pytest.raises(RuntimeError, match="measured anew"):
            cached(wanted, path, effort=TINY)
        assert reason in caplog.text
    save(profile, path)
    with pytest.raises(RuntimeError, match="measured anew"):
        cached(wanted, path, effort=TINY, force=True)
    with pytest.raises(RuntimeError, match="measured anew"):
        cached(wanted, path)  # taken quickly


@pytest.mark.usefixtures("never_measured")
def test_the_block_of_another_model_is_added(
    profile: HardwareProfile, folder: Path, tmp_path: Path
) -> None:
    path = tmp_path / "profile.json"
    wanted = keep(profile, path, folder)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({
        "model_type": "gpt2", "n_embd": 32, "n_layer": 3, "n_head": 2, "vocab_size": 100, "n_positions": 64,
    }))  # fmt: skip
    more = cached(wanted, path, model=str(tmp_path), effort=TINY, device="cpu")
    assert more.blocks[:1] == profile.blocks and more.blocks[1].shape == "gpt2, hidden 32"
    assert cached(wanted, path, model=str(config), effort=TINY) == more == read_profile(path)
    assert replace(more, blocks=profile.blocks) == profile


def test_a_profile_that_cannot_be_kept_is_still_good(
    folder: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, profile: HardwareProfile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "profile.json"
    with pytest.raises(StorageError, match="write of"):
        save(profile, path)
    monkeypatch.setattr("ssdtune.hardware.measure.measure", lambda *a, **k: profile)
    with caplog.at_level(logging.WARNING, "ssdtune"):
        assert cached([folder], path, effort=TINY) == profile
        with pytest.raises(StorageError, match=r"Name another file with --output"):
            cached([folder], path, effort=TINY, must_keep=True)
    assert caplog.text.count("taken again next time") == 1


@pytest.mark.parametrize("name", ["/dev/null", "/dev/full"])
def test_a_device_is_never_replaced_by_a_file(profile: HardwareProfile, name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}, which is a device"):
        check_file(Path(name))
    with pytest.raises(StorageError, match=f"write of {name} failed"):
        save(profile, Path(name))
    assert Path(name).is_char_device()


def test_files_that_cannot_be_written_are_refused_before_measuring(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="which is a folder"):
        check_file(tmp_path)
    with pytest.raises(ConfigError, match="/file is a file"):
        check_file(tmp_path / "file" / "deeper" / "profile.json")
    with pytest.raises(ConfigError, match="/proc: "):
        check_file(Path("/proc/profile.json"))
    check_file(tmp_path / "new folder" / "profile.json")
    check_file(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_machine_id_follows_machine_and_drives(tmp_path: Path) -> None:
    def machine(name: str, cpu: str, memory: int, card: str = "") -> Path:
        root = tmp_path / name
        (root / "proc/driver/nvidia/gpus/0").mkdir(parents=True)
        (root / "proc/cpuinfo").write_text(f"processor : 0\nmodel name\t: {cpu}\nmodel name\t: x\n")
        (root / "proc/meminfo").write_text(f"MemTotal:  {memory} kB\n")
        if card:
            (root / "proc/driver/nvidia/gpus/0/information").write_text(f"Model: \t {card}\n")
        return root

    one = machine("one", "Fast CPU 9000", 10_000_000)
    assert describe_machine(one)["cpu"] == "Fast CPU 9000"
    assert describe_machine(one)["memory_bytes"] == 10_240_000_000
    same = machine("same", "Fast CPU 9000", 10_000_999)  # another kernel keeps more for itself
    assert machine_id([], root=one) == machine_id([], root=same)
    ids = {
        machine_id([], root=one),
        machine_id([], root=machine("two", "Slow CPU", 10_000_000)),
        machine_id([], root=machine("three", "Fast CPU 9000", 20_000_000)),
        machine_id([], root=machine("four", "Fast CPU 9000", 10_000_000, "Fast Card")),
        machine_id([tmp_path], root=one),
        machine_id([Path("/proc")], root=one),
    }
    assert len(ids) == 6
    assert machine_id([tmp_path], root=one) == machine_id([tmp_path / "missing"], root=one)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "does not exist"),
        ("{", "not readable as JSON"),
        ("[" * 10**5, "not readable as JSON"),
        ("[]", "is no JSON object"),
        (
            '{"model_type": "llama", "quantization_config": {"quant_method": "awq"}}',
            "quant_method: awq",
        ),
        ('{"model_type": "vit"}', "vit is no causal language model"),
        ('{"model_type": "t5"}', "t5 is an encoder-decoder model"),
        ('{"model_type": "llama", "hidden_size": 1000000000000}', "hidden_size is 1000000000000"),
        ('{"model_type": "llama", "num_attention_heads": "many"}', "cannot"),
        ('{"model_type": "nonsense"}', "transformers cannot read this configuration"),
    ],
    ids=lambda text: str(text)[:40],
)
def test_a_model_that_cannot_be_read_is_refused_first(
    folder: Path, tmp_path: Path, text: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)

    def refuse(*args: Any) -> None:
        raise RuntimeError("drives were measured")

    monkeypatch.setattr("ssdtune.hardware.measure._with_drives", refuse)
    with pytest.raises(ConfigError, match=message):
        measure([folder], model=str(tmp_path / "config.json"), effort=TINY)


def test_a_folder_without_write_access_is_refused_first(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="ame a directory"):
        ssdtune.profile([tmp_path / "file"], effort=TINY)
