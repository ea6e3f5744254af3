//! Decides how many tokens a run drafts, so that drafts save time: measured times of decodes, and an account per run.
//!
//! The unit of an account is the time of a token without drafts: the time of a decode divided by the number of its
//! runs. A draft costs the time that it adds to its decode, including the time of a draft model, and earns one unit for
//! each accepted token. A run drafts only as many tokens as its account can pay for if all are rejected. The account
//! starts with a small balance, and every decode without drafts adds a small share, so that drafts are tried again from
//! time to time. A run whose drafts are always rejected therefore loses little more than that share.

/// Balance of a new run.
const INITIAL_BALANCE: f64 = 0.5;
/// Income from a decode without drafts.
const TRIAL_SHARE: f64 = 0.015;
/// Maximum balance, so that past success pays only for a few rejected tokens.
const MAX_BALANCE: f64 = 4.0;
/// Maximum tokens of the first draft of a run.
const INITIAL_LENGTH: usize = 4;
/// Assumed cost of a drafted token before the first measurement.
const INITIAL_TOKEN_COST: f64 = 0.5;
/// Minimum cost of a drafted token. The measured cost can be 0 or less if other processes delayed the decodes without
/// drafts.
const MIN_TOKEN_COST: f64 = 0.01;
/// Weight of a new measurement in the moving average.
const NEW_WEIGHT: f64 = 0.125;
/// Decodes with drafts after which a decode without drafts is measured again.
const MAX_AGE: u32 = 64;

/// Measured times of decodes, shared by all runs. The index is the number of runs in the decode.
#[derive(Default)]
pub struct DecodeTimes(Vec<DecodeTime>);

/// Measured times of decodes with a certain number of runs.
#[derive(Default, Clone, Copy)]
struct DecodeTime {
    /// Seconds without drafts.
    plain: f64,
    /// Number of decodes with drafts until a decode without drafts is measured again; 0 if none was measured.
    valid_for: u32,
    /// Cost of a drafted token in the decode; `None` before the first measurement.
    token_cost: Option<f64>,
    /// Cost of a draft model's step, which drafts a token; `None` before the first measurement.
    step_cost: Option<f64>,
    /// Cost of a token that a draft model decodes in a catch-up; `None` before the first measurement.
    catch_up_cost: Option<f64>,
}

/// Adds a cost to a moving average, and returns the cost. The limit reduces the effect of decodes that another process
/// delayed; without it, a delay of the first one would end the drafts of all later runs.
fn add_cost(average: &mut Option<f64>, cost: f64) -> f64 {
    let cost = cost.min(2.0 * average.unwrap_or(INITIAL_TOKEN_COST).max(MIN_TOKEN_COST));
    *average = Some(average.map_or(cost, |known| known + NEW_WEIGHT * (cost - known)));
    cost
}

impl DecodeTimes {
    /// Adds the time of a decode of one token for each of `runs` runs.
    pub fn add_plain(&mut self, runs: usize, seconds: f64) {
        if self.0.len() <= runs {
            self.0.resize(runs + 1, DecodeTime::default());
        }
        let time = &mut self.0[runs];
        // The limit reduces the effect of decodes that another process delayed.
        time.plain = match time.valid_for {
            0 => seconds,
            _ => time.plain + NEW_WEIGHT * (seconds.min(2.0 * time.plain) - time.plain),
        };
        time.valid_for = MAX_AGE;
    }

    /// Adds the time of a decode of one token for each of `runs` runs and of `drafted` more tokens. Returns the cost of
    /// a drafted token; `None` if no decode without drafts was measured.
    pub fn add_drafted(&mut self, runs: usize, drafted: usize, seconds: f64) -> Option<f64> {
        let time = self.0.get_mut(runs).filter(|time| time.valid_for > 0)?;
        time.valid_for -= 1;
        let cost = (seconds / time.plain - 1.0) * runs as f64 / drafted.max(1) as f64;
        Some(add_cost(&mut time.token_cost, cost))
    }

    /// Adds the time that a draft model took for `steps` steps of runs, before a decode of `runs` runs. Returns the
    /// cost of a step; 0 if no decode without drafts was measured.
    pub fn add_steps(&mut self, runs: usize, steps: usize, seconds: f64) -> f64 {
        self.add_draft_model(runs, steps, seconds, |time| &mut time.step_cost)
    }

    /// Adds the time that a draft model took to decode `tokens` tokens, before a decode of `runs` runs. Returns the
    /// cost of a token; 0 if no decode without drafts was measured.
    pub fn add_catch_up(&mut self, runs: usize, tokens: usize, seconds: f64) -> f64 {
        self.add_draft_model(runs, tokens, seconds, |time| &mut time.catch_up_cost)
    }

    fn add_draft_model(
        &mut self,
        runs: usize,
        count: usize,
        seconds: f64,
        average: impl Fn(&mut DecodeTime) -> &mut Option<f64>,
    ) -> f64 {
        let Some(time) = self.0.get_mut(runs).filter(|time| time.valid_for > 0) else { return 0.0 };
        let cost = seconds / time.plain * runs as f64 / count.max(1) as f64;
        add_cost(average(time), cost)
    }

    /// Returns the expected cost of a draft model's step. Before the first measurement, a new run can pay for one
    /// drafted token, which costs `token_cost` in the decode.
    pub fn step_cost(&self, runs: usize, token_cost: f64) -> f64 {
        let known = self.0.get(runs).and_then(|time| time.step_cost);
        known.unwrap_or_else(|| (INITIAL_TOKEN_COST - token_cost).max(0.0))
    }

    /// Returns the expected cost of a token that a draft model decodes in a catch-up; 0 before the first measurement.
    pub fn catch_up_cost(&self, runs: usize) -> f64 {
        self.0.get(runs).and_then(|time| time.catch_up_cost).unwrap_or_default()
    }

    /// Returns the expected cost of a drafted token; `None` if the next decode must have no drafts.
    pub fn token_cost(&self, runs: usize) -> Option<f64> {
        let time = self.0.get(runs).filter(|time| time.valid_for > 0)?;
        Some(time.token_cost.unwrap_or(INITIAL_TOKEN_COST).max(MIN_TOKEN_COST))
    }
}

/// Account of one run's drafts.
pub struct DraftAccount {
    /// Balance, in times of a token without drafts.
    balance: f64,
    /// Income above the maximum balance. It pays only for tokens that a draft model decodes in a catch-up.
    savings: f64,
    /// Maximum tokens of the next draft, which depends on the success of the last one.
    length: usize,
    /// Tokens of the last draft.
    drafted: usize,
    /// Accepted tokens of the last draft.
    accepted: usize,
}

impl DraftAccount {
    /// Creates the account of a new run.
    pub fn new() -> Self {
        Self { balance: INITIAL_BALANCE, savings: 0.0, length: INITIAL_LENGTH, drafted: 0, accepted: 0 }
    }

    /// Returns the maximum tokens of the next draft, each of which costs `token_cost`.
    pub fn max_draft(&mut self, token_cost: f64) -> usize {
        if self.drafted > 0 {
            let all_accepted = self.accepted == self.drafted;
            self.length = if all_accepted { self.length.max(2 * self.drafted) } else { self.accepted + 2 };
            self.drafted = 0;
        }
        self.length.min((self.balance / token_cost).max(0.0) as usize)
    }

    /// Adds the income from a decode in which the run had no draft.
    pub fn add_plain(&mut self) {
        self.balance = (self.balance + TRIAL_SHARE).min(MAX_BALANCE);
    }

    /// Charges a draft of `drafted` tokens, which cost `token_cost` each.
    pub fn charge_draft(&mut self, drafted: usize, token_cost: f64) {
        (self.drafted, self.accepted) = (drafted, 0);
        self.balance -= drafted as f64 * token_cost;
    }

    /// Adds the income from an accepted token of the draft.
    pub fn add_accepted(&mut self) {
        self.accepted += 1;
        self.balance += 1.0;
        self.savings += (self.balance - MAX_BALANCE).max(0.0);
        self.balance = self.balance.min(MAX_BALANCE);
    }

    /// Returns true if the account can pay for tokens that a draft model decodes in a catch-up.
    pub fn can_pay(&self, cost: f64) -> bool {
        cost <= self.balance + self.savings
    }

    /// Charges tokens that a draft model has decoded in a catch-up.
    pub fn charge_catch_up(&mut self, cost: f64) {
        let saved = cost.min(self.savings);
        self.savings -= saved;
        self.balance -= cost - saved;
    }

    /// Charges the steps of a draft model.
    pub fn charge_steps(&mut self, cost: f64) {
        self.balance -= cost;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Simulates the generation of `tokens` tokens. Returns its time, in times of a token without drafts. The first
    /// `correct` tokens of a draft are accepted.
    fn elapsed(tokens: usize, token_cost: f64, mut correct: impl FnMut() -> usize) -> f64 {
        let (mut times, mut account) = (DecodeTimes::default(), DraftAccount::new());
        let (mut generated, mut elapsed) = (0, 0.0);
        while generated < tokens {
            let max = times.token_cost(1).map_or(0, |cost| account.max_draft(cost)).min(16);
            if max == 0 {
                times.add_plain(1, 1.0);
                account.add_plain();
                (generated, elapsed) = (generated + 1, elapsed + 1.0);
                continue;
            }
            let seconds = 1.0 + max as f64 * token_cost;
            let cost = times.add_drafted(1, max, seconds).unwrap();
            account.charge_draft(max, cost);
            let accepted = correct().min(max);
            (0..accepted).for_each(|_| account.add_accepted());
            (generated, elapsed) = (generated + 1 + accepted, elapsed + seconds);
        }
        elapsed
    }

    #[test]
    fn rejected_drafts_cost_less_than_three_percent() {
        for token_cost in [0.02, 0.1, 0.25, 0.6, 1.0] {
            for tokens in [64, 128, 1000] {
                let slowdown = elapsed(tokens, token_cost, || 0) / tokens as f64;
                assert!(slowdown < 1.03, "{token_cost} {tokens}: {slowdown}");
            }
        }
    }

    #[test]
    fn accepted_drafts_are_as_fast_as_their_cost_permits() {
        for (token_cost, min_speedup) in [(0.02, 9.0), (0.1, 5.0), (0.25, 2.5), (0.6, 1.2)] {
            let speedup = 200.0 / elapsed(200, token_cost, || usize::MAX);
            assert!(speedup > min_speedup, "{token_cost}: {speedup}");
        }
    }

    #[test]
    fn partly_accepted_drafts_are_not_slower() {
        for token_cost in [0.05, 0.2, 0.4] {
            let mut draft = 0;
            let speedup = 500.0
                / elapsed(500, token_cost, || {
                    draft += 1;
                    draft % 3
                });
            assert!(speedup > 0.97, "{token_cost}: {speedup}");
        }
    }

    #[test]
    fn draft_model_that_is_never_right_costs_less_than_three_percent() {
        for (step_cost, catch_up_cost) in [(0.05, 0.01), (0.1, 0.03), (0.3, 0.1), (0.9, 0.9)] {
            let (mut times, mut account) = (DecodeTimes::default(), DraftAccount::new());
            let (mut elapsed, mut lag, tokens) = (0.0, 0_usize, 1000);
            for _ in 0..tokens {
                let expected = times.token_cost(1).map(|cost| cost + times.step_cost(1, cost));
                let max = expected.map_or(0, |cost| account.max_draft(cost)).min(16);
                let can_draft = max > 0 && account.can_pay(lag as f64 * times.catch_up_cost(1));
                elapsed += 1.0;
                if !can_draft {
                    times.add_plain(1, 1.0);
                    account.add_plain();
                    lag += 1;
                    continue;
                }
                let (catch_up, drafted) = (lag as f64 * catch_up_cost, max as f64);
                account.charge_catch_up(lag as f64 * times.add_catch_up(1, lag, catch_up));
                account.charge_steps(drafted * times.add_steps(1, max, drafted * step_cost));
                account.charge_draft(max, times.add_drafted(1, max, 1.0 + 0.2 * drafted).unwrap());
                elapsed += catch_up + drafted * (step_cost + 0.2);
                lag = 1;
            }
            let slowdown = elapsed / f64::from(tokens);
            assert!(slowdown < 1.03, "{step_cost} {catch_up_cost}: {slowdown}");
        }
    }

    #[test]
    fn delayed_decodes_do_not_stop_correct_drafts() {
        let mut decodes = 0;
        let (mut times, mut account) = (DecodeTimes::default(), DraftAccount::new());
        let mut drafted = 0;
        for _ in 0..200 {
            decodes += 1;
            let delay = if decodes % 7 == 0 { 8.0 } else { 1.0 };
            let max = times.token_cost(1).map_or(0, |cost| account.max_draft(cost)).min(16);
            if max == 0 {
                times.add_plain(1, delay);
                account.add_plain();
                continue;
            }
            account.charge_draft(max, times.add_drafted(1, max, delay * (1.0 + 0.2 * max as f64)).unwrap());
            (0..max).for_each(|_| account.add_accepted());
            drafted += max;
        }
        assert!(drafted > 1000, "{drafted}");
    }

    #[test]
    fn delay_of_the_first_draft_does_not_end_drafts() {
        let mut times = DecodeTimes::default();
        times.add_plain(1, 1.0);
        times.add_drafted(1, 1, 50.0).unwrap();
        let mut account = DraftAccount::new();
        let plain = (0..1000).take_while(|_| {
            let waits = account.max_draft(times.token_cost(1).unwrap()) == 0;
            account.add_plain();
            waits
        });
        assert!((1..50).contains(&plain.count()));
    }

    #[test]
    fn savings_pay_only_for_catch_ups() {
        let mut account = DraftAccount::new();
        (0..40).for_each(|_| account.add_accepted());
        assert!(account.can_pay(40.0) && !account.can_pay(41.0));
        assert_eq!(account.max_draft(4.1), 0, "savings pay for no drafts");
        account.charge_catch_up(30.0);
        assert!(account.can_pay(10.0) && !account.can_pay(11.0));
        account.charge_steps(4.0);
        assert_eq!(account.max_draft(0.1), 0);
    }

    #[test]
    fn plain_decodes_are_measured_again() {
        let mut times = DecodeTimes::default();
        assert_eq!(times.token_cost(2), None);
        times.add_plain(2, 0.01);
        assert_eq!(times.token_cost(2), Some(INITIAL_TOKEN_COST));
        assert_eq!(times.token_cost(1), None);
        for _ in 0..MAX_AGE {
            assert!(times.add_drafted(2, 4, 0.012).is_some());
        }
        assert_eq!(times.token_cost(2), None);
    }
}
