//! From a draft to the plan: the context, everything that depends on it, and what is to be said.

use super::free::FreeMemory;
use super::{Bounds, Draft, Planned, Planner, kv_shape, report, shared_scratch};
use crate::memory::context::{ContextChoice, ContextInputs, choose};
use crate::memory::plan::{Plan, StagePlan};
use crate::partition::Stage;
use crate::planner::budget::Budget;
use crate::{Error, Result};
use tegula_program::ffi::FfiProgram;

/// Rounds in which the context shrinks by what is missing and no more.
const ROUNDS_EXACT: u32 = 4;

impl Planner<'_> {
    pub(super) fn finish(
        &mut self,
        mut draft: Draft,
        free: &FreeMemory,
        trained: u32,
    ) -> Result<Planned> {
        let budget = self.budget(&draft, draft.bounds, free)?;
        let chosen = self.choose(&budget, trained);
        let (mut context, mut forced) = chosen.map_err(|e| self.exact_fit(e, &mut draft, free))?;
        // Scratch and lists may depend on the context, and not evenly: what they take is asked for again at the context chosen,
        // and where that is over the budget, a shorter one is chosen.
        let mut rounds = 0;
        let (wanted, bounds, reason) = loop {
            rounds += 1;
            let n_ctx = context.n_ctx;
            let wanted = self.bounds(n_ctx);
            let (bounds, reason) = self.at_context(&mut draft, n_ctx)?;
            let (again, why) = self.choose(&self.budget(&draft, bounds, free)?, trained)?;
            forced = why.or(forced);
            if again.n_ctx >= n_ctx {
                break (wanted, bounds, reason);
            }
            context = again;
            // Two or three rounds settle it; a backend whose statements never do must not keep a user waiting.
            if rounds > ROUNDS_EXACT {
                context.n_ctx = (context.n_ctx - context.n_ctx / 4).max(1);
            }
        };
        let Draft { mut stages, mut plans, block_len, ubatch_reason, .. } = draft;
        let mut notes: Vec<String> = forced.into_iter().collect();
        notes.extend(self.notes(&stages, free));
        let heaps = free.devices.clone();
        let heaps = self.close_unused(&mut stages, &mut plans, heaps);
        let mut plan = Plan {
            devices: self.devices.iter().map(|d| d.entry.id()).collect(),
            scratch: shared_scratch(&plans, self.devices.len()),
            stages: plans,
            n_blocks: context.n_ctx.div_ceil(block_len.max(1)),
            context,
            block_len,
            n_ubatch: bounds.n_ubatch,
            ubatch_reason: reason.or(ubatch_reason.filter(|_| bounds.n_ubatch < wanted.n_ubatch)),
            n_outputs: bounds.n_outputs.clamp(1, bounds.n_ubatch.max(1)),
            n_parallel: bounds.n_seqs,
            logits_bytes: self.logits_bytes(bounds)?,
            activation_bytes: self.activation_bytes(&stages, bounds)?,
            report: report::empty(self),
        };
        plan.report.notes = notes;
        report::fill(self, &stages, bounds, &heaps, &mut plan)?;
        Ok(Planned { plan, devices: std::mem::take(&mut self.devices), stages })
    }

    /// Asks again for everything that depends on the context.
    fn at_context(&self, draft: &mut Draft, n_ctx: u32) -> Result<(Bounds, Option<String>)> {
        let Draft { stages, plans, block_len, .. } = draft;
        for ((stage, _), plan) in stages.iter().zip(plans.iter_mut()) {
            plan.kv = kv_shape(stage, n_ctx, *block_len, &self.places_of(plan)?);
        }
        self.fit_ubatch(stages, plans, self.bounds(n_ctx))
    }

    /// A refusal that names a context which fits as it is: padding and scratch at that context are others than at the one that was refused.
    fn exact_fit(&self, error: Error, draft: &mut Draft, free: &FreeMemory) -> Error {
        let Error::ContextDoesNotFit { asked, bytes, per_token, mut budget, mut fits, remedies } =
            error
        else {
            return error;
        };
        for _ in 0..ROUNDS_EXACT {
            let Ok(n_ctx) = u32::try_from(fits) else { break };
            let at = self.at_context(draft, n_ctx);
            let fit =
                at.and_then(|(bounds, _)| self.budget(draft, bounds, free)?.tokens_that_fit());
            match fit {
                Ok(Some(fit)) if fit.tokens < fits => (fits, budget) = (fit.tokens, fit.budget),
                _ => break,
            }
        }
        Error::ContextDoesNotFit { asked, bytes, per_token, budget, fits, remedies }
    }

    /// The context; and why it should have been refused, if it was forced.
    fn choose(&self, budget: &Budget, trained: u32) -> Result<(ContextChoice, Option<String>)> {
        let (asked, trained) = (self.options.n_ctx, u64::from(trained));
        let fits = budget.check_known().and_then(|()| budget.tokens_that_fit());
        match fits.and_then(|fits| choose(ContextInputs { asked, trained, fits })) {
            Ok(context) => Ok((context, None)),
            Err(
                error @ (Error::MemoryUnknown { .. }
                | Error::ModelDoesNotFit { .. }
                | Error::ContextDoesNotFit { .. }),
            ) if self.options.force => {
                let context = choose(ContextInputs { asked, trained, fits: None })?;
                Ok((context, Some(format!("forced, although it may fail: {error}"))))
            }
            Err(error) => Err(error),
        }
    }

    /// What the devices in use say about their memory that does not go together.
    fn notes(&self, stages: &[(Stage, FfiProgram)], free: &FreeMemory) -> Vec<String> {
        let names: Vec<String> = self.devices.iter().map(|d| d.entry.id()).collect();
        let parts = stages.iter().filter_map(|(stage, _)| {
            let layers = || stage.program.ops.iter().filter_map(|op| op.layer);
            let name = names.get(stage.device)?;
            Some(match (layers().min()?, layers().max()?) {
                (first, last) if first == last => format!("layer {first} on {name}"),
                (first, last) => format!("layers {first} to {last} on {name}"),
            })
        });
        let split = parts.collect::<Vec<_>>().join(", ");
        let is_used = |index: usize| stages.iter().any(|(stage, _)| stage.device == index);
        let note = |(index, open)| free.notes(index, open, is_used(index), &split);
        self.devices.iter().enumerate().flat_map(note).collect()
    }

    /// Closes devices that run nothing, so that they neither keep threads nor stand in the plan. Keeps of `lists`, one for each device, the others.
    fn close_unused<T>(
        &mut self,
        stages: &mut [(Stage, FfiProgram)],
        plans: &mut [StagePlan],
        lists: Vec<T>,
    ) -> Vec<T> {
        let is_used: Vec<bool> = (0..self.devices.len())
            .map(|index| plans.iter().any(|plan| plan.device == index))
            .collect();
        let used_before = |device: usize| is_used.iter().take(device).filter(|used| **used).count();
        for ((stage, _), plan) in stages.iter_mut().zip(plans) {
            stage.device = used_before(stage.device);
            plan.device = used_before(plan.device);
        }
        let mut used = is_used.iter();
        self.devices.retain(|_| used.next().copied().unwrap_or(false));
        let kept = lists.into_iter().zip(&is_used).filter(|(_, used)| **used);
        kept.map(|(list, _)| list).collect()
    }
}
