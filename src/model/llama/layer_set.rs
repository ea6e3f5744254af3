//! Sets of layers.

/// Words of a [`LayerSet`]: llama.cpp supports models with up to 512 layers.
const LAYER_WORDS: usize = 8;

/// A set of layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LayerSet([u64; LAYER_WORDS]);

impl LayerSet {
    /// Creates the set of the first `count` layers.
    #[must_use]
    pub fn first(count: u16) -> Self {
        (0..count).collect()
    }

    /// Returns true if the set contains the layer.
    #[must_use]
    pub fn contains(&self, layer: u16) -> bool {
        self.0.get(usize::from(layer / 64)).is_some_and(|word| word >> (layer % 64) & 1 == 1)
    }

    /// Returns the number of layers in the set.
    #[must_use]
    pub fn len(&self) -> usize {
        self.0.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Returns true if the set has no layers.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(|&word| word == 0)
    }

    /// Returns the union of both sets.
    #[must_use]
    pub fn union(self, other: Self) -> Self {
        Self(std::array::from_fn(|word| self.0[word] | other.0[word]))
    }
}

impl FromIterator<u16> for LayerSet {
    /// Creates the set of these layers. Layers that no model has are left out.
    fn from_iter<Layers: IntoIterator<Item = u16>>(layers: Layers) -> Self {
        let mut set = Self::default();
        for layer in layers {
            if let Some(word) = set.0.get_mut(usize::from(layer / 64)) {
                *word |= 1 << (layer % 64);
            }
        }
        set
    }
}

#[cfg(test)]
mod tests {
    use super::LayerSet;

    #[test]
    fn layer_sets_hold_up_to_512_layers() {
        let set: LayerSet = [0, 63, 64, 511, 512, u16::MAX].into_iter().collect();
        let layers: Vec<u16> = (0..=u16::MAX).filter(|&layer| set.contains(layer)).collect();
        assert_eq!(layers, [0, 63, 64, 511]);
        assert_eq!(LayerSet::first(3), [2, 1, 0].into_iter().collect());
        assert_eq!(LayerSet::first(2).union([5].into_iter().collect()), [0, 1, 5].into_iter().collect());
        assert!(LayerSet::first(0).is_empty() && !set.is_empty());
        assert_eq!(set.len(), 4);
    }
}
