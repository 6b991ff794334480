//! GET /metrics: what the machine uses.

use std::cell::Cell;

use http::StatusCode;

use crate::daemon::Daemon;
use crate::http::answer::{Answer, json};

/// CPU time counters of the last call, so that each call tells the use since then.
#[derive(Debug, Default)]
pub struct CpuClock {
    last: Cell<(u64, u64)>,
}

impl CpuClock {
    /// Percent of all CPUs used since the last call (since boot at the first).
    fn used_pct(&self, stat: &str) -> f64 {
        let Some((busy, total)) = cpu_ticks(stat) else {
            return 0.0;
        };
        let (last_busy, last_total) = self.last.replace((busy, total));
        let (busy, total) = (busy.saturating_sub(last_busy), total.saturating_sub(last_total));
        if total == 0 {
            0.0
        } else {
            busy as f64 * 100.0 / total as f64
        }
    }
}

/// Busy and total ticks of all CPUs together.
fn cpu_ticks(stat: &str) -> Option<(u64, u64)> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    // user nice system idle iowait irq softirq steal; guest times are part of user already.
    let ticks: Vec<u64> = line
        .split_whitespace()
        .take(8)
        .filter_map(|field| field.parse().ok())
        .collect();
    let total: u64 = ticks.iter().sum();
    let idle: u64 = ticks.iter().skip(3).take(2).sum();
    Some((total - idle, total))
}

/// A value of /proc/meminfo in bytes.
fn memory_bytes(meminfo: &str, key: &str) -> u64 {
    let line = meminfo
        .lines()
        .find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
    let kib = line.and_then(|value| value.trim().trim_end_matches("kB").trim().parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

pub fn handle(daemon: &Daemon) -> Answer {
    let stat = std::fs::read_to_string("/proc/stat").unwrap_or_default();
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = memory_bytes(&meminfo, "MemTotal");
    let used = total.saturating_sub(memory_bytes(&meminfo, "MemAvailable"));
    let (disk_used, disk_total) = disk_bytes();
    let body = serde_json::json!({
        "ts": jiff::Timestamp::now().as_second(),
        "cpu_count": stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu ")).count(),
        "cpu_used_pct": (daemon.cpu.used_pct(&stat) * 100.0).round() / 100.0,
        "mem_total": total,
        "mem_used": used,
        "mem_cache": memory_bytes(&meminfo, "Cached"),
        "mem_total_mib": total >> 20,
        "mem_used_mib": used >> 20,
        "disk_used": disk_used,
        "disk_total": disk_total,
    });
    json(StatusCode::OK, body.to_string())
}

/// Used and total bytes of the root file system.
fn disk_bytes() -> (u64, u64) {
    let Ok(fs) = rustix::fs::statvfs("/") else {
        return (0, 0);
    };
    (
        fs.f_blocks.saturating_sub(fs.f_bfree) * fs.f_frsize,
        fs.f_blocks * fs.f_frsize,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_use_is_counted_between_two_calls() {
        let clock = CpuClock::default();
        clock.used_pct("cpu  10 0 10 80 0 0 0 0 0 0\ncpu0 1\n");
        let pct = clock.used_pct("cpu  30 0 40 120 10 0 0 0 0 0\n");
        assert!((pct - 50.0).abs() < 0.01, "{pct}");
    }

    #[test]
    fn memory_values_are_bytes() {
        let text = "MemTotal:       1000 kB\nMemAvailable:    250 kB\nCached: 8 kB\n";
        assert_eq!(memory_bytes(text, "MemTotal"), 1_024_000);
        assert_eq!(memory_bytes(text, "Missing"), 0);
    }
}
