"""What torch.compile needs of a machine besides torch. Only looks, without importing torch; `ssdtune.model.compile` tries."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path


def missing_tool(*, for_card: bool) -> str:
    """Return what is missing and how to get it; empty if nothing is.

    Args:
        for_card: Kernels are made for a card, by Triton, which compiles only what launches them.
    """
    named = os.environ.get("CC" if for_card else "CXX", "")
    names = [named] if named else ["gcc", "clang"] if for_card else ["g++"]
    if not any(shutil.which(name) for name in names):
        language, package = ("C", "gcc") if for_card else ("C++", "g++")
        told = f" as {'CC' if for_card else 'CXX'} says" if named else ""
        return f"no {language} compiler ({' or '.join(names)}{told}). Install one: sudo apt install {package}"
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not header.exists():
        return f"{header} is missing. Install Python's headers: sudo apt install python3-dev"
    if for_card and importlib.util.find_spec("triton") is None:
        return "Triton is missing. It comes with torch for CUDA: https://pytorch.org/get-started/locally"
    return ""
