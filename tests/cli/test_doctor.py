"""What doctor finds: on this machine, in folders, and where something is missing."""

import importlib.metadata
import importlib.util
import re
import tomllib
from pathlib import Path

import pytest

import ssdtune
from ssdtune.cli import doctor
from ssdtune.io.mounts import Mount, mount_of


def by_name(report):
    return {check.name: check for check in report.checks}


def test_everything_is_looked_at(tmp_path):
    report = doctor.examine([tmp_path])
    checks = by_name(report)
    wanted = {
        "python", "system", "torch", "transformers", "peft", "native part", "I/O io_uring",
        "I/O libaio", "I/O threads", "I/O python", "host memory", "locked memory",
        "GPUDirect Storage", f"folder {tmp_path}",
    }  # fmt: skip
    assert wanted <= set(checks)
    assert any(name.startswith("GPU") for name in checks)
    for check in report.checks:
        assert check.status in ("ok", "warn", "fail")
        assert check.detail
        assert bool(check.remedy) == (check.status != "ok")
    assert sum(check.detail == "chosen by auto" for check in report.checks) == 1
    assert report.usable


def test_the_python_function_is_the_same(tmp_path):
    assert by_name(ssdtune.doctor([tmp_path])).keys() == by_name(doctor.examine([tmp_path])).keys()


def test_lowest_versions_are_those_of_the_project():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lowest = dict(
        re.fullmatch(r"([\w-]+)>=([\d.]+)", line).groups() for line in project["dependencies"]
    )
    for name, numbers in doctor._NEEDED.items():
        assert lowest[name] == ".".join(map(str, numbers)).removesuffix(".0")


def test_missing_and_old_packages_fail_with_the_command_to_run(monkeypatch):
    def version(name):
        if name == "peft":
            raise importlib.metadata.PackageNotFoundError
        return "1.0.0"

    monkeypatch.setattr(importlib.metadata, "version", version)
    checks = {check.name: check for check in doctor._packages()}
    assert (checks["peft"].status, checks["peft"].remedy) == ("fail", "pip install peft")
    assert checks["torch"].status == "fail"
    assert checks["torch"].remedy == 'pip install "torch>=2.4"'


@pytest.mark.parametrize(
    ("make", "detail"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.write_text(""), "is not a folder"),
    ],
)
def test_folders_that_do_not_fit(tmp_path, make, detail):
    make(tmp_path / "swap")
    report = doctor.examine([tmp_path / "swap"])
    check = by_name(report)[f"folder {tmp_path / 'swap'}"]
    assert (check.status, check.detail) == ("fail", detail)
    assert not report.usable


def test_a_folder_is_left_as_it_was(tmp_path):
    doctor.examine([tmp_path])
    assert list(tmp_path.iterdir()) == []


def test_memory_file_systems_are_called_so():
    folder = Path("/dev/shm")
    if not folder.is_dir() or mount_of(folder).kind != "tmpfs":
        pytest.skip("/dev/shm is not a tmpfs here")
    (check,) = doctor._folder(folder)
    assert check.status == "warn"
    assert "this is memory, not a drive" in check.detail


@pytest.mark.parametrize(
    ("kind", "words"),
    [("nfs4", "move over it in each step"), ("overlay", "the container's own layer")],
)
def test_file_systems_that_are_no_local_drive_are_called_so(tmp_path, monkeypatch, kind, words):
    monkeypatch.setattr(doctor, "mount_of", lambda path: Mount(path, kind, "x"))
    (check,) = doctor._folder(tmp_path)
    assert check.status == "warn"
    assert words in check.detail


def test_exhausted_aio_contexts_are_a_warning(tmp_path):
    (tmp_path / "aio-nr").write_text("65536\n")
    (tmp_path / "aio-max-nr").write_text("65536\n")
    (check,) = doctor._aio(tmp_path)
    assert check.status == "warn"
    assert "sysctl fs.aio-max-nr" in check.remedy


def test_a_check_that_breaks_is_a_finding_and_the_others_still_run(monkeypatch, tmp_path):
    def broken():
        raise RuntimeError("no such thing")

    monkeypatch.setattr(doctor, "_memory", broken)
    report = doctor.examine([tmp_path])
    check = by_name(report)["broken"]
    assert (check.status, check.detail) == ("fail", "RuntimeError: no such thing")
    assert f"folder {tmp_path}" in by_name(report)


def test_a_fail_makes_it_unusable():
    good = doctor.Check("a", "ok", "fine")
    bad = doctor.Check("b", "fail", "broken", "Mend it.")
    assert doctor.DoctorReport((good,)).usable
    report = doctor.DoctorReport((good, bad))
    assert not report.usable
    assert "fail  b  broken\n" in report.text()
    assert "-> Mend it." in report.text()
    assert "1 checks failed" in report.text()


@pytest.mark.parametrize(("cuda", "extra"), [("", "gds"), ("13.0", "gds"), ("12.8", "gds-cu12")])
def test_a_missing_kvikio_comes_with_the_extra_for_this_torch(monkeypatch, cuda, extra):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "kvikio" else find(name)
    )
    monkeypatch.setattr(doctor, "_torch_cuda_version", lambda: cuda)
    (check,) = doctor._gds()
    assert (check.name, check.status) == ("GPUDirect Storage", "warn")
    assert check.detail.startswith("kvikio is not installed")
    assert f'pip install "ssdtune[{extra}]"' in check.remedy
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert extra in project["optional-dependencies"]
