"""Ten generations of restore, dirty, capture: the promise under everything else that a sandbox outlives its process.

In each one the guest writes its memory and, without pause, its disk; at one stop the device state is saved, the disk
copied (a stand-in for the seal), and the memory captured over the image that this generation was restored from.
"""

from __future__ import annotations

import contextlib
import subprocess
from pathlib import Path

import pytest
from vmm_lab import QemuLab, image_equals_memory

from agentenv.vmm import Vmm

GENERATIONS = 10
# Dirty pages are counted since the image was mapped, so each generation starts at zero: what one of them dirties must
# not depend on how many came before. How much the disk writer gets done between two stops varies, hence the factor.
GROWTH_FACTOR_MAX = 1.5

START_WRITER = """
mkdir -p /disk/w
(i=0; while true; do
  i=$((i+1)); dd if=/dev/urandom of=/disk/w/$((i % 4)) bs=256k count=8 conv=fsync 2>/dev/null
  echo $i > /disk/w/new; mv /disk/w/new /disk/w/count; sync
done) >/dev/null 2>&1 </dev/null &
"""

CHECK = """
md5sum -c /ram/sums /disk/sums | grep -v ': OK'
echo 3 > /proc/sys/vm/drop_caches
md5sum -c /disk/sums | grep -v ': OK'
dmesg | grep -E 'EXT4-fs error|I/O error|BUG:|hung task|stall'
echo checked $(wc -l < /ram/sums) $(wc -l < /disk/sums)
"""


def dirty_script(generation: int) -> str:
    """New files in memory and on the disk, with their sums, and one that turns to zeros over a page that was not."""
    return f"""
    dd if=/dev/urandom of=/ram/f{generation % 3} bs=1M count=8 2>/dev/null
    [ {generation} -ge 1 ] && dd if=/dev/zero of=/ram/f{(generation - 1) % 3} bs=1M count=4 conv=notrunc 2>/dev/null
    md5sum /ram/f* > /ram/sums
    dd if=/dev/urandom of=/disk/g{generation % 3} bs=512k count=4 2>/dev/null
    md5sum /disk/g* > /disk/sums
    cat /disk/w/count 2>/dev/null || echo 0
    """


def anonymous_kib(vmm: Vmm) -> int:
    """What the process owns for itself: QEMU, and the guest pages that it wrote."""
    status = Path(f"/proc/{vmm.record.pid}/status").read_text()
    return int(status.partition("RssAnon:")[2].split()[0])


def copy(source: Path, target: Path) -> Path:
    subprocess.run(["cp", "--sparse=always", source, target], check=True)
    return target


@pytest.mark.vm
@pytest.mark.timeout(900)
async def test_ten_generations_keep_every_byte_and_grow_nothing(qemu_lab: QemuLab) -> None:
    lab = qemu_lab
    vmm = await lab.boot()
    await lab.shell(vmm, START_WRITER)
    image, disk = lab.root / "m1.mem", lab.root / "m1.disk"
    dirtied: list[int] = []
    owned: list[int] = []
    for generation in range(GENERATIONS):
        writes = int(await lab.shell(vmm, dirty_script(generation)))
        await vmm.stop()
        state = lab.root / "state"
        assert await vmm.save_device_state(state) < 1 << 20
        new_image, new_disk = lab.root / f"g{generation}.mem", lab.root / f"g{generation}.disk"
        copy(disk, new_disk)
        dirtied.append(await lab.capture(vmm, image, new_image))
        owned.append(anonymous_kib(vmm))
        assert image_equals_memory(await vmm.memory_mapping(), new_image), f"generation {generation}"
        await lab.end(vmm)
        disk.unlink()
        image.unlink()

        checked = await lab.restore(lab.spec(new_image, copy(new_disk, lab.root / "clone.disk")), state)
        await checked.cont()
        files = min(generation + 1, 3)
        expected = f"checked {files} {files}"
        assert (await lab.shell(checked, CHECK)).strip() == expected, f"generation {generation}"
        await lab.end(checked)

        vmm = await lab.restore(lab.spec(new_image, new_disk), state)
        await vmm.cont()
        assert int(await lab.shell(vmm, "cat /disk/w/count")) >= writes, "the writer goes on where it was"
        image, disk = new_image, new_disk
    print(f"dirty MiB {[d >> 20 for d in dirtied]}, RssAnon MiB {[k >> 10 for k in owned]}")
    assert max(dirtied[-3:]) <= GROWTH_FACTOR_MAX * max(dirtied[1:4])
    assert max(owned[-3:]) <= GROWTH_FACTOR_MAX * max(owned[1:4])


async def _order(lab: QemuLab, vmm: Vmm, script: str) -> None:
    """A script that ends the guest: it may be gone before it has closed the connection, and then nobody closes it."""
    with contextlib.suppress(TimeoutError):
        await lab.shell(vmm, script, timeout_s=2)


@pytest.mark.vm
async def test_a_guest_that_powers_off_or_reboots_ends_its_vmm_and_says_so(qemu_lab: QemuLab) -> None:
    for command, reason in (("poweroff -f", "guest-"), ("reboot -f", "guest-reset")):
        vmm = await qemu_lab.boot()
        await _order(qemu_lab, vmm, f"{command} >/dev/null 2>&1 </dev/null &")
        how = await vmm.wait_exit()
        assert reason in how
        await qemu_lab.end(vmm)


@pytest.mark.vm
async def test_a_panic_ends_the_vmm_and_its_last_words_are_kept(qemu_lab: QemuLab) -> None:
    vmm = await qemu_lab.boot()
    await _order(qemu_lab, vmm, "echo c > /proc/sysrq-trigger")
    assert "guest-reset" in await vmm.wait_exit()
    assert b"Kernel panic" in vmm.console(64_000)


@pytest.mark.vm
async def test_a_guest_that_floods_its_console_stays_usable_and_costs_the_host_no_disk(qemu_lab: QemuLab) -> None:
    vmm = await qemu_lab.boot()
    await qemu_lab.shell(vmm, "(while true; do echo flood > /dev/ttyS0; done) >/dev/null 2>&1 </dev/null &")
    assert (await qemu_lab.shell(vmm, "sleep 2; echo alive")).strip() == "alive"
    assert b"flood" in vmm.console(4096)
    assert sum(f.stat().st_size for f in Path(vmm.record.runtime_dir).iterdir()) < 64 << 10
    record = await qemu_lab.forget(vmm)
    adopted = qemu_lab.keep(await qemu_lab.driver.adopt(record))
    assert (await qemu_lab.shell(adopted, "echo alive")).strip() == "alive", "nobody read the console meanwhile"
