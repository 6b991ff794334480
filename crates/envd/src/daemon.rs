//! The one shared object of the daemon: what requests read and change.

use std::cell::{Cell, RefCell};

use tokio::sync::watch;

use crate::metrics::CpuClock;
use crate::process::registry::Registry;
use crate::settings::Settings;

/// What the daemon is allowed to do to the machine it runs on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Machine {
    /// PID 1 of a microVM: clock, hostname, random pool and our files in /etc and /run are ours.
    Guest,
    /// `--serve` on a plain machine (tests): nothing outside the requests' own files and processes.
    Host,
}

#[derive(Debug)]
pub struct Daemon {
    pub machine: Machine,
    pub settings: RefCell<Settings>,
    pub processes: Registry,
    pub cpu: CpuClock,
    /// Connections with a smaller number belong to an earlier life of this guest and are dropped.
    pub oldest_connection: watch::Sender<u64>,
    serial: Cell<u64>,
}

impl Daemon {
    pub fn new(machine: Machine) -> Self {
        let mut settings = Settings::default();
        settings.refresh_env();
        Daemon {
            machine,
            settings: RefCell::new(settings),
            processes: Registry::default(),
            cpu: CpuClock::default(),
            oldest_connection: watch::Sender::new(0),
            serial: Cell::new(0),
        }
    }

    /// Numbers for processes and connections, in the order of their start.
    pub fn next_serial(&self) -> u64 {
        self.serial.set(self.serial.get() + 1);
        self.serial.get()
    }
}
