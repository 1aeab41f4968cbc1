"""What the driver says, over libraries that answer as NVIDIA's do; and what doctor makes of it."""

from __future__ import annotations

import ctypes
import logging
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ssdtune.cli import doctor
from ssdtune.device import open_device
from ssdtune.device.cpu import CpuDevice
from ssdtune.device.cuda import CudaDevice
from ssdtune.device.driver import Card, Driver, look
from tests.device.pretended import OnHost, PretendedCuda

GIB = 1 << 30
T4 = Card("Tesla T4", 15 * GIB, GIB // 8, (7, 5), "")


def _put(reference: Any, value: int) -> None:
    reference._obj.value = value


@dataclass
class Libraries:
    """Stands for libcuda.so.1 and libnvidia-ml.so.1."""

    cards: list[Card] = field(default_factory=lambda: [T4])
    version: int = 12080
    error: int = 0
    nvml_error: int = 0
    has_nvml: bool = True

    def load(self, name: str) -> Libraries:
        if name == "libnvidia-ml.so.1" and not self.has_nvml:
            raise OSError(name)
        return self

    def cuDriverGetVersion(self, version: Any) -> int:
        _put(version, self.version)
        return 0

    def cuInit(self, flags: int) -> int:
        return self.error

    def cuDeviceGetCount(self, count: Any) -> int:
        _put(count, len(self.cards))
        return 0

    def cuDeviceGet(self, device: Any, index: int) -> int:
        _put(device, index + 40)
        return 0

    def cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> int:
        name.value = self._card(device).name.encode()
        return 0

    def cuDeviceTotalMem_v2(self, size: Any, device: ctypes.c_int) -> int:
        _put(size, self._card(device).total_bytes)
        return 0

    def cuDeviceGetAttribute(self, value: Any, number: int, device: ctypes.c_int) -> int:
        card = self._card(device)
        mode = {"": 0, "prohibited": 2, "exclusive": 3}[card.mode]
        _put(value, {75: card.capability[0], 76: card.capability[1], 20: mode}[number])
        return 0

    def cuDeviceGetPCIBusId(self, place: Any, size: int, device: ctypes.c_int) -> int:
        place.value = str(device.value).encode()
        return 0

    def nvmlInit_v2(self) -> int:
        return self.nvml_error

    def nvmlDeviceGetHandleByPciBusId_v2(self, place: bytes, handle: Any) -> int:
        _put(handle, int(place))
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: ctypes.c_void_p, memory: Any) -> int:
        memory._obj.used = self.cards[(handle.value or 0) - 40].used_bytes
        return 0

    def _card(self, device: ctypes.c_int) -> Card:
        return self.cards[device.value - 40]


def _absent(name: str) -> Any:
    raise OSError(name)


def test_cards_are_as_the_driver_says() -> None:
    other = Card("GeForce RTX 4090", 24 * GIB, 20 * GIB, (8, 9), "exclusive")
    assert look(Libraries([T4, other]).load) == Driver((12, 8), (T4, other))
    assert look(Libraries([T4], has_nvml=False).load) == Driver(
        (12, 8), (replace(T4, used_bytes=None),)
    )
    assert look(Libraries([T4], nvml_error=9).load) == Driver(
        (12, 8), (replace(T4, used_bytes=None),)
    )
    assert look(Libraries(error=100).load) == Driver((12, 8), (), 100)
    assert look(_absent) is None


def told(monkeypatch: pytest.MonkeyPatch, driver: Driver | None, build: str = "12.8") -> list[doctor.Check]:  # fmt: skip
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr("ssdtune.device.driver.look", lambda: driver)
    monkeypatch.setattr(doctor, "_torch_cuda_version", lambda: build)
    return list(doctor._gpu())


@pytest.mark.parametrize(
    ("driver", "build", "status", "words"),
    [
        (None, "12.8", "warn", "training runs on the CPU"),
        (Driver((12, 8), (), 100), "12.8", "warn", "shows no device (CUDA error 100)"),
        (Driver((12, 8), (T4,)), "12.8", "ok", "Tesla T4, 15.0 GiB, no bf16: computes in fp16 with loss scaling"),
        (Driver((12, 2), (T4,)), "12.8", "ok", "Tesla T4"),  # minor versions go together
        (Driver((11, 4), (T4,)), "12.8", "warn", "the driver goes up to CUDA 11.4 and torch is for 12.8"),
        (Driver((12, 8), (T4,)), "", "warn", "this torch is built without CUDA"),
        (Driver((12, 8), (replace(T4, mode="exclusive"),)), "12.8", "warn", "compute mode is exclusive"),
        (Driver((12, 8), (replace(T4, used_bytes=5 * GIB),)), "12.8", "warn", "of which 5.00 GiB are taken"),
        (Driver((12, 8), (replace(T4, capability=(9, 0)),)), "12.8", "ok", "computes in bf16"),
        (Driver((12, 8), (replace(T4, capability=(6, 1)),)), "12.8", "ok", "computes in fp32"),
    ],
)  # fmt: skip
def test_doctor_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, driver: Driver | None, build: str, status: str, words: str
) -> None:
    (check,) = told(monkeypatch, driver, build)
    assert check.status == status and words in check.detail
    assert bool(check.remedy) == (status != "ok")


def test_doctor_shows_which_cards_were_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    told(monkeypatch, None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    monkeypatch.setattr("ssdtune.device.driver.look", lambda: Driver((12, 8), (T4,)))
    first, choice = doctor._gpu()
    assert first.name == "GPU cuda:0" and '"1": cuda:0 is the first of these' in choice.detail
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setattr("ssdtune.device.driver.look", lambda: Driver((12, 8), (), 100))
    (check,) = doctor._gpu()
    assert 'CUDA_VISIBLE_DEVICES is ""' in check.detail


@pytest.mark.parametrize(
    ("capability", "says"),
    [((6, 0), "fp16"), ((6, 1), "fp32"), ((7, 0), "fp16"), ((7, 5), "fp16"), ((8, 0), "bf16")],
)
def test_doctor_and_the_device_agree_on_dtypes(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], says: str
) -> None:
    pretended = PretendedCuda(capability=capability)
    pretended.install(monkeypatch)
    with OnHost(pretended):
        device = CudaDevice(0)
    halves = {"bf16": torch.bfloat16, "fp16": torch.float16}
    wanted = next((name for name, dtype in halves.items() if device.supports(dtype)), "fp32")
    assert wanted == says
    assert f"computes in {says}" in doctor._computes_in(capability)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a card")
def test_a_card_that_torch_cannot_use_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    driver = tmp_path / "version"
    monkeypatch.setattr("ssdtune.device._driver", lambda: driver)
    with caplog.at_level(logging.WARNING, "ssdtune"):
        assert isinstance(open_device("auto"), CpuDevice)
        assert caplog.text == ""
        driver.touch()
        assert isinstance(open_device("auto"), CpuDevice)
    assert (
        "has an NVIDIA driver, but torch" in caplog.text and "Computing on the CPU" in caplog.text
    )


def test_with_several_cards_a_taken_one_names_the_choice(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def warned(count: int) -> str:
        caplog.clear()
        cuda = PretendedCuda(count=count)
        cuda.free_bytes = GIB
        cuda.install(monkeypatch)
        with OnHost(cuda), caplog.at_level(logging.WARNING, "ssdtune"):
            open_device("auto")
        return caplog.text

    assert "--device names another card" in warned(2)
    assert "--device" not in warned(1)
