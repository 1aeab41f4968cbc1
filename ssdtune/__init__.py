"""ssdtune: fine-tune language models larger than memory by streaming them from NVMe.

The names in `__all__` are the supported Python interface. Importing it loads neither torch nor
transformers; the functions of `ssdtune.api` load what they need.
"""

from typing import Any

__version__ = "0.1.0"

# These two packages are loaded before the functions of the same name replace them as attributes here;
# later imports from them ("from ssdtune.plan.schedule import ...") are not affected.
import ssdtune.export
import ssdtune.plan  # noqa: F401
from ssdtune.api import doctor, export, finetune, plan, profile

_LAZY = {
    "Config": "ssdtune.config.schema",
    "load_config": "ssdtune.config.load",
    "SsdtuneError": "ssdtune.errors",
}

__all__ = [
    "Config", "SsdtuneError", "__version__", "doctor", "export", "finetune", "load_config", "plan",
    "profile",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'ssdtune' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_LAZY[name]), name)
