"""Chooses the VMM driver of a node by really starting a tiny guest with each candidate.

Owns the order of preference, the verdicts and their cache in a directory of the host. A /dev/kvm proves nothing: some
hosts have one on which a stock guest never boots. So the only question that is asked is "did a guest reach user
space in time", and its answer is kept with all that could change it.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from agentenv.errors import HostUnsuitable, VmmError
from agentenv.vmm._host import HostFacts, QemuBinary
from agentenv.vmm.driver import GuestKernel
from agentenv.vmm.qemu import QemuDriver

# A healthy KVM guest is there in half a second, an emulated one in two on an idle host.
LIMIT_S: Mapping[str, float] = {"kvm": 10.0, "tcg": 60.0}
# A candidate that failed may have failed because the host was busy: ask again after a day.
FAILURE_KEPT_S = 86_400.0
CACHE_FILE = "vmm-probe.json"
CACHE_BYTES_MAX = 1 << 20
# The best first.
CANDIDATES = (("firecracker", "kvm"), ("qemu", "kvm"), ("qemu", "tcg"))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is known of one candidate. `tried_at` is 0 where nothing had to be started to know."""

    driver: str
    accelerator: str
    works: bool
    reason: str
    took_s: float = 0.0
    tried_at: float = 0.0
    cached: bool = False


@dataclass(frozen=True, slots=True)
class ProbeReport:
    """Every candidate with its verdict, in order of preference; `chosen` is the first that works, or None.

    Candidates after the chosen one were not tried, which their reason says.
    """

    verdicts: tuple[Verdict, ...]

    @property
    def chosen(self) -> Verdict | None:
        return next((verdict for verdict in self.verdicts if verdict.works), None)

    def explain(self) -> str:
        """One line per candidate, for the log, `aenv doctor` and error messages."""
        return "\n".join(
            f"{v.driver} + {v.accelerator}: {'works' if v.works else 'no'}: {v.reason}" for v in self.verdicts
        )


@dataclass(frozen=True, slots=True)
class ProbeInputs:
    """What the probe is told. `kernel.initramfs` prints `marker` (`guest.initramfs` makes both)."""

    kernel: GuestKernel
    marker: bytes
    launcher: Path
    cache_dir: Path
    # Where sockets may be made: short, RUN or /tmp.
    run_dir: Path
    driver: str = "auto"
    accelerator: str = "auto"


Starter = Callable[[str], QemuDriver]


async def choose_driver(inputs: ProbeInputs, now: Callable[[], float] = time.time) -> tuple[QemuDriver, ProbeReport]:
    """Return the driver to use and why. Raises `HostUnsuitable` with every verdict when no candidate works."""
    binary, facts = QemuBinary(), HostFacts.read()

    def make(accelerator: str) -> QemuDriver:
        return QemuDriver(accelerator, inputs.launcher, binary=binary, facts=facts)

    report = await probe(inputs, make, _identity(inputs, binary, facts), now)
    if report.chosen is None:
        raise HostUnsuitable(f"no way to run a microVM works on this host:\n{report.explain()}")
    return make(report.chosen.accelerator), report


async def probe(inputs: ProbeInputs, make: Starter, identity: str, now: Callable[[], float]) -> ProbeReport:
    """Try the wanted candidates in order until one works. `identity` names all that a cached verdict depends on."""
    cache = _Cache(inputs.cache_dir / CACHE_FILE, identity)
    verdicts: list[Verdict] = []
    for driver, accelerator in CANDIDATES:
        if any(verdict.works for verdict in verdicts):
            verdicts.append(Verdict(driver, accelerator, False, "not tried, a better one works"))
            continue
        verdict = _without_trying(inputs, driver, accelerator) or cache.get(driver, accelerator, now())
        if verdict is None:
            verdict = await _try(inputs, make, accelerator, now)
            cache.put(verdict)
        verdicts.append(verdict)
    return ProbeReport(tuple(verdicts))


def _without_trying(inputs: ProbeInputs, driver: str, accelerator: str) -> Verdict | None:
    if inputs.driver not in ("auto", driver) or inputs.accelerator not in ("auto", accelerator):
        wanted = f"driver {inputs.driver}, accelerator {inputs.accelerator}"
        return Verdict(driver, accelerator, False, f"the configuration wants {wanted}")
    if driver == "firecracker":
        return Verdict(driver, accelerator, False, "this version of AgentENV has no firecracker driver")
    if accelerator == "kvm" and not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return Verdict(driver, accelerator, False, "/dev/kvm does not exist or cannot be opened")
    return None


async def _try(inputs: ProbeInputs, make: Starter, accelerator: str, now: Callable[[], float]) -> Verdict:
    inputs.run_dir.mkdir(parents=True, exist_ok=True)
    runtime_dir = Path(tempfile.mkdtemp(dir=inputs.run_dir, prefix="probe-"))
    began, started = now(), time.monotonic()
    try:
        await make(accelerator).boots(inputs.kernel, runtime_dir, inputs.marker, LIMIT_S[accelerator])
        works, reason = True, "a test guest reached user space"
    except (VmmError, HostUnsuitable) as error:
        works, reason = False, str(error)
    finally:
        shutil.rmtree(runtime_dir, ignore_errors=True)
    return Verdict("qemu", accelerator, works, reason, round(time.monotonic() - started, 3), began)


def _identity(inputs: ProbeInputs, binary: QemuBinary, facts: HostFacts) -> str:
    """Loaded kvm modules are part of it: swapping kvm_pvm for kvm_intel changes everything but the device node."""
    modules = sorted(entry.name for entry in Path("/sys/module").glob("kvm*"))
    uname = platform.uname()
    parts = [binary.build, uname.release, uname.version, facts.cpu_identity, inputs.kernel.version, *modules]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()


class _Cache:
    """One JSON file; anything unreadable in it is as good as absent, since asking again is always right."""

    def __init__(self, path: Path, identity: str) -> None:
        self._path = path
        self._identity = identity
        self._verdicts = self._load()

    def get(self, driver: str, accelerator: str, now: float) -> Verdict | None:
        verdict = self._verdicts.get(f"{driver}+{accelerator}")
        # A clock that was set back makes an old failure look young for ever, hence both bounds.
        if verdict is None or (not verdict.works and not 0 <= now - verdict.tried_at < FAILURE_KEPT_S):
            return None
        return verdict

    def put(self, verdict: Verdict) -> None:
        # An emulated guest that did not boot says nothing that lasts: without it there is no node at all.
        if not verdict.works and verdict.accelerator == "tcg":
            return
        self._verdicts[f"{verdict.driver}+{verdict.accelerator}"] = verdict
        content = {"identity": self._identity, "verdicts": [asdict(v) for v in self._verdicts.values()]}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        partial = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        partial.write_text(json.dumps(content))
        partial.rename(self._path)

    def _load(self) -> dict[str, Verdict]:
        try:
            with open(self._path, "rb") as file:
                content = json.loads(file.read(CACHE_BYTES_MAX))
            if content["identity"] != self._identity:
                return {}
            verdicts = [Verdict(**{**fields, "cached": True}) for fields in content["verdicts"]]
            return {f"{v.driver}+{v.accelerator}": v for v in verdicts}
        except (OSError, ValueError, KeyError, TypeError):
            return {}
