//! Comparison of grammars with llama.cpp's own grammar sampler.

use super::*;
use crate::model::grammar::{Constraint, GrammarSource};

/// Grammars allow the same tokens as in llama.cpp, along random answers.
#[test]
fn grammars_allow_the_same_tokens_as_llama_cpp() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/grammars");
    let vocabulary = MODEL.vocabulary();
    let mut steps = 0;
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "gbnf") {
            continue;
        }
        let source = std::fs::read_to_string(&path).unwrap();
        for seed in 0..4u64 {
            let mut theirs = LlamaSampler::grammar(&MODEL.llama, &source, "root").unwrap();
            let mut ours = MODEL
                .grammars()
                .start_matcher(&Constraint::new("grammar", GrammarSource::Gbnf(source.clone())))
                .unwrap();
            let mut sequence = Vec::new();
            for step in 0..40 {
                let mask = ours.mask().unwrap().unwrap();
                let all = (0..vocabulary.len() as i32).map(|id| LlamaTokenData::new(LlamaToken::new(id), 0.0, 0.0));
                let mut array = LlamaTokenDataArray::from_iter(all, false);
                theirs.apply(&mut array);
                let mut allowed = Vec::new();
                for entry in &array.data {
                    let token = entry.id().0;
                    // llama.cpp matches control tokens by their text, is less strict about incomplete characters, and
                    // treats NUL as the end of a text.
                    let piece = vocabulary.piece(token);
                    let text = std::str::from_utf8(piece).is_ok_and(|text| !text.contains('\0'))
                        && !vocabulary.is_control(token);
                    if text || vocabulary.is_end_of_generation(token) {
                        let (here, there) = (mask.is_allowed(token as u32), entry.logit() == 0.0);
                        let so_far = vocabulary.decode(&sequence);
                        assert_eq!(here, there, "{}: {so_far:?} + {:?}", path.display(), vocabulary.decode(&[token]));
                    }
                    let both = mask.is_allowed(token as u32) && entry.logit() == 0.0;
                    if both && !vocabulary.is_control(token) && !vocabulary.is_end_of_generation(token) {
                        allowed.push(token);
                    }
                }
                if allowed.is_empty() {
                    break;
                }
                let token = allowed[(seed * 7919 + step * 104_729) as usize % allowed.len()];
                theirs.accept(LlamaToken::new(token));
                ours.accept(token, vocabulary.piece(token));
                sequence.push(token);
                if ours.is_complete() {
                    break;
                }
            }
            steps += sequence.len();
        }
    }
    assert!(steps > 400, "{steps}");
}
