//! Kernel settings of the guest: quiet when idle, and as open as a container is.

use rustix::process::{Resource, Rlimit, setrlimit};

/// Every wake-up of an idle emulated guest costs its host about 2 ms of CPU, so periodic work that nobody
/// needs here is switched off or made rare. The last two are what Docker gives its containers.
const SYSCTLS: [(&str, &str); 8] = [
    ("vm/compaction_proactiveness", "0"),
    ("vm/stat_interval", "120"),
    ("vm/dirty_writeback_centisecs", "1500"),
    ("kernel/watchdog", "0"),
    ("kernel/panic", "-1"),
    ("net/ipv4/tcp_keepalive_time", "600"),
    ("net/ipv4/ping_group_range", "0 2147483647"),
    ("net/ipv4/ip_unprivileged_port_start", "0"),
];

/// Open files of the daemon and what it starts; the kernel's own limit for PID 1 is 1024.
const OPEN_FILES_SOFT: u64 = 65_536;
const OPEN_FILES_HARD: u64 = 1_048_576;

/// Best effort: kernels differ in what they offer.
pub fn set() {
    for (name, value) in SYSCTLS {
        let _ = std::fs::write(format!("/proc/sys/{name}"), value);
    }
    // The kernel must not choose this process when memory runs out: that would be a panic.
    let _ = std::fs::write("/proc/self/oom_score_adj", "-1000");
    let files = Rlimit {
        current: Some(OPEN_FILES_SOFT),
        maximum: Some(OPEN_FILES_HARD),
    };
    let _ = setrlimit(Resource::Nofile, files);
    let _ = setrlimit(
        Resource::Core,
        Rlimit {
            current: Some(0),
            maximum: None,
        },
    );
}
