"""The QEMU command line of a machine: one function from a spec to arguments, and the hash that a snapshot records.

Owns every option and the reason for it. Pure: no I/O. `-kernel`, `-initrd` and `-append` are given at a boot only: a
restored guest has its kernel in memory, and reading a 57 MB ELF again would be half of a restore. So neither they nor
the paths, ids and sockets are part of the hash; the devices, their order and their sizes are.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentenv.vmm.driver import GuestKernel, MachineFiles, MachineSpec, NetworkAttachment

QMP_SOCKET = "qmp.sock"
CONSOLE_SOCKET = "console.sock"
# Translated code of one guest at most. QEMU's own default is 1 GiB, which a long-lived guest would come to fill; where
# it is full all is thrown away and translated anew, so that a smaller one costs time and never correctness.
TCG_CODE_MIB_MAX = 128
PROBE_MEMORY_MIB = 128

# `reboot=t` with `panic=-1`: a panic ends the VMM at once, by triple fault. Watchdog timers wake an idle guest, and
# report lockups that are only a busy host's.
_KERNEL_WORDS = (
    *("console=ttyS0", "quiet", "reboot=t", "panic=-1"),
    *("nowatchdog", "cryptomgr.notests", "random.trust_cpu=on"),
)

# A full host disk must be an error in the guest that meets it; QEMU's default would stop the machine silently.
_ON_ERROR = ("rerror=report", "werror=report")
# Nothing outside the named files is ever needed: no child processes, no change of user, no scheduling calls.
_SECCOMP = "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny"


@dataclass(frozen=True, slots=True)
class Accelerator:
    """`kvm` or `tcg`, and what the command line needs to know of the host for it."""

    name: str
    tsc_khz: int
    aio: str


def machine_arguments(spec: MachineSpec, accelerator: Accelerator) -> list[str]:
    """All options that a boot and a restore share; the device set never varies, or device states would not load."""
    resources, files, network = spec.resources, spec.files, spec.network
    memory = {
        "qom-type": "memory-backend-file",
        "id": "ram",
        "size": resources.memory_mib << 20,
        "mem-path": str(files.memory_image),
        # Private: the guest's writes never reach the image, which other clones map at the same time.
        "share": False,
        "prealloc": False,
    }
    return [
        # No device but those below: no default network card, no VGA, no floppy, no configuration file of the host.
        *("-nodefaults", "-no-user-config", "-display", "none"),
        *("-name", f"aenv-{spec.machine_id}"),
        *("-machine", _machine()),
        # The default firmware wants the option ROMs that are off; qboot finds kernel and initrd by fw_cfg.
        *("-bios", "qboot.rom"),
        *_cpu(accelerator),
        *("-smp", str(resources.cpu_count), "-m", f"{resources.memory_mib}M"),
        *("-object", _json(memory)),
        # vCPUs wait for `cont`: after a restore the caller says when, at a boot the console is connected first.
        "-S",
        # A guest that reboots or powers off ends its VMM, which is how the node learns of it.
        "-no-reboot",
        # QEMU's own check of the machine type is replaced by the fingerprint; without this no xen-saved state loads.
        *("-global", "migration.send-configuration=off"),
        # The end of a restore is an event instead of something to poll; nobody needs to be told of a moved MAC.
        *("-global", "migration.x-events=on", "-global", "migration.announce-rounds=0"),
        # The modern registers save 1024 queues of each device whether used or not: a device state of 246 KB instead of
        # 25 KB, and a millisecond more to load. Nothing here needs what they add.
        *("-global", "virtio-mmio.force-legacy=on"),
        *_console(files.runtime_dir),
        *_control(files.runtime_dir),
        *_devices(files, network, accelerator),
        *("-sandbox", _SECCOMP),
    ]


def boot_arguments(spec: MachineSpec, accelerator: Accelerator) -> list[str]:
    """What a boot adds."""
    kernel = spec.kernel
    return [
        *("-kernel", str(kernel.vmlinux), "-initrd", str(kernel.initramfs)),
        *("-append", kernel_command_line(spec.network, accelerator)),
    ]


def restore_arguments() -> list[str]:
    """What a restore adds: wait for a device state that comes by descriptor."""
    return ["-incoming", "defer"]


def probe_arguments(kernel: GuestKernel, runtime_dir: Path, accelerator: Accelerator) -> list[str]:
    """A machine with a console and nothing else, to see whether guests boot here at all."""
    memory = {"qom-type": "memory-backend-ram", "id": "ram", "size": PROBE_MEMORY_MIB << 20}
    return [
        *("-nodefaults", "-no-user-config", "-display", "none", "-name", "aenv-probe"),
        *("-machine", _machine(), "-bios", "qboot.rom"),
        *_cpu(accelerator),
        *("-m", f"{PROBE_MEMORY_MIB}M", "-object", _json(memory), "-S", "-no-reboot"),
        *_console(runtime_dir),
        *_control(runtime_dir),
        *("-kernel", str(kernel.vmlinux), "-initrd", str(kernel.initramfs)),
        *("-append", " ".join([*_KERNEL_WORDS, *_accelerator_words(accelerator)])),
        *("-sandbox", _SECCOMP),
    ]


def kernel_command_line(network: NetworkAttachment, accelerator: Accelerator) -> str:
    """The same for all sandboxes of a node: what differs between them is told to the guest daemon by /init."""
    words = [
        *_KERNEL_WORDS,
        *("aenv.root=/dev/vda", f"aenv.ip={network.guest_cidr}", f"aenv.gw={network.gateway}"),
        f"aenv.gwmac={network.gateway_mac}" if network.gateway_mac else "",
        f"aenv.dns={','.join(network.dns)}" if network.dns else "",
        "aenv.hostname=sandbox",
        *_accelerator_words(accelerator),
    ]
    return " ".join(word for word in words if word)


def command_hash(spec: MachineSpec, accelerator: Accelerator) -> str:
    """A hash of the options with every path, id, socket and name replaced, and sizes and devices kept."""
    anywhere = Path("@")
    neutral = replace(
        spec,
        machine_id="@",
        files=MachineFiles(anywhere, anywhere, anywhere),
        network=replace(spec.network, netns="@", tap="@"),
    )
    arguments = machine_arguments(neutral, replace(accelerator, aio="@"))
    return hashlib.sha256("\0".join(arguments).encode()).hexdigest()[:16]


def _accelerator_words(accelerator: Accelerator) -> list[str]:
    """Words that only an emulated CPU needs.

    Without the two TSC words a boot under load hangs when calibration fails (facts.md). Speculation barriers protect
    against a CPU that TCG does not emulate, and make every indirect call slow. Randomised addresses make TCG translate
    every program anew at each exec: without them `bash -l -c true` takes 18 ms instead of 90. What they defend, one
    process of a guest against another's exploit, is no boundary of ours; under KVM they stay on.
    """
    if accelerator.name != "tcg":
        return []
    return [f"tsc_early_khz={accelerator.tsc_khz}", "tsc=reliable", "mitigations=off", "norandmaps"]


def _machine() -> str:
    options = [
        "microvm",
        # No PIT: its timer is half of what QEMU's main loop does for an idle guest. The RTC gives the wall clock.
        *("x-option-roms=off", "pit=off", "rtc=on", "usb=off"),
        "memory-backend=ram",
        # The JSON description of a device state is 20 KB that nobody reads.
        "suppress-vmdesc=on",
        # Pages of clones are shared by mapping one image; the kernel's same-page merging would only cost CPU.
        "mem-merge=off",
    ]
    return ",".join(options)


def _cpu(accelerator: Accelerator) -> list[str]:
    if accelerator.name == "kvm":
        return ["-accel", "kvm", "-cpu", "host"]
    return ["-accel", f"tcg,tb-size={TCG_CODE_MIB_MAX}", "-cpu", "max"]


def _console(runtime_dir: Path) -> list[str]:
    path = _escaped(runtime_dir / CONSOLE_SOCKET)
    return ["-chardev", f"socket,id=console,path={path},server=on,wait=off", "-serial", "chardev:console"]


def _control(runtime_dir: Path) -> list[str]:
    return ["-qmp", f"unix:{_escaped(runtime_dir / QMP_SOCKET)},server=on,wait=off"]


def _devices(files: MachineFiles, network: NetworkAttachment, accelerator: Accelerator) -> list[str]:
    """Each on a named transport. The guest finds the highest number first, so the disk has it and becomes vda.

    Transport 0 stays free: its interrupt never arrives. It is pin 0 of the second IO-APIC, and QEMU moves every pin 0
    to 2, as is right for the first one only (seen with 7.2: a device there hangs at its first request).
    """
    disk: dict[str, Any] = {
        "node-name": "disk",
        "driver": "raw",
        # Zeroes that the guest writes become holes, so that a wiped disk gives its space back.
        "discard": "unmap",
        "detect-zeroes": "unmap",
        # Direct: the export has its own cache. No flush: a guest's flush orders writes, it does not promise power-loss
        # safety (design.md), and flushing made `stop` take 140 ms under a heavy writer.
        "cache": {"direct": True, "no-flush": True},
        "file": {
            "driver": "file",
            "filename": str(files.disk),
            "aio": accelerator.aio,
            "discard": "unmap",
            "cache": {"direct": True, "no-flush": True},
        },
    }
    # A second slot, one sector and empty: the device set is part of every snapshot, so what may one day be a second
    # disk has to be there from the first. Too small to be taken for storage.
    spare = {"node-name": "spare", "driver": "null-co", "size": 512, "read-zeroes": True}
    tap = {"type": "tap", "id": "net", "ifname": network.tap, "script": "no", "downscript": "no", "vhost": False}
    return [
        *("-blockdev", _json(disk), "-device", _device("virtio-blk-device", 5, "vda", "drive=disk", *_ON_ERROR)),
        *("-blockdev", _json(spare), "-device", _device("virtio-blk-device", 4, "vdb", "drive=spare", *_ON_ERROR)),
        # The guest keeps its address and MAC for life behind a tap of fixed MAC: nothing to announce.
        *("-netdev", _json(tap)),
        "-device",
        _device("virtio-net-device", 3, "eth0", "netdev=net", f"mac={network.guest_mac}", "guest_announce=off"),
        # Deflate on OOM: memory lent to the host comes back before the guest kills a process for want of it.
        "-device",
        _device("virtio-balloon-device", 2, "balloon", "deflate-on-oom=on", "free-page-reporting=off"),
        *("-object", _json({"qom-type": "rng-builtin", "id": "entropy"})),
        *("-device", _device("virtio-rng-device", 1, "rng", "rng=entropy")),
    ]


def _device(driver: str, transport: int, name: str, *options: str) -> str:
    return ",".join([driver, f"id={name}", f"bus=virtio-mmio-bus.{transport}", *options])


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))


def _escaped(path: Path) -> str:
    """In QEMU's key=value options a comma is written twice."""
    return str(path).replace(",", ",,")
