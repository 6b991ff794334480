//! lo and eth0, by the classic ioctls: no external program and no netlink dialogue.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::net::{AddressFamily, SocketType, socket};

use super::BootError;
use super::cmdline::Options;

const INTERFACE: &str = "eth0";
/// The interface is there when its driver has been loaded; slow hosts get some time.
const INTERFACE_WAIT: Duration = Duration::from_secs(5);
const INTERFACE_POLL: Duration = Duration::from_millis(2);

/// Entry of the neighbour table that is complete and never asked for again.
const ATF_COM: libc::c_int = 0x02;
const ATF_PERM: libc::c_int = 0x04;
const ARPHRD_ETHER: libc::sa_family_t = 1;

pub fn up(options: &Options) -> Result<(), BootError> {
    let socket = socket(AddressFamily::INET, SocketType::DGRAM, None).map_err(|error| BootError::Network {
        step: "socket",
        source: error.into(),
    })?;
    let control = Control { socket };
    control.set_up("lo")?;
    let Some((address, prefix)) = options.address else {
        return Ok(());
    };
    wait_for_interface()?;
    // The slot has no IPv6, and its router solicitations would only wake an idle guest.
    let _ = std::fs::write(format!("/proc/sys/net/ipv6/conf/{INTERFACE}/disable_ipv6"), "1");
    control.set_address(INTERFACE, libc::SIOCSIFADDR, "address", address)?;
    control.set_address(INTERFACE, libc::SIOCSIFNETMASK, "netmask", netmask(prefix))?;
    control.set_up(INTERFACE)?;
    if let Some(gateway) = options.gateway {
        if let Some(mac) = options.gateway_mac {
            control.set_neighbour(gateway, mac)?;
        }
        control.add_default_route(gateway)?;
    }
    Ok(())
}

fn wait_for_interface() -> Result<(), BootError> {
    let until = Instant::now() + INTERFACE_WAIT;
    while !Path::new("/sys/class/net").join(INTERFACE).exists() {
        if Instant::now() >= until {
            let source = io::Error::from(io::ErrorKind::NotFound);
            return Err(BootError::Network {
                step: "eth0 did not appear",
                source,
            });
        }
        std::thread::sleep(INTERFACE_POLL);
    }
    Ok(())
}

fn netmask(prefix: u32) -> Ipv4Addr {
    Ipv4Addr::from(u32::MAX.checked_shl(32 - prefix).unwrap_or(0))
}

struct Control {
    socket: OwnedFd,
}

impl Control {
    fn call<T>(&self, step: &'static str, request: libc::c_ulong, argument: &mut T) -> Result<(), BootError> {
        // SAFETY: each caller passes the struct that its request is defined on, alive for the call.
        let result = unsafe { libc::ioctl(self.socket.as_raw_fd(), request, std::ptr::from_mut(argument)) };
        if result < 0 {
            return Err(BootError::Network {
                step,
                source: io::Error::last_os_error(),
            });
        }
        Ok(())
    }

    fn set_up(&self, name: &str) -> Result<(), BootError> {
        let mut request = interface_request(name);
        request.ifr_ifru.ifru_flags = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
        self.call("bringing an interface up", libc::SIOCSIFFLAGS, &mut request)
    }

    fn set_address(
        &self,
        name: &str,
        code: libc::c_ulong,
        step: &'static str,
        address: Ipv4Addr,
    ) -> Result<(), BootError> {
        let mut request = interface_request(name);
        request.ifr_ifru.ifru_addr = socket_address(address);
        self.call(step, code, &mut request)
    }

    fn set_neighbour(&self, address: Ipv4Addr, mac: [u8; 6]) -> Result<(), BootError> {
        // SAFETY: arpreq is plain data for which all zeros is a valid value.
        let mut request: libc::arpreq = unsafe { std::mem::zeroed() };
        request.arp_pa = socket_address(address);
        request.arp_ha.sa_family = ARPHRD_ETHER;
        for (slot, byte) in request.arp_ha.sa_data.iter_mut().zip(mac) {
            *slot = byte as libc::c_char;
        }
        request.arp_flags = ATF_COM | ATF_PERM;
        copy_name(INTERFACE, &mut request.arp_dev);
        self.call("neighbour", libc::SIOCSARP, &mut request)
    }

    fn add_default_route(&self, gateway: Ipv4Addr) -> Result<(), BootError> {
        // SAFETY: rtentry is plain data for which all zeros is a valid value.
        let mut route: libc::rtentry = unsafe { std::mem::zeroed() };
        route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
        route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
        route.rt_gateway = socket_address(gateway);
        route.rt_flags = libc::RTF_UP | libc::RTF_GATEWAY;
        self.call("default route", libc::SIOCADDRT, &mut route)
    }
}

fn interface_request(name: &str) -> libc::ifreq {
    // SAFETY: ifreq is plain data for which all zeros is a valid value.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    copy_name(name, &mut request.ifr_name);
    request
}

/// Leaves the last byte zero.
fn copy_name<const N: usize>(name: &str, field: &mut [libc::c_char; N]) {
    for (slot, byte) in field.iter_mut().zip(name.bytes().take(N - 1)) {
        *slot = byte as libc::c_char;
    }
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    // Family, two bytes of port, four of address: the layout of sockaddr_in inside sockaddr.
    // SAFETY: sockaddr is plain data for which all zeros is a valid value.
    let mut result: libc::sockaddr = unsafe { std::mem::zeroed() };
    result.sa_family = libc::AF_INET as libc::sa_family_t;
    for (slot, byte) in result.sa_data.iter_mut().skip(2).zip(address.octets()) {
        *slot = byte as libc::c_char;
    }
    result
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn netmasks_follow_the_prefix() {
        assert_eq!(netmask(30), Ipv4Addr::new(255, 255, 255, 252));
        assert_eq!(netmask(0), Ipv4Addr::UNSPECIFIED);
        assert_eq!(netmask(32), Ipv4Addr::BROADCAST);
    }
}
