//! Promises that are no op: limits, threads, orders of life, answers to wrong arguments.

mod errors;
mod life;
mod limits;
mod scratch;
mod transfers;

use crate::Result;
use crate::report::Outcome;
use tegula_plugin::Backend;

/// A promise, and how it is checked: on a device of a backend, with the oracle.
pub struct Check {
    /// `<kind>/<what>`; what the lists of expectations name.
    pub name: &'static str,
    /// Checks it.
    pub run: fn(&Backend, u32, &Backend) -> Result<Outcome>,
}

/// All promises.
pub const CHECKS: &[Check] = &[
    Check { name: "limits/what is stated agrees with itself", run: limits::no_contradictions },
    Check { name: "limits/max_size is refused by one byte more", run: limits::one_more },
    Check { name: "limits/both ends of a great buffer", run: limits::both_ends },
    Check { name: "limits/weights behind 4 GiB", run: limits::far_weights },
    Check { name: "limits/free memory falls and rises", run: limits::free_falls },
    Check { name: "transfers/odd sizes and places", run: transfers::odd_places },
    Check { name: "transfers/imports", run: transfers::imports },
    Check { name: "scratch/a limit that is too small is told", run: scratch::too_big },
    Check { name: "scratch/the least limit works", run: scratch::least_limit },
    Check { name: "errors/wrong arguments", run: errors::wrong_arguments },
    Check { name: "errors/ids and rows that are not there", run: errors::wrong_ids },
    Check { name: "errors/operands at odd addresses", run: errors::odd_addresses },
    Check { name: "threads/queues of one device", run: life::queues_at_once },
    Check { name: "threads/two devices", run: life::devices_at_once },
    Check { name: "threads/one executable", run: life::executable_shared },
    Check { name: "life/every order of dropping", run: life::orders },
    Check { name: "life/opened again and again", run: life::again },
];

/// Nothing was found.
pub(crate) const PASSED: Outcome = Outcome::Passed(0.0);
