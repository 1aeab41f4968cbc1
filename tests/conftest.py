"""What all tests share: threads, no network, a fixed hypothesis profile, and what the markers need."""

import os
import tempfile

# Before torch is imported anywhere: a few threads, so that tests can run side by side.
os.environ["OMP_NUM_THREADS"] = "2"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
# No profile of this machine: plans must not depend on what somebody measured here.
os.environ["XDG_CACHE_HOME"] = f"{tempfile.gettempdir()}/ssdtune-no-cache-{os.getpid()}"

import importlib.util

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "ssdtune",
    deadline=None,
    derandomize=True,  # the same examples every time; a failure repeats
    database=None,
    max_examples=60,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("ssdtune")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--run-slow", action="store_true", help="also run tests marked slow")


def pytest_runtest_setup(item: pytest.Item) -> None:
    marks = {mark.name for mark in item.iter_markers()}
    if "slow" in marks and not item.config.getoption("--run-slow"):
        pytest.skip("slow: give --run-slow")
    if "root" in marks and os.geteuid() != 0:
        pytest.skip("needs root")
    if "gds" in marks and importlib.util.find_spec("kvikio") is None:
        pytest.skip("needs kvikio")
    if "gpu" in marks:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a CUDA device")
