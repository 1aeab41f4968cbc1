"""What all tests share: threads, no network, a fixed hypothesis profile, what the markers need, and what saves time."""

import gc
import os
import tempfile
from collections.abc import Iterator

# Before torch is imported anywhere: tensors are tiny, and a second thread only spins where tests run side by side.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ["OMP_WAIT_POLICY"] = "passive"  # and nothing spins where a test asks for more
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


def pytest_collection_finish() -> None:
    """Let garbage collection, of which every run does some, pass over the hundred thousands of objects of imported modules."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def short_rehearsals() -> Iterator[None]:
    """Rehearsals measure with nothing in the caches for seconds; here it only matters that they do what they do."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ssdtune.train.rehearse.COLD_BYTES", 1 << 20)
        patch.setattr("ssdtune.train.rehearse.MOST_STEPS", 1)
        yield


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
