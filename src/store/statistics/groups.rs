//! Groups of runs: counts and percentiles by time step, model and mod.

use super::{
    GroupStatistics, ModStatistics, ModelStatistics, RunCounts, Statistics, StatisticsUnit, TimeStep, midnight,
};
use chrono::{DateTime, NaiveDate, Utc};
use std::collections::BTreeMap;

/// Histogram buckets per power of two.
const BUCKETS_PER_OCTAVE: f64 = 4.0;

/// Counts, and the histogram of times to the first token.
#[derive(Debug, Clone, Default)]
struct Group {
    counts: RunCounts,
    buckets: BTreeMap<i16, i64>,
}

impl Group {
    fn minus(&self, other: &Self) -> Self {
        let mut buckets = self.buckets.clone();
        for (bucket, runs) in &other.buckets {
            *buckets.entry(*bucket).or_default() -= runs;
        }
        Self { counts: self.counts.plus(&other.counts, -1), buckets }
    }

    fn statistics(&self) -> GroupStatistics {
        let counts = self.counts;
        let seconds = counts.generation_us as f64 / 1e6;
        GroupStatistics {
            counts,
            tokens_per_second: (seconds > 0.0).then(|| counts.timed_tokens as f64 / seconds),
            first_token_ms_p50: self.percentile(0.5),
            first_token_ms_p95: self.percentile(0.95),
        }
    }

    /// Returns a percentile of the time to the first token in milliseconds: the geometric middle of its bucket.
    fn percentile(&self, share: f64) -> Option<f64> {
        let total: i64 = self.buckets.values().sum();
        let mut left = (share * total as f64).ceil().max(1.0) as i64;
        for (bucket, runs) in &self.buckets {
            left -= runs;
            if left <= 0 {
                return Some(((f64::from(*bucket) + 0.5) / BUCKETS_PER_OCTAVE).exp2() / 1e3);
            }
        }
        None
    }
}

/// Counts of the runs of a step, a model or a mod: two of the three are `None`. An empty mod stands for all runs.
#[derive(sqlx::FromRow)]
pub(super) struct CountRow {
    step: Option<DateTime<Utc>>,
    model: Option<String>,
    #[sqlx(rename = "mod")]
    used_mod: Option<String>,
    #[sqlx(flatten)]
    counts: RunCounts,
}

/// Runs of a step, a model or a mod whose time to the first token is in a bucket.
#[derive(sqlx::FromRow)]
pub(super) struct BucketRow {
    step: Option<DateTime<Utc>>,
    model: Option<String>,
    #[sqlx(rename = "mod")]
    used_mod: Option<String>,
    bucket: i16,
    runs: i64,
}

/// Groups of runs while rows are added.
#[derive(Default)]
pub(super) struct Groups {
    total: Group,
    steps: BTreeMap<DateTime<Utc>, Group>,
    models: BTreeMap<String, Group>,
    mods: BTreeMap<String, Group>,
    /// All runs of the selected model, with which the runs with a mod are compared.
    all: Group,
}

impl Groups {
    /// Applies `add` to the groups of a row.
    fn each(
        &mut self,
        step: Option<DateTime<Utc>>,
        model: Option<String>,
        used_mod: Option<String>,
        add: impl Fn(&mut Group),
    ) {
        if let Some(step) = step {
            add(&mut self.total);
            add(self.steps.entry(step).or_default());
        }
        if let Some(model) = model {
            add(self.models.entry(model).or_default());
        }
        match used_mod {
            Some(name) if name.is_empty() => add(&mut self.all),
            Some(name) => add(self.mods.entry(name).or_default()),
            None => {}
        }
    }

    /// Adds rows.
    pub(super) fn add(&mut self, counts: Vec<CountRow>, buckets: Vec<BucketRow>) {
        for CountRow { step, model, used_mod, counts } in counts {
            self.each(step, model, used_mod, |group| group.counts = group.counts.plus(&counts, 1));
        }
        for BucketRow { step, model, used_mod, bucket, runs } in buckets {
            self.each(step, model, used_mod, |group| *group.buckets.entry(bucket).or_default() += runs);
        }
    }

    /// Returns the day of the first step.
    pub(super) fn first_day(&self) -> Option<NaiveDate> {
        self.steps.keys().next().map(DateTime::date_naive)
    }

    /// Returns the statistics of all groups, without the durations of mod calls.
    pub(super) fn finish(self, from: NaiveDate, unit: StatisticsUnit) -> Statistics {
        let mut models: Vec<ModelStatistics> = self
            .models
            .iter()
            .map(|(model, group)| ModelStatistics { model: model.clone(), statistics: group.statistics() })
            .collect();
        models.sort_by_key(|model| std::cmp::Reverse(model.statistics.counts.runs));
        let compared = |(name, group): (&String, &Group)| ModStatistics {
            name: name.clone(),
            with: group.statistics(),
            without: self.all.minus(group).statistics(),
        };
        let mut mods: Vec<ModStatistics> = self.mods.iter().map(compared).collect();
        mods.sort_by_key(|one| std::cmp::Reverse(one.with.counts.runs));
        let steps = self.steps.iter().map(|(at, group)| TimeStep { at: *at, statistics: group.statistics() }).collect();
        Statistics {
            from: midnight(from),
            unit,
            total: self.total.statistics(),
            steps,
            models,
            mods,
            mod_calls: Vec::new(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Group;

    #[test]
    fn percentiles_are_within_ten_percent() {
        let mut group = Group::default();
        assert_eq!(group.percentile(0.5), None);
        for us in 1..=1000_u32 {
            let bucket = (4.0 * (f64::from(us) * 100.0).log2()).floor() as i16;
            *group.buckets.entry(bucket).or_default() += 1;
        }
        for (share, exact) in [(0.5, 50.0), (0.95, 95.0), (1.0, 100.0)] {
            let found = group.percentile(share).unwrap();
            assert!((found / exact - 1.0).abs() < 0.1, "{share}: {found}");
        }
    }
}
