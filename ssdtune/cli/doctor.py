"""What works on this machine: one line for each thing that a run needs or gains from, with the remedy.

Only looks: nothing is installed, changed or measured, and neither torch nor transformers is imported, so it
also works where these are broken. How fast things are is for `ssdtune.hardware.profile` to say.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssdtune import __version__
from ssdtune.io.mounts import IN_MEMORY, NETWORK, OVERLAY, mount_of
from ssdtune.units import GIB, format_disk, format_memory

_NEEDED = {
    "torch": (2, 4),
    "transformers": (5, 0),
    "peft": (0, 18),
    "accelerate": (1, 1),
    "safetensors": (0, 5),
    "numpy": (1, 26),
    "psutil": (5, 9),
}
"""Lowest versions; pyproject.toml says the same and a test compares them."""


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that was looked at.

    Attributes:
        status: "ok"; "warn": ssdtune works, but slower or without something; "fail": it does not work.
        remedy: What to do; empty if ok.
    """

    name: str
    status: str
    detail: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class DoctorReport:
    """All checks; `usable` is false if one of them failed."""

    checks: tuple[Check, ...]

    @property
    def usable(self) -> bool:
        """Say whether ssdtune can run here."""
        return all(check.status != "fail" for check in self.checks)

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "schema_version": 1,
            "version": __version__,
            "usable": self.usable,
            "checks": [dataclasses.asdict(check) for check in self.checks],
        }

    def text(self) -> str:
        """Return a table for people, with what to do below each line that is not ok."""
        width = max(len(check.name) for check in self.checks)
        lines = []
        for check in self.checks:
            lines.append(f"{check.status:4}  {check.name:{width}}  {check.detail}")
            if check.remedy:
                lines.append(f"{'':4}  {'':{width}}  -> {check.remedy}")
        failed = sum(check.status == "fail" for check in self.checks)
        lines.append("")
        lines.append("ssdtune works here." if not failed else f"{failed} checks failed.")
        return "\n".join(lines)


def examine(swap_dirs: Sequence[str | os.PathLike[str]] = ()) -> DoctorReport:
    """Look at this machine and at the folders where states would be kept (the current one by default)."""
    checks: list[Check] = []
    looks = (
        _system, _packages, _native, _backends, _memory, _locked, _aio, _gpu, _gds, _compiler,
    )  # fmt: skip
    for look in looks:
        checks += _guarded(look)
    for folder in swap_dirs or ["."]:
        checks += _guarded(lambda: _folder(Path(folder)), f"folder {folder}")  # noqa: B023
    return DoctorReport(tuple(checks))


def _guarded(look: Callable[[], Iterable[Check]], name: str = "") -> list[Check]:
    """Run one group of checks; what breaks there is a finding too, and the others still run."""
    try:
        return list(look())
    except Exception as error:
        name = name or look.__name__.strip("_")
        return [Check(name, "fail", f"{type(error).__name__}: {error}", "Please report this.")]


def _system() -> Iterator[Check]:
    version = platform.python_version()
    # An older Python cannot even install the package; the version is shown for reports.
    yield Check("python", "ok", version)
    kernel = f"{platform.system()} {platform.release()} {platform.machine()}"
    if sys.platform == "linux":
        yield Check("system", "ok", kernel)
    else:
        yield Check("system", "fail", kernel, "ssdtune needs Linux.")


def _packages() -> Iterator[Check]:
    for name, lowest in _NEEDED.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            yield Check(name, "fail", "not installed", f"pip install {name}")
            continue
        numbers = tuple(int(part) for part in re.findall(r"\d+", version)[:2])
        if numbers >= lowest:
            yield Check(name, "ok", version)
        else:
            wanted = ".".join(map(str, lowest))
            yield Check(name, "fail", f"{version} is too old", f'pip install "{name}>={wanted}"')


def _native() -> Iterator[Check]:
    try:
        native: Any = importlib.import_module("ssdtune._native")
    except ImportError as error:
        reason = "not built" if isinstance(error, ModuleNotFoundError) else str(error)
        yield Check(
            "native part", "warn", f"{reason}; Python and torch do its work, more slowly",
            "Install a C++20 compiler (g++ 11 or newer) and install ssdtune again.",
        )  # fmt: skip
        return
    simd = getattr(native, "simd_name", None)
    yield Check("native part", "ok", f"Adam kernel: {simd()}" if callable(simd) else "loaded")


def _backends() -> Iterator[Check]:
    from ssdtune.io.select import probe_backends

    probes = probe_backends()
    first = next((probe.name for probe in probes if probe.available), None)
    for probe in probes:
        name = f"I/O {probe.name}"
        if probe.available:
            yield Check(name, "ok", "chosen by auto" if probe.name == first else "works")
        else:
            reason, _, remedy = probe.reason.partition(". ")
            yield Check(name, "warn", reason.rstrip("."), remedy or "Another backend is used.")
    if first is None:
        yield Check("I/O", "fail", "no backend works", "Run again with -v.")


def _memory() -> Iterator[Check]:
    from ssdtune.hardware.memory import available_host_memory

    limit = available_host_memory()
    text = f"{format_memory(limit.bytes)} can be used ({limit.source})"
    if limit.bytes >= 1 * GIB:
        yield Check("host memory", "ok", text)
    else:
        yield Check("host memory", "warn", text, "Close programs, or raise the container's limit.")


def _locked() -> Iterator[Check]:
    from ssdtune.hardware.memory import lockable_memory

    limit = lockable_memory()
    if limit is None:
        yield Check("locked memory", "ok", "no limit")
    elif limit >= 1 * GIB:
        yield Check("locked memory", "ok", f"limit {format_memory(limit)}")
    else:
        yield Check(
            "locked memory", "warn",
            f"limit {format_memory(limit)} (RLIMIT_MEMLOCK); buffers may stay unpinned",
            'Raise it with "ulimit -l unlimited" or in /etc/security/limits.conf.',
        )  # fmt: skip


def _aio(proc: Path = Path("/proc/sys/fs")) -> Iterator[Check]:
    try:
        used = int((proc / "aio-nr").read_text())
        most = int((proc / "aio-max-nr").read_text())
    except (OSError, ValueError):
        return
    text = f"{used} of {most} aio requests of the system are taken"
    if most - used >= 1024:
        yield Check("aio-max-nr", "ok", text)
    else:
        yield Check("aio-max-nr", "warn", text, "sudo sysctl fs.aio-max-nr=1048576")


def _gpu() -> Iterator[Check]:
    from ssdtune.device.driver import look

    driver, build = look(), _torch_cuda_version()
    if driver is None:
        yield Check("GPU", "warn", "no NVIDIA driver (libcuda.so.1); training runs on the CPU",
                    "Nothing to do if there is no GPU; otherwise install its driver.")  # fmt: skip
        return
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if not driver.cards:
        told = "" if visible is None else f'; CUDA_VISIBLE_DEVICES is "{visible}"'
        yield Check(
            "GPU", "warn", f"the driver shows no device (CUDA error {driver.error}){told}",
            "Check nvidia-smi, CUDA_VISIBLE_DEVICES, and that the container was given the GPU.",
        )  # fmt: skip
        return
    too_old = bool(build) and driver.supports[0] < int(build.partition(".")[0])
    supported = f"{driver.supports[0]}.{driver.supports[1]}"
    for index, card in enumerate(driver.cards):
        name, text = f"GPU cuda:{index}", f"{card.name}, {format_memory(card.total_bytes)}"
        if not build:
            yield Check(name, "warn", f"{text}, but this torch is built without CUDA",
                        "Install torch with CUDA: https://pytorch.org/get-started/locally")  # fmt: skip
        elif too_old:
            yield Check(
                name, "warn", f"{text}, but the driver goes up to CUDA {supported} and torch is for {build}",
                f"Update the driver, or install a torch for CUDA {driver.supports[0]}.",
            )  # fmt: skip
        elif card.mode:
            yield Check(name, "warn", f"{text}, its compute mode is {card.mode}",
                        "Let others end what holds it, or: sudo nvidia-smi -c 0")  # fmt: skip
        elif card.used_bytes is not None and card.used_bytes > card.total_bytes // 4:
            yield Check(
                name, "warn", f"{text}, of which {format_memory(card.used_bytes)} are taken by other programs",
                "nvidia-smi lists them. Plans use what is free, or gpu_memory; --device names another card.",
            )  # fmt: skip
        else:
            yield Check(
                name, "ok", f"{text}, {_computes_in(card.capability)}, torch for CUDA {build}"
            )
    if visible is not None:
        yield Check(
            "GPU choice", "ok", f'CUDA_VISIBLE_DEVICES is "{visible}": cuda:0 is the first of these'
        )


def _computes_in(capability: tuple[int, int]) -> str:
    """Return the dtype of `auto`; the rule is `ssdtune.device.cuda`'s, which needs torch."""
    if capability >= (8, 0):
        return "computes in bf16"
    if capability >= (7, 0) or capability == (6, 0):
        return "no bf16: computes in fp16 with loss scaling"
    return "no fast bf16 or fp16: computes in fp32"


def _torch_cuda_version() -> str:
    """Return the CUDA version that torch was built for, without importing it; empty if for none."""
    try:
        spec = importlib.util.find_spec("torch")
        text = Path(spec.origin).with_name("version.py").read_text() if spec and spec.origin else ""
    except (OSError, ValueError, ImportError):
        return ""
    match = re.search(r"^cuda\b.*=\s*'([\d.]+)'", text, re.MULTILINE)
    return match.group(1) if match else ""


def _gds(module: Path = Path("/dev/nvidia-fs0")) -> Iterator[Check]:
    """Look at kvikio, which `--backend kvikio` needs, and at whether it goes past host memory."""
    from ssdtune.io.kvikio_probe import kvikio_problem, kvikio_state

    name = "GPUDirect Storage"
    if importlib.util.find_spec("kvikio") is None:
        extra = "gds-cu12" if _torch_cuda_version().startswith("12.") else "gds"
        yield Check(
            name, "warn", "kvikio is not installed; only --backend kvikio needs it",
            f'Nothing to do without a GPU; else, if wanted: pip install "ssdtune[{extra}]" (2 to 3 GB).',
        )  # fmt: skip
        return
    problem = kvikio_problem()
    if problem:
        reason, _, remedy = problem.partition(". ")
        yield Check(name, "warn", f"{reason}; only --backend kvikio needs it", remedy)
        return
    state = kvikio_state()
    text = f"kvikio {state.version}, {state.how}"
    if state.mode == "gds":
        yield Check(name, "ok", text)
    elif module.exists():
        yield Check(name, "warn", text,
                    "The driver nvidia-fs is loaded; NVIDIA's gdscheck -p says what cuFile lacks.")  # fmt: skip
    else:
        yield Check(name, "warn", text,
                    "Works as it is. For the direct way load the driver: sudo modprobe nvidia-fs")  # fmt: skip


def _compiler() -> Iterator[Check]:
    """Look at what `--torch-compile` needs."""
    from ssdtune.device.driver import look
    from ssdtune.model.toolchain import missing_tool

    driver = look()
    for_card = bool(_torch_cuda_version() and driver and driver.cards)
    if problem := missing_tool(for_card=for_card):
        reason, _, remedy = problem.partition(". ")
        yield Check("torch.compile", "warn", f"{reason}; only --torch-compile needs it", remedy)
    else:
        yield Check("torch.compile", "ok", f"a {'C' if for_card else 'C++'} compiler was found")


def _folder(folder: Path) -> Iterator[Check]:
    name = f"folder {folder}"
    if not folder.is_dir():
        text = "is not a folder" if folder.exists() else "does not exist"
        yield Check(name, "fail", text, f'mkdir -p "{folder}"')
        return
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".ssdtune-doctor-") as file:
            direct = _opens_direct(Path(file.name))
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        yield Check(name, "fail", f"cannot be written: {reason}", "Name a writable folder.")
        return
    kind = mount_of(folder).kind
    text = f"{format_disk(shutil.disk_usage(folder).free)} free on {kind}"
    if kind in IN_MEMORY:
        yield Check(name, "warn", f"{text}: this is memory, not a drive", "Name a folder on NVMe.")
    elif kind in NETWORK:
        yield Check(name, "warn", f"{text}: all states would move over it in each step",
                    "Name a folder on a local NVMe drive.")  # fmt: skip
    elif kind in OVERLAY:
        yield Check(name, "warn", f"{text}: the container's own layer, slow and gone with the container",
                    "Mount a volume from a drive, and name it.")  # fmt: skip
    elif not direct:
        yield Check(name, "warn", f"{text}, no direct I/O: slower, and uses page cache",
                    "Use a local ext4 or xfs file system.")  # fmt: skip
    else:
        yield Check(name, "ok", f"{text}, direct I/O works")


def _opens_direct(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC))
    except OSError:
        return False
    return True
