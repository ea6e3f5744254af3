//! The positions of an experiment's cells, and its summary: counts, and the means of each combination of mods and
//! parameters.

use crate::store::{CellOutcome, CellState};
use serde::Serialize;
use utoipa::ToSchema;

/// The sizes of a grid. The seeds vary fastest, then the parameters, the mods and the prompts.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Grid<'a> {
    /// Number of lists of mods.
    pub(crate) mods: usize,
    /// Number of sets of parameters.
    pub(crate) parameters: usize,
    /// The seeds.
    pub(crate) seeds: &'a [u32],
}

/// The position of a cell in each list of the definition.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, ToSchema)]
pub struct CellPosition {
    /// Index of the prompt.
    pub(crate) prompt: usize,
    /// Index of the list of mods.
    pub(crate) mods: usize,
    /// Index of the set of parameters.
    pub(crate) parameters: usize,
    /// The seed.
    pub(crate) seed: u32,
}

impl Grid<'_> {
    /// Returns the position of a cell.
    pub(crate) fn position(&self, cell: usize) -> CellPosition {
        let (rest, seed) = (cell / self.seeds.len(), cell % self.seeds.len());
        let (rest, parameters) = (rest / self.parameters, rest % self.parameters);
        let (prompt, mods) = (rest / self.mods, rest % self.mods);
        CellPosition { prompt, mods, parameters, seed: self.seeds[seed] }
    }

    /// Returns the first cell with the prompt and the seed of a cell, the one with the first mods and parameters.
    pub(crate) fn baseline(&self, cell: usize) -> usize {
        let variants = self.mods * self.parameters;
        let (prompt, seed) = (cell / self.seeds.len() / variants, cell % self.seeds.len());
        prompt * variants * self.seeds.len() + seed
    }
}

/// Number of cells by state.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, ToSchema)]
pub struct CellCounts {
    /// Not started.
    pub(crate) pending: usize,
    /// Started, and not ended.
    pub(crate) running: usize,
    /// Ended by themselves.
    pub(crate) done: usize,
    /// Cancelled.
    pub(crate) cancelled: usize,
    /// Failed or could not be started.
    pub(crate) failed: usize,
    /// Interrupted because the server ended.
    pub(crate) interrupted: usize,
    /// Run was deleted.
    pub(crate) deleted: usize,
}

impl CellCounts {
    fn add(&mut self, state: CellState) {
        let count = match state {
            CellState::Pending => &mut self.pending,
            CellState::Running => &mut self.running,
            CellState::Done => &mut self.done,
            CellState::Cancelled => &mut self.cancelled,
            CellState::Failed => &mut self.failed,
            CellState::Interrupted => &mut self.interrupted,
            CellState::Deleted => &mut self.deleted,
        };
        *count += 1;
    }
}

/// The cells with one list of mods and one set of parameters.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct VariantSummary {
    /// Index of the list of mods.
    pub(crate) mods: usize,
    /// Index of the set of parameters.
    pub(crate) parameters: usize,
    /// Number of cells whose runs ended by themselves.
    pub(crate) done: usize,
    /// Number of failed cells.
    pub(crate) failed: usize,
    /// Mean number of tokens of the answers of `done` cells.
    pub(crate) mean_tokens: Option<f64>,
    /// Mean score of all cells with a score.
    pub(crate) mean_score: Option<f64>,
    /// Standard error of the mean score: the sample standard deviation of the scores, divided by the square root of their
    /// number; null for fewer than two scores.
    pub(crate) score_standard_error: Option<f64>,
}

/// The summary of an experiment.
#[derive(Debug, Clone, PartialEq, Serialize, ToSchema)]
pub struct ExperimentSummary {
    /// Number of cells by state.
    pub(crate) counts: CellCounts,
    /// Means by mods and parameters.
    pub(crate) variants: Vec<VariantSummary>,
}

impl ExperimentSummary {
    /// Summarizes the started cells of a grid of `cells` cells.
    pub(crate) fn new(grid: Grid<'_>, cells: usize, outcomes: &[CellOutcome]) -> Self {
        let mut counts = CellCounts { pending: cells.saturating_sub(outcomes.len()), ..CellCounts::default() };
        let mut sums = vec![Sums::default(); grid.mods * grid.parameters];
        for outcome in outcomes {
            counts.add(outcome.state);
            let position = grid.position(usize::try_from(outcome.cell).unwrap_or_default());
            if let Some(sums) = sums.get_mut(position.mods * grid.parameters + position.parameters) {
                sums.add(outcome);
            }
        }
        let variants = sums.into_iter().enumerate().map(|(variant, sums)| VariantSummary {
            mods: variant / grid.parameters,
            parameters: variant % grid.parameters,
            done: sums.done,
            failed: sums.failed,
            mean_tokens: (sums.done > 0).then(|| sums.tokens / sums.done as f64),
            mean_score: mean(&sums.scores),
            score_standard_error: standard_error(&sums.scores),
        });
        Self { counts, variants: variants.collect() }
    }
}

#[derive(Debug, Clone, Default)]
struct Sums {
    done: usize,
    failed: usize,
    tokens: f64,
    scores: Vec<f64>,
}

impl Sums {
    fn add(&mut self, outcome: &CellOutcome) {
        match outcome.state {
            CellState::Done => {
                self.done += 1;
                self.tokens += f64::from(outcome.completion_tokens);
            }
            CellState::Failed => self.failed += 1,
            _ => {}
        }
        self.scores.extend(outcome.score.map(f64::from));
    }
}

fn mean(values: &[f64]) -> Option<f64> {
    (!values.is_empty()).then(|| values.iter().sum::<f64>() / values.len() as f64)
}

/// Returns the sample standard deviation divided by the square root of the number of values.
fn standard_error(values: &[f64]) -> Option<f64> {
    let mean = mean(values).filter(|_| values.len() > 1)?;
    let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
    Some((squares / (values.len() - 1) as f64 / values.len() as f64).sqrt())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cells_are_summarized_by_mods_and_parameters() {
        let grid = Grid { mods: 2, parameters: 1, seeds: &[5, 6] };
        assert_eq!(grid.position(6), CellPosition { prompt: 1, mods: 1, parameters: 0, seed: 5 });
        assert_eq!((grid.baseline(6), grid.baseline(7), grid.baseline(3)), (4, 5, 1));
        let outcome = |cell, state, score, completion_tokens| CellOutcome {
            cell,
            run_id: None,
            state,
            ended: true,
            score,
            completion_tokens,
        };
        let outcomes = [
            outcome(0, CellState::Done, Some(1.0), 4),
            outcome(1, CellState::Done, Some(0.0), 8),
            outcome(2, CellState::Failed, Some(1.0), 0),
        ];
        let summary = ExperimentSummary::new(grid, 8, &outcomes);
        assert_eq!((summary.counts.pending, summary.counts.done, summary.counts.failed), (5, 2, 1));
        let means: Vec<_> = summary.variants.iter().map(|one| (one.failed, one.mean_tokens, one.mean_score)).collect();
        assert_eq!(means, [(0, Some(6.0), Some(0.5)), (1, None, Some(1.0))]);
        let errors: Vec<_> = summary.variants.iter().map(|one| one.score_standard_error).collect();
        assert_eq!(errors, [Some(0.5), None]);
        // The sample variance of 1, 2 and 4 is 7/3.
        assert!((standard_error(&[1.0, 2.0, 4.0]).unwrap() - (7.0_f64 / 9.0).sqrt()).abs() < 1e-12);
    }
}
