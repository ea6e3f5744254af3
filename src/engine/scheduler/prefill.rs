//! Division of the decode time between prompts and generating runs.

use std::time::Duration;

/// Limits on the decoding of prompts.
pub struct PrefillPolicy {
    /// Maximum total tokens of prompts that share a decode; longer prompts are decoded one after the other. A CPU is
    /// not faster with more tokens at once, and the first prompt would wait for the last. A GPU needs a full physical
    /// batch.
    pub max_shared_tokens: usize,
    /// Maximum tokens of one prompt in one decode. On a CPU, larger chunks are not faster because their working set
    /// exceeds the cache. On a GPU, only the batch size limits a chunk.
    pub max_chunk_tokens: usize,
    /// Minimum prompt tokens in a prefill phase. If the generating runs took part in every decode of a short prompt,
    /// each decode would cost an additional pass over the weights, and the last of many prompts would wait for all of
    /// them.
    tokens_between_decodes: usize,
}

const CPU_PREFILL: PrefillPolicy =
    PrefillPolicy { max_shared_tokens: 128, max_chunk_tokens: 256, tokens_between_decodes: 256 };
const GPU_PREFILL: PrefillPolicy =
    PrefillPolicy { max_shared_tokens: 512, max_chunk_tokens: usize::MAX, tokens_between_decodes: 512 };

impl PrefillPolicy {
    /// Selects the policy for a model on a GPU or on the CPU.
    pub fn select(has_gpu: bool) -> &'static Self {
        if has_gpu { &GPU_PREFILL } else { &CPU_PREFILL }
    }
}

/// Minimum duration of a prefill phase, as a multiple of the last decode of the generating runs. With a small model, a
/// pass over the weights takes as long as a hundred tokens of a prompt, so a minimum of tokens alone would delay the
/// last prompt by many passes.
const MIN_PREFILL_DECODES: u32 = 20;
/// Prompt tokens after which a prefill phase always ends.
const MAX_PREFILL_TOKENS: usize = 2048;

/// Prefill phase: decodes of prompts between two decodes of the generating runs.
#[derive(Debug, Default)]
pub struct PrefillPhase {
    /// Prompt tokens decoded in the phase.
    tokens: usize,
    /// Time of these decodes.
    time: Duration,
    /// Time of the last decode of the generating runs.
    generation: Duration,
    /// Prompt tokens in the planned batch.
    planned: usize,
}

impl PrefillPhase {
    /// Returns true if the generating runs are decoded next.
    pub fn is_over(&self, policy: &PrefillPolicy) -> bool {
        let suffices = self.time >= self.generation * MIN_PREFILL_DECODES || self.tokens >= MAX_PREFILL_TOKENS;
        self.tokens >= policy.tokens_between_decodes && suffices
    }

    /// Sets the number of prompt tokens in the planned batch.
    pub fn plan(&mut self, prompt_tokens: usize) {
        self.planned = prompt_tokens;
    }

    /// Adds the decode of the planned batch, which took `elapsed`.
    pub fn add_decode(&mut self, elapsed: Duration) {
        if self.planned > 0 {
            self.tokens += self.planned;
            self.time += elapsed;
        } else {
            (self.tokens, self.time, self.generation) = (0, Duration::ZERO, elapsed);
        }
    }
}

/// Splits `pending` tokens into chunks of equal size, of up to `max` tokens, and returns the size of the first. A short
/// last chunk would be slow, since llama.cpp computes flash attention for fewer than 64 tokens one token at a time.
pub fn even_chunk(pending: usize, max: usize) -> usize {
    pending.div_ceil(pending.div_ceil(max.max(1)).max(1))
}

#[cfg(test)]
mod tests {
    use super::{CPU_PREFILL, MAX_PREFILL_TOKENS, MIN_PREFILL_DECODES, PrefillPhase, even_chunk};
    use proptest::prelude::*;
    use std::time::Duration;

    #[test]
    fn prefill_phase_lasts_for_enough_tokens_and_time() {
        let generation = Duration::from_millis(3);
        let mut phase = PrefillPhase { generation, ..PrefillPhase::default() };
        // A chunk of 256 tokens that takes as long as seven decodes has enough tokens, but not enough time.
        phase.plan(CPU_PREFILL.tokens_between_decodes);
        phase.add_decode(7 * generation);
        assert!(!phase.is_over(&CPU_PREFILL));
        phase.add_decode((MIN_PREFILL_DECODES - 7) * generation);
        assert!(phase.is_over(&CPU_PREFILL));
        // The next phase starts after a decode without prompts. With a slow model, its first chunk has enough time.
        phase.plan(0);
        phase.add_decode(generation);
        assert!(!phase.is_over(&CPU_PREFILL));
        phase.plan(CPU_PREFILL.tokens_between_decodes - 1);
        phase.add_decode(100 * generation);
        assert!(!phase.is_over(&CPU_PREFILL));
        phase.plan(1);
        phase.add_decode(Duration::ZERO);
        assert!(phase.is_over(&CPU_PREFILL));
        // One slow decode does not stop the generating runs for long.
        phase.plan(0);
        phase.add_decode(Duration::from_mins(1));
        phase.plan(MAX_PREFILL_TOKENS);
        phase.add_decode(generation);
        assert!(phase.is_over(&CPU_PREFILL));
    }

    proptest! {
        #[test]
        fn chunks_are_even_and_as_few_as_possible(length in 1usize..5000, max in 1usize..600) {
            let (mut left, mut chunks) = (length, Vec::new());
            while left > 0 {
                chunks.push(even_chunk(left, max));
                left -= chunks[chunks.len() - 1];
            }
            prop_assert_eq!(chunks.len(), length.div_ceil(max));
            prop_assert!(chunks[0] <= max && chunks[0] - chunks[chunks.len() - 1] <= 1);
        }
    }
}
