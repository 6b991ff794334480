"""The command line: what may never change between a boot and a restore, and what the hash sees."""

from __future__ import annotations

from dataclasses import replace

import pytest
from vmm_case import spec

from agentenv.model import Resources
from agentenv.vmm._command import (
    Accelerator,
    boot_arguments,
    command_hash,
    kernel_command_line,
    machine_arguments,
    restore_arguments,
)

TCG = Accelerator("tcg", 2_600_000, "io_uring")
KVM = Accelerator("kvm", 2_600_000, "io_uring")


def test_the_hash_ignores_ids_paths_namespaces_and_how_the_host_does_its_io() -> None:
    one = command_hash(spec("/run/aenv/a", "sandbox-one"), TCG)
    assert one == command_hash(spec("/elsewhere/b", "two"), replace(TCG, aio="threads"))
    other_kernel = replace(spec(), kernel=replace(spec().kernel, version="7"))
    assert one == command_hash(other_kernel, TCG)


@pytest.mark.parametrize(
    "resources", [Resources(1, 512, 1024), Resources(2, 513, 1024)], ids=["cpu_count", "memory_mib"]
)
def test_the_hash_sees_what_the_guest_sees(resources: Resources) -> None:
    assert command_hash(spec(), TCG) != command_hash(replace(spec(), resources=resources), TCG)


def test_the_hash_sees_the_accelerator_and_the_mac() -> None:
    assert command_hash(spec(), TCG) != command_hash(spec(), KVM)
    other_mac = replace(spec(), network=replace(spec().network, guest_mac="02:00:00:00:00:09"))
    assert command_hash(spec(), TCG) != command_hash(other_mac, TCG)


def test_two_sandboxes_of_a_node_get_the_same_kernel_command_line() -> None:
    one, two = spec("/a", "one").network, spec("/b", "two").network
    line = kernel_command_line(one, TCG)
    assert line == kernel_command_line(two, TCG)
    for word in (
        "aenv.root=/dev/vda",
        "aenv.ip=10.11.0.2/30",
        "aenv.gw=10.11.0.1",
        "aenv.gwmac=02:ae:00:00:00:01",
        "aenv.dns=1.1.1.1,8.8.8.8",
        "tsc_early_khz=2600000",
        "tsc=reliable",
        "panic=-1",
        "reboot=t",
        "quiet",
    ):
        assert word in line.split()


def test_a_guest_is_never_booted_with_pages_cleared_on_free() -> None:
    """A discarded page reads the old image again, which only allocation-time clearing makes harmless."""
    for accelerator in (TCG, KVM):
        line = kernel_command_line(spec().network, accelerator)
        assert "init_on_free" not in line
        assert "page_poison" not in line
        assert "init_on_alloc=0" not in line


def test_kvm_guests_find_their_clock_themselves_and_keep_their_mitigations() -> None:
    line = kernel_command_line(spec().network, KVM)
    assert "tsc" not in line
    assert "mitigations" not in line


def test_memory_is_private_and_the_kernel_is_read_at_boots_only() -> None:
    arguments = machine_arguments(spec(), TCG)
    memory = next(a for a in arguments if "memory-backend-file" in a)
    assert '"share":false' in memory
    assert not {"-kernel", "-initrd", "-append"} & {*arguments, *restore_arguments()}
    assert {"-kernel", "-initrd", "-append"} <= set(boot_arguments(spec(), TCG))


def test_no_device_sits_on_the_transport_whose_interrupt_never_arrives() -> None:
    assert not [a for a in machine_arguments(spec(), TCG) if "virtio-mmio-bus.0" in a]


def test_a_comma_in_a_path_stays_in_the_path() -> None:
    arguments = machine_arguments(spec("/run/a,b"), TCG)
    assert "unix:/run/a,,b/run/qmp.sock,server=on,wait=off" in arguments
    assert '"mem-path":"/run/a,b/memory"' in next(a for a in arguments if "memory-backend-file" in a)
