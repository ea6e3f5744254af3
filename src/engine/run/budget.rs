//! Budget of a run: the maximum tokens of its answer, and the maximum steps, which end a run whose mod backtracks
//! endlessly.

use crate::engine::request::Limits;

/// Budget of a run, and the step that the run has reached.
pub struct StepBudget {
    /// Maximum tokens in the answer; a mod may change it.
    max_tokens: usize,
    /// Maximum steps; higher if a mod has raised the maximum of tokens.
    max_steps: u32,
    /// Maximum consecutive steps in which the answer does not become longer than it was. Without a limit of tokens, only
    /// this ends a run whose mod backtracks endlessly.
    max_steps_without_growth: u32,
    step: u32,
    /// Maximum tokens that the answer has had.
    longest: usize,
    /// First step with that many tokens.
    longest_since: u32,
}

impl StepBudget {
    /// Creates the budget of a run that has not started. `context` is the context size of its slot, in tokens.
    pub fn new(limits: &Limits, context: usize) -> Self {
        Self {
            max_tokens: limits.max_tokens as usize,
            max_steps: limits.max_steps,
            max_steps_without_growth: Limits::new(context as u32).max_steps,
            step: 0,
            longest: 0,
            longest_since: 0,
        }
    }

    /// Returns the step that the run has reached; 0 before the first.
    pub fn step(&self) -> u32 {
        self.step
    }

    /// Returns the maximum tokens in the answer.
    pub fn max_tokens(&self) -> usize {
        self.max_tokens
    }

    /// Returns the number of tokens that an answer of `answer_len` tokens has room for.
    pub fn tokens_left(&self, answer_len: usize) -> usize {
        self.max_tokens.saturating_sub(answer_len)
    }

    /// Returns true if the run may reach the step.
    pub fn permits(&self, step: u32) -> bool {
        step <= self.max_steps.min(self.longest_since.saturating_add(self.max_steps_without_growth))
    }

    /// Advances to the step, unless the run has reached a later one.
    pub fn advance_to(&mut self, step: u32) {
        self.step = self.step.max(step);
    }

    /// Updates the maximum length of the answer with its length after a step.
    pub fn update_longest(&mut self, answer_len: usize, step: u32) {
        if answer_len > self.longest {
            (self.longest, self.longest_since) = (answer_len, step);
        }
    }

    /// Sets the state of a fork: it continues after `step`, with an answer of `answer_len` tokens.
    pub fn restore(&mut self, step: u32, answer_len: usize) {
        self.step = step;
        (self.longest, self.longest_since) = (answer_len, step);
    }

    /// Sets the maximum answer length that a mod requests with `AdjustedPrefill`, within the client's limits.
    pub fn adjust_max_tokens(&mut self, max_tokens: u32, limits: &Limits) {
        let max_tokens = limits.capped(max_tokens);
        self.max_steps = self.max_steps.max(limits.max_steps_for(max_tokens));
        self.max_tokens = max_tokens as usize;
    }

    /// Applies limits that the client has changed. A maximum that a mod has set is kept unless the client changes its
    /// own.
    pub fn change_limits(&mut self, before: &Limits, after: &Limits) {
        if after.max_tokens != before.max_tokens {
            self.max_tokens = after.max_tokens as usize;
        }
        let max_steps = |limits: &Limits| (limits.max_steps, limits.has_requested_max_steps);
        if max_steps(after) != max_steps(before) {
            self.max_steps = after.max_steps;
        }
    }

    /// Returns the message for the end of a run that may not reach its next step. `answer_len` is the length of its
    /// answer.
    pub fn exhausted_message(&self, answer_len: usize) -> String {
        let reached = if self.step >= self.max_steps {
            format!("the limit of {} steps was reached with {answer_len} tokens in the answer", self.max_steps)
        } else {
            let (longest, steps) = (self.longest, self.step - self.longest_since);
            format!("the answer did not exceed {longest} tokens in the last {steps} steps, and has {answer_len} now")
        };
        reached + "; a mod may backtrack endlessly"
    }
}
