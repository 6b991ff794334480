//! One run of one sandbox, as far as the proxy touches it: its connections and its pools.
//!
//! Everything that carries a generation is registered here *before* it carries anything, under the lock that withdrawal
//! takes. So a withdrawal finds all of it, and what comes later is refused: there is no moment in between.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use crate::pool::{Peer, Pool};
use crate::socket::Socket;

/// The generation was withdrawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the sandbox run has ended")]
pub struct Over;

#[derive(Debug)]
pub struct Generation {
    pub number: u64,
    /// None once withdrawn.
    live: Mutex<Option<Live>>,
}

#[derive(Debug, Default)]
struct Live {
    next: u64,
    /// Client connections, one entry per request or tunnel that goes through them now.
    clients: HashMap<u64, Arc<Socket>>,
    /// All connections to the guest, idle ones too.
    guests: HashMap<u64, Weak<Socket>>,
    pools: HashMap<SocketAddr, Arc<Pool>>,
}

impl Generation {
    pub fn new(number: u64) -> Arc<Self> {
        Arc::new(Self {
            number,
            live: Mutex::new(Some(Live::default())),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Option<Live>> {
        self.live.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The pool of one guest port. Pools are never shared between generations, even at the same address.
    pub fn pool(self: &Arc<Self>, address: SocketAddr) -> Result<Arc<Pool>, Over> {
        let mut live = self.lock();
        let pools = &mut live.as_mut().ok_or(Over)?.pools;
        let pool = pools.entry(address).or_insert_with(|| {
            Pool::new(Peer::Guest {
                address,
                generation: Arc::downgrade(self),
            })
        });
        Ok(Arc::clone(pool))
    }

    /// Registers a client's connection as carrying this generation until the guard is dropped.
    pub fn carry(self: &Arc<Self>, client: &Arc<Socket>) -> Result<Carried, Over> {
        let mut live = self.lock();
        let live = live.as_mut().ok_or(Over)?;
        let key = live.take_key();
        live.clients.insert(key, Arc::clone(client));
        Ok(Carried {
            generation: Arc::clone(self),
            key,
        })
    }

    /// Registers a connection to the guest until the guard is dropped. On error the caller must abort it.
    pub fn own(self: &Arc<Self>, guest: &Arc<Socket>) -> Result<Owned, Over> {
        let mut live = self.lock();
        let live = live.as_mut().ok_or(Over)?;
        let key = live.take_key();
        live.guests.insert(key, Arc::downgrade(guest));
        Ok(Owned {
            generation: Arc::clone(self),
            key,
        })
    }

    /// Resets everything that carries this generation, clients first: a client must never see the end of a stream that
    /// is a consequence of the guest's side going away. Returns the number of client connections.
    pub fn withdraw(&self) -> usize {
        let Some(live) = self.lock().take() else {
            return 0;
        };
        let clients: HashSet<_> = live.clients.values().map(Arc::as_ptr).collect();
        live.clients.values().for_each(|client| client.abort());
        live.guests
            .values()
            .filter_map(Weak::upgrade)
            .for_each(|guest| guest.abort());
        live.pools.values().for_each(|pool| pool.clear());
        clients.len()
    }

    /// Drops idle connections that are too old.
    pub fn sweep(&self) {
        if let Some(live) = self.lock().as_ref() {
            live.pools.values().for_each(|pool| pool.sweep());
        }
    }
}

impl Live {
    fn take_key(&mut self) -> u64 {
        self.next += 1;
        self.next
    }
}

/// A client connection carries the generation while this lives.
#[derive(Debug)]
pub struct Carried {
    generation: Arc<Generation>,
    key: u64,
}

impl Drop for Carried {
    fn drop(&mut self) {
        if let Some(live) = self.generation.lock().as_mut() {
            live.clients.remove(&self.key);
        }
    }
}

/// A connection to the guest belongs to the generation while this lives.
#[derive(Debug)]
pub struct Owned {
    generation: Arc<Generation>,
    key: u64,
}

impl Drop for Owned {
    fn drop(&mut self) {
        if let Some(live) = self.generation.lock().as_mut() {
            live.guests.remove(&self.key);
        }
    }
}
