"""A machine as the laws of its parts: how long an amount of work occupies each of them.

One set of constants per machine, whatever runs on it. `ssdtune.plan.ledger` says how much work an operation is;
this module turns it into seconds per resource, and `ssdtune.plan.simulator` shares the resources between lanes.
Nothing is measured here.

Resources: `ssd` (all drives together; reads and writes take turns), `h2d` and `d2h` (the two directions of the
link between host and device), `compute` (the device), `cores` (CPU), `adam` (the threads of the optimizer, which
need not take all cores), `dram` (memory bandwidth). On a machine that computes on its CPU, `compute` doesn't exist:
blocks and optimizer share `cores`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ssdtune.errors import ConfigError
from ssdtune.plan.simulator import Cost


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one operation moves and computes.

    Attributes:
        read_bytes, write_bytes: Between drives and memory.
        source_bytes: Of `read_bytes`, what comes from the model's own files.
        activation_bytes: Of both, block inputs and activations.
        requests: Transfers of whole states or matrices that this takes, each with its fixed cost.
        h2d_bytes, d2h_bytes: Between host and device.
        flop: On the device.
        compute_s: Seconds that this takes, where they were measured; then `flop` is 0.
        dram_bytes: Moved in host memory besides the above, each of which counts once there too.
        copied_bytes: Read and written by the device in between computing: gradients added up, norms taken.
        aside_bytes: Of `read_bytes`, what one thread copies to its place while others compute.
        adam_elements: Elements updated by the optimizer on the CPU.
        acquires_bytes, releases_bytes: Memory by kind, taken at the start and given back at the end.
    """

    read_bytes: float = 0
    write_bytes: float = 0
    source_bytes: float = 0
    activation_bytes: float = 0
    requests: float = 0
    h2d_bytes: float = 0
    d2h_bytes: float = 0
    flop: float = 0
    compute_s: float = 0
    dram_bytes: float = 0
    copied_bytes: float = 0
    aside_bytes: float = 0
    adam_elements: float = 0
    acquires_bytes: tuple[tuple[str, int], ...] = ()
    releases_bytes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Rates of a machine. All are for one user alone.

    Attributes:
        flop_per_s: What a whole block reaches on the device (or the CPU), not just its matrix products.
        compute_overhead_s: Fixed seconds of an operation that computes.
        h2d_bytes_per_s, d2h_bytes_per_s: The link's two directions.
        num_drives: Drives that are used as one.
        drive_read_bytes_per_s, drive_write_bytes_per_s: Of one drive, large requests.
        ssd_link_bytes_per_s: What all drives together can get across.
        ssd_overlap: How far the drives' time and the link's time run side by side, at least 1. With 1 they
            add up; the higher, the nearer the sum is to the longer of both (see `ssd_s`).
        request_s: Fixed seconds of one transfer of a whole state or matrix.
        source_bytes_per_s: Reading the model's own files, which lie on one of the drives; None for as fast as states.
        activation_pace: How fast block inputs and activations are moved, in units of the states' pace.
        dram_bytes_per_s: Memory bandwidth that copies and the optimizer can use together.
        copy_bytes_per_s: Of one thread that copies, each copied byte counted twice; None for `dram_bytes_per_s`.
        adam_elements_per_s: AdamW with data in memory.
        adam_core_share: Share of the cores that it occupies.
        io_core_share: Share of the cores that transfers occupy while the drives are busy.
        host_bytes, device_bytes: Memory.
        computes_on_cpu: Blocks and optimizer share the cores.
    """

    name: str
    flop_per_s: float
    compute_overhead_s: float = 0.0
    h2d_bytes_per_s: float = float("inf")
    d2h_bytes_per_s: float = float("inf")
    num_drives: int = 1
    drive_read_bytes_per_s: float
    drive_write_bytes_per_s: float
    ssd_link_bytes_per_s: float = float("inf")
    ssd_overlap: float = 1.0
    request_s: float = 0.0
    source_bytes_per_s: float | None = None
    activation_pace: float = 1.0
    dram_bytes_per_s: float = float("inf")
    copy_bytes_per_s: float | None = None
    adam_elements_per_s: float
    adam_core_share: float = 1.0
    io_core_share: float = 0.0
    host_bytes: int = 0
    device_bytes: int = 0
    computes_on_cpu: bool = False

    def __post_init__(self) -> None:
        problems = [
            f"{name} is {value:g}"
            for name, value in vars(self).items()
            if name.endswith("_per_s") and value is not None and not value > 0
        ]
        if self.num_drives < 1:
            problems.append(f"num_drives is {self.num_drives}")
        if self.ssd_overlap < 1:
            problems.append(f"ssd_overlap is {self.ssd_overlap:g}, it must be at least 1")
        if not self.activation_pace > 0:
            problems.append(f"activation_pace is {self.activation_pace:g}")
        if min(self.request_s, self.compute_overhead_s, self.host_bytes, self.device_bytes) < 0:
            problems.append("a time or a memory size is negative")
        if problems:
            raise ConfigError(
                f"hardware {self.name}: {', '.join(problems)}. Rates and counts must be above 0; "
                "measure again or correct the description."
            )

    def ssd_s(self, read_bytes: float, write_bytes: float, requests: float = 0) -> float:
        """Return the seconds for which a transfer occupies the drives.

        With D the time that the drives need and N the time on their common link, it takes
        (D^k + N^k)^(1/k) for k = `ssd_overlap`, and the fixed cost of each request.
        """
        drives = read_bytes / (self.num_drives * self.drive_read_bytes_per_s)
        drives += write_bytes / (self.num_drives * self.drive_write_bytes_per_s)
        link = (read_bytes + write_bytes) / self.ssd_link_bytes_per_s
        longer, shorter = max(drives, link), min(drives, link)
        if longer == 0:
            return requests * self.request_s
        ratio: float = (shorter / longer) ** self.ssd_overlap
        combined: float = longer * (1 + ratio) ** (1 / self.ssd_overlap)
        return combined + requests * self.request_s

    def compute_s(self, flop: float) -> float:
        """Return the seconds that the device computes."""
        return flop / self.flop_per_s + self.compute_overhead_s if flop else 0.0

    def cost(self, work: Work) -> Cost:
        """Return what an operation costs on this machine."""
        moved = work.read_bytes + work.write_bytes + work.h2d_bytes + work.d2h_bytes
        compute = work.compute_s + self.compute_s(work.flop)
        adam = work.adam_elements / self.adam_elements_per_s
        if self.computes_on_cpu:
            compute += work.copied_bytes / self.dram_bytes_per_s
            # The threads of a block share its work evenly: while one has to share its core, all wait.
            compute += 2 * work.aside_bytes / (self.copy_bytes_per_s or self.dram_bytes_per_s)
        ssd = self.ssd_s(work.read_bytes, work.write_bytes, work.requests)
        if work.source_bytes and self.source_bytes_per_s:
            usual = self.ssd_s(work.source_bytes, 0)
            ssd = max(0.0, ssd + work.source_bytes / self.source_bytes_per_s - usual)
        if work.activation_bytes:
            share = work.activation_bytes / (work.read_bytes + work.write_bytes)
            ssd += (
                share
                * self.ssd_s(work.read_bytes, work.write_bytes)
                * (1 / self.activation_pace - 1)
            )
        cores = adam * self.adam_core_share + ssd * self.io_core_share
        seconds = {
            "ssd": ssd,
            "h2d": work.h2d_bytes / self.h2d_bytes_per_s,
            "d2h": work.d2h_bytes / self.d2h_bytes_per_s,
            "compute": 0.0 if self.computes_on_cpu else compute,
            "cores": cores + (compute if self.computes_on_cpu else 0.0),
            "adam": adam,
            "dram": (moved + work.dram_bytes) / self.dram_bytes_per_s,
        }
        return Cost(
            seconds={resource: value for resource, value in seconds.items() if value > 0},
            acquires=dict(work.acquires_bytes),
            releases=dict(work.releases_bytes),
        )
