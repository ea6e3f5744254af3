//! Durations and statuses of requests by route, for `/metrics`.

use crate::events::{Histogram, HistogramCounts};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

/// Requests by route template and method. Both have few values: paths without a route share one template.
#[derive(Debug, Default)]
pub struct RequestMetrics {
    routes: Mutex<BTreeMap<String, BTreeMap<&'static str, RouteMetrics>>>,
}

#[derive(Debug)]
struct RouteMetrics {
    duration: Histogram,
    statuses: BTreeMap<u16, u64>,
}

/// The requests of a route with one method.
#[derive(Debug)]
pub struct RouteCounts {
    /// Route template.
    pub route: String,
    /// HTTP method.
    pub method: &'static str,
    /// Time from the request to the end of the response.
    pub duration: HistogramCounts,
    /// Number of requests by HTTP status.
    pub statuses: BTreeMap<u16, u64>,
}

impl RequestMetrics {
    pub(super) fn add(&self, route: &str, method: &'static str, status: u16, duration: Duration) {
        let mut routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        if !routes.contains_key(route) {
            routes.insert(route.to_owned(), BTreeMap::new());
        }
        let Some(methods) = routes.get_mut(route) else { return };
        let requests = methods
            .entry(method)
            .or_insert_with(|| RouteMetrics { duration: Histogram::long(), statuses: BTreeMap::new() });
        requests.duration.observe(duration);
        *requests.statuses.entry(status).or_default() += 1;
    }

    /// Returns the requests so far.
    #[must_use]
    pub fn counts(&self) -> Vec<RouteCounts> {
        let routes = self.routes.lock().unwrap_or_else(PoisonError::into_inner);
        let by_method = routes.iter().flat_map(|(route, methods)| methods.iter().map(move |method| (route, method)));
        by_method
            .map(|(route, (&method, requests))| RouteCounts {
                route: route.clone(),
                method,
                duration: requests.duration.counts(),
                statuses: requests.statuses.clone(),
            })
            .collect()
    }
}
