//! What the server told us and has not withdrawn: (sandbox, port) -> route.
//!
//! One question at a time per (sandbox, port), however many requests wait for it; the question goes on when they leave,
//! because the server may be resuming the sandbox for it. An answer counts only if its generation is not withdrawn at
//! the moment when it is stored, under the lock that withdrawal takes.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aenv_wire::route::{Refusal, ResolveAnswer, RouteTarget};
use tokio::sync::watch;

use crate::generation::{Generation, Over};
use crate::limits::{RESOLVE_ATTEMPTS_MAX, RESOLVES_MAX, ROUTES_MAX, WITHDRAWN_RANGES_MAX};
use crate::pool::Pool;
use crate::resolver::{ResolveError, Resolver};
use crate::route::Place;
use crate::withdrawn::Withdrawn;

/// A usable answer of the server.
#[derive(Debug)]
pub struct Route {
    pub target: RouteTarget,
    pub generation: Arc<Generation>,
    pub pool: Arc<Pool>,
}

/// Why there is no route. Cloned to everyone who waited for it.
#[derive(Clone, Debug, thiserror::Error)]
pub enum NoRoute {
    #[error("the server refused")]
    Refused(Arc<Refusal>),
    #[error(transparent)]
    Failed(Arc<ResolveError>),
    #[error("the sandbox is changing faster than it can be found; retry")]
    Superseded,
    #[error("too many sandboxes are being looked for; retry")]
    TooMany,
}

type Outcome = Result<Arc<Route>, NoRoute>;

#[derive(Debug)]
pub struct Directory {
    resolver: Resolver,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    routes: HashMap<Place, Arc<Route>>,
    generations: BTreeMap<u64, Arc<Generation>>,
    withdrawn: Withdrawn,
    questions: HashMap<Place, watch::Receiver<Option<Outcome>>>,
}

impl Directory {
    pub fn new(resolver: Resolver) -> Arc<Self> {
        Arc::new(Self {
            resolver,
            known: Mutex::default(),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The route to a place, from memory or from the server.
    pub async fn find(self: &Arc<Self>, place: &Place) -> Outcome {
        let mut answer = {
            let mut known = self.lock();
            if let Some(route) = known.routes.get(place) {
                return Ok(Arc::clone(route));
            }
            match known.questions.get(place) {
                Some(answer) => answer.clone(),
                None if known.questions.len() >= RESOLVES_MAX => return Err(NoRoute::TooMany),
                None => self.start_question(&mut known, place),
            }
        };
        match answer.wait_for(Option::is_some).await {
            Ok(outcome) => outcome.clone().unwrap_or(Err(NoRoute::Superseded)),
            // The asking task was dropped, which happens only when the process ends.
            Err(_) => Err(NoRoute::Superseded),
        }
    }

    fn start_question(self: &Arc<Self>, known: &mut Known, place: &Place) -> watch::Receiver<Option<Outcome>> {
        let (teller, answer) = watch::channel(None);
        known.questions.insert(place.clone(), answer.clone());
        let (directory, place) = (Arc::clone(self), place.clone());
        tokio::spawn(async move {
            let outcome = directory.ask(&place).await;
            directory.lock().questions.remove(&place);
            teller.send_replace(Some(outcome));
        });
        answer
    }

    async fn ask(&self, place: &Place) -> Outcome {
        for _ in 0..RESOLVE_ATTEMPTS_MAX {
            match self.resolver.ask(place).await {
                Ok(ResolveAnswer::Refuse(refusal)) => {
                    return Err(NoRoute::Refused(Arc::new(refusal)));
                }
                Ok(ResolveAnswer::Target(target)) => {
                    // An error means withdrawn while the answer was on its way: the next one is about the next run.
                    if let Ok(route) = self.lock().store(place, target) {
                        return Ok(route);
                    }
                }
                Err(error) => return Err(NoRoute::Failed(Arc::new(error))),
            }
        }
        Err(NoRoute::Superseded)
    }

    /// Forgets one answer that turned out to lead nowhere, unless it was replaced already.
    pub fn forget(&self, place: &Place, route: &Arc<Route>) {
        let mut known = self.lock();
        if known.routes.get(place).is_some_and(|found| Arc::ptr_eq(found, route)) {
            known.routes.remove(place);
        }
    }

    /// Ends generations: forgets their answers, refuses them for ever, resets what carries them. Returns the number of
    /// client connections that were reset; by then all of them are.
    pub fn withdraw(&self, generations: &[u64]) -> usize {
        let mut known = self.lock();
        generations
            .iter()
            .for_each(|generation| known.withdrawn.insert(*generation));
        let over = known.take_withdrawn();
        drop(known);
        over.iter().map(|generation| generation.withdraw()).sum()
    }

    /// Ends every generation below `below` that is not in `live`.
    pub fn keep_only(&self, live: &[u64], below: u64) -> usize {
        let mut known = self.lock();
        known.withdrawn.insert_all_below(below, live);
        let over = known.take_withdrawn();
        drop(known);
        over.iter().map(|generation| generation.withdraw()).sum()
    }

    /// Generations of which something is kept, ascending.
    pub fn generations(&self) -> Vec<u64> {
        self.lock().generations.keys().copied().collect()
    }

    /// Drops idle connections that are too old.
    pub fn sweep(&self) {
        self.resolver.sweep();
        let generations: Vec<_> = self.lock().generations.values().cloned().collect();
        generations.iter().for_each(|generation| generation.sweep());
    }
}

impl Known {
    fn store(&mut self, place: &Place, target: RouteTarget) -> Result<Arc<Route>, Over> {
        let number = target.generation;
        if self.withdrawn.contains(number) {
            return Err(Over);
        }
        let generation = self
            .generations
            .entry(number)
            .or_insert_with(|| Generation::new(number));
        let generation = Arc::clone(generation);
        let pool = generation.pool(SocketAddr::new(target.address, target.port))?;
        let route = Arc::new(Route {
            target,
            generation,
            pool,
        });
        if self.routes.len() >= ROUTES_MAX
            && let Some(any) = self.routes.keys().next().cloned()
        {
            self.routes.remove(&any);
        }
        self.routes.insert(place.clone(), Arc::clone(&route));
        Ok(route)
    }

    fn take_withdrawn(&mut self) -> Vec<Arc<Generation>> {
        let Self {
            routes,
            generations,
            withdrawn,
            ..
        } = self;
        // A gap holds no withdrawn number, so any generation found in one is live.
        let has_live = |first, last| generations.range(first..=last).next().is_some();
        withdrawn.compact(WITHDRAWN_RANGES_MAX, has_live);
        let over: Vec<u64> = generations
            .keys()
            .copied()
            .filter(|number| withdrawn.contains(*number))
            .collect();
        if !over.is_empty() {
            routes.retain(|_, route| !withdrawn.contains(route.generation.number));
        }
        over.iter().filter_map(|number| generations.remove(number)).collect()
    }
}
