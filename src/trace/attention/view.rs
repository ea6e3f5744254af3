//! Views of the raw attention of one step, before its lossy encoding: one value per position, the strongest positions,
//! statistics of each layer.

use super::{AttentionCodecError, reduce};

/// The raw attention of one step: `[layer][head][position]` probabilities.
#[derive(Debug, Clone, Copy)]
pub struct AttentionRows<'a> {
    values: &'a [f32],
    layers: usize,
    heads: usize,
    row_len: usize,
}

/// A position and the attention of each layer to it: the mean over the layer's heads.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct TopPosition {
    /// Index in the sequence.
    pub position: u32,
    /// One value per layer.
    pub layers: Vec<f32>,
}

/// Statistics of one step, per layer.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct AttentionStatistics {
    /// Mean over all positions and heads.
    pub mean_by_layer: Vec<f32>,
    /// Largest value of any head.
    pub max_by_layer: Vec<f32>,
    /// Mean entropy of the layer's heads, in bits.
    pub entropy_by_layer: Vec<f32>,
    /// Mean entropy of all heads, in bits.
    pub entropy: f32,
    /// The position with the largest mean over all heads of all layers.
    pub sink: u32,
    /// Share of the row at the sink, mean over the layer's heads.
    pub sink_mass_by_layer: Vec<f32>,
}

impl<'a> AttentionRows<'a> {
    /// Creates the view of `layers` × `heads` rows.
    ///
    /// # Errors
    /// [`AttentionCodecError::Shape`].
    pub fn new(values: &'a [f32], layers: usize, heads: usize) -> Result<Self, AttentionCodecError> {
        let rows = layers * heads;
        let row_len = values.len().checked_div(rows).unwrap_or(0);
        if row_len == 0 || row_len * rows != values.len() {
            return Err(AttentionCodecError::Shape { values: values.len(), layers, heads, row_len });
        }
        Ok(Self { values, layers, heads, row_len })
    }

    /// Returns the number of positions per row.
    #[must_use]
    pub fn row_len(&self) -> usize {
        self.row_len
    }

    /// Returns the largest sum of a row; infinite if a value is NaN. Rows of models with attention sinks sum to less
    /// than 1.
    #[must_use]
    pub fn max_row_sum(&self) -> f32 {
        let sums = self.values.chunks_exact(self.row_len).map(reduce::sum);
        sums.fold(0.0, |max, sum| if sum.is_nan() { f32::INFINITY } else { sum.max(max) })
    }

    /// Returns the mean over all heads of all layers.
    #[must_use]
    pub fn mean(&self) -> Vec<f32> {
        self.weighted(&vec![1.0; self.layers])
    }

    /// Returns the largest value over all heads of all layers.
    #[must_use]
    pub fn max(&self) -> Vec<f32> {
        let (mut sum, mut max) = (vec![0.0; self.row_len], vec![0.0; self.row_len]);
        for row in self.values.chunks_exact(self.row_len) {
            reduce::accumulate(row, &mut sum, &mut max);
        }
        max
    }

    /// Returns the mean over the heads of the last layer.
    #[must_use]
    pub fn last_layer(&self) -> Vec<f32> {
        self.head_mean(self.layers - 1)
    }

    /// Returns the mean over all heads, with layers weighted by `weights`, which need not sum to 1; layers without a
    /// weight count as 0.
    #[must_use]
    pub fn weighted(&self, weights: &[f32]) -> Vec<f32> {
        let total: f32 = weights.iter().take(self.layers).sum();
        let mut mean = vec![0.0; self.row_len];
        for (layer, &weight) in weights.iter().enumerate().take(self.layers).filter(|(_, weight)| **weight != 0.0) {
            let mut of_layer = self.head_mean(layer);
            reduce::scale(&mut of_layer, weight / total);
            reduce::add(&of_layer, &mut mean);
        }
        mean
    }

    /// Returns the `count` positions with the largest mean over all heads of all layers, largest first.
    #[must_use]
    pub fn top_positions(&self, count: usize) -> Vec<TopPosition> {
        let layers: Vec<Vec<f32>> = (0..self.layers).map(|layer| self.head_mean(layer)).collect();
        let mut mean = vec![0.0; self.row_len];
        layers.iter().for_each(|layer| reduce::add(layer, &mut mean));
        let mut order: Vec<usize> = (0..self.row_len).collect();
        let count = count.min(order.len());
        let by_mean = |a: &usize, b: &usize| mean[*b].total_cmp(&mean[*a]).then(a.cmp(b));
        if count < order.len() {
            order.select_nth_unstable_by(count, by_mean);
            order.truncate(count);
        }
        order.sort_unstable_by(by_mean);
        let strong = |position: usize| TopPosition {
            position: position as u32,
            layers: layers.iter().map(|layer| layer[position]).collect(),
        };
        order.into_iter().map(strong).collect()
    }

    /// Returns the statistics of every layer.
    #[must_use]
    pub fn statistics(&self) -> AttentionStatistics {
        let mean = self.mean();
        let sink = reduce::position_of(&mean, reduce::max_value(&mean));
        let by_layer = |of_row: &dyn Fn(&[f32]) -> f32| -> Vec<f32> {
            let layers = self.values.chunks_exact(self.heads * self.row_len);
            layers.map(|layer| layer.chunks_exact(self.row_len).map(of_row).sum::<f32>() / self.heads as f32).collect()
        };
        let entropy_by_layer = by_layer(&reduce::entropy);
        AttentionStatistics {
            mean_by_layer: by_layer(&|row| reduce::sum(row) / self.row_len as f32),
            max_by_layer: self.values.chunks_exact(self.heads * self.row_len).map(reduce::max_value).collect(),
            entropy: entropy_by_layer.iter().sum::<f32>() / self.layers as f32,
            entropy_by_layer,
            sink: sink as u32,
            sink_mass_by_layer: by_layer(&|row| row[sink]),
        }
    }

    fn head_mean(&self, layer: usize) -> Vec<f32> {
        let mut mean = vec![0.0; self.row_len];
        let size = self.heads * self.row_len;
        for head in self.values[layer * size..(layer + 1) * size].chunks_exact(self.row_len) {
            reduce::add(head, &mut mean);
        }
        reduce::scale(&mut mean, 1.0 / self.heads as f32);
        mean
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two layers, two heads, three positions.
    const VALUES: [f32; 12] = [0.5, 0.25, 0.25, 0.0, 1.0, 0.0, 0.125, 0.125, 0.75, 0.25, 0.5, 0.25];

    #[test]
    fn heads_are_combined_by_every_aggregation() {
        let rows = AttentionRows::new(&VALUES, 2, 2).unwrap();
        assert_eq!(rows.mean(), [0.21875, 0.46875, 0.3125]);
        assert_eq!(rows.max(), [0.5, 1.0, 0.75]);
        assert_eq!(rows.last_layer(), [0.1875, 0.3125, 0.5]);
        assert_eq!(rows.weighted(&[0.0, 2.0]), rows.last_layer());
        assert_eq!(rows.weighted(&[1.0]), [0.25, 0.625, 0.125]);
        assert!((rows.max_row_sum() - 1.0).abs() < 1e-6);
        let strong = rows.top_positions(2);
        assert_eq!((strong[0].position, &strong[0].layers), (1, &vec![0.625, 0.3125]));
        assert_eq!((strong[1].position, strong.len()), (2, 2));
        assert_eq!(rows.top_positions(99).len(), 3);
        let statistics = rows.statistics();
        assert_eq!(statistics.max_by_layer, [1.0, 0.75]);
        assert_eq!((statistics.sink, &statistics.sink_mass_by_layer), (1, &vec![0.625, 0.3125]));
        assert_eq!(statistics.entropy_by_layer[0], 0.75);
    }

    #[test]
    fn shape_errors_and_row_sums_are_reported() {
        assert!(AttentionRows::new(&VALUES, 5, 1).is_err());
        assert!(AttentionRows::new(&[], 1, 1).is_err());
        assert!(AttentionRows::new(&VALUES, 0, 1).is_err());
        assert_eq!(AttentionRows::new(&[0.5, 0.75], 1, 1).unwrap().max_row_sum(), 1.25);
        assert_eq!(AttentionRows::new(&[f32::NAN, 0.0], 1, 1).unwrap().max_row_sum(), f32::INFINITY);
    }
}
