//! The sentences of a prompt: those that the request lists, or those that the server finds.

use crate::api::shared::fields::{abbreviate, integer};
use crate::events::TokenId;
use crate::model::Vocabulary;
use crate::server::ApiError;
use serde_json::Value;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::ops::Range;

/// Ends of sentences, if the request does not list sentences.
const SENTENCE_ENDS: [char; 4] = ['.', '!', '?', '\n'];
/// Roles and channels that chat templates write between control tokens.
const ROLES: [&str; 12] = [
    "system",
    "developer",
    "user",
    "assistant",
    "model",
    "tool",
    "function",
    "ipython",
    "environment",
    "analysis",
    "commentary",
    "final",
];

/// Key of a sentence in the history.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum SentenceKey {
    /// The client's `turn_id` and `sentence_id`.
    ClientIds(i64, i64),
    /// Hash of the tokens, because the server's own numbers change when a sentence is removed.
    Tokens(u64),
}

/// A sentence of the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sentence {
    pub(super) key: SentenceKey,
    pub(super) turn: i64,
    pub(super) sentence: i64,
    pub(super) start: usize,
    pub(super) end: usize,
}

impl Sentence {
    /// Returns the range of its tokens.
    pub(super) fn range(self) -> Range<usize> {
        self.start..self.end
    }
}

/// Parses `sentences`.
pub(super) fn listed_sentences(list: &[Value], tokens: usize) -> Result<Vec<Sentence>, ApiError> {
    let parsed = list.iter().enumerate().map(|(at, entry)| sentence(at, entry, tokens));
    let sentences = parsed.collect::<Result<Vec<_>, _>>()?;
    // Every step reads the attention to all tokens of all sentences.
    let total: usize = sentences.iter().map(|sentence| sentence.range().len()).sum();
    if total > tokens {
        let message = format!(
            "`sentences` must have at most {tokens} tokens in total, the number of input_ids, got {total}; sentences must \
             not overlap"
        );
        return Err(ApiError::invalid("sentences", message));
    }
    Ok(sentences)
}

fn sentence(at: usize, value: &Value, tokens: usize) -> Result<Sentence, ApiError> {
    let field = |name: &str| value.get(name).and_then(integer);
    let parse = || {
        let (start, end) = (usize::try_from(field("start")?).ok()?, usize::try_from(field("end")?).ok()?);
        let (turn, number) = (field("turn_id")?, field("sentence_id")?);
        let sentence = Sentence { key: SentenceKey::ClientIds(turn, number), turn, sentence: number, start, end };
        (start < end && end <= tokens).then_some(sentence)
    };
    parse().ok_or_else(|| {
        let message = format!(
            "`sentences[{at}]` must be {{turn_id, sentence_id, start, end}} with 0 <= start < end <= {tokens}, the number of \
             input_ids, got {}",
            abbreviate(value)
        );
        ApiError::invalid(format!("sentences[{at}]"), message)
    })
}

/// Splits the prompt into sentences. Turns start at control tokens, sentences end at `.`, `!`, `?` and line breaks. The
/// markup of a chat template belongs to no sentence because removing it would merge two turns: control tokens, and the
/// tokens after them that [`header_len`] counts.
pub(super) fn split_sentences(vocabulary: &Vocabulary, prompt: &[TokenId]) -> Vec<Sentence> {
    let mut sentences = Vec::new();
    let (mut turn, mut number, mut start) = (0, 0, 0);
    let texts = vocabulary.texts(prompt);
    for (index, (&token, text)) in prompt.iter().zip(&texts).enumerate() {
        let control = vocabulary.is_control(token);
        let ends = !control && (index + 1 == prompt.len() || text.trim_end_matches(' ').ends_with(SENTENCE_ENDS));
        let end = if control { index } else { index + 1 };
        if (control || ends) && end > start {
            let mut hasher = DefaultHasher::new();
            prompt[start..end].hash(&mut hasher);
            let key = SentenceKey::Tokens(hasher.finish());
            sentences.push(Sentence { key, turn, sentence: number, start, end });
            number += 1;
        }
        if control {
            (turn, number) = (turn + i64::from(number > 0), 0);
            let text = prompt[index + 1..].iter().take_while(|&&token| !vocabulary.is_control(token)).count();
            start = index + 1 + header_len(&texts[index + 1..][..text]);
        } else if ends {
            start = start.max(index + 1);
        }
    }
    sentences
}

/// Returns the number of tokens that a chat template has written directly after a control token, given the `texts` up to
/// the next control token: a role up to its line break, one of [`ROLES`] up to the next control token, or white space. Any
/// other word before a control token may be a whole message.
fn header_len(texts: &[String]) -> usize {
    let is_role = |c: char| c.is_ascii_alphanumeric() || c == '_' || c == '-';
    // The text of an incomplete character is empty.
    let role = texts.iter().take_while(|text| !text.is_empty() && text.chars().all(is_role)).count();
    let is_space = |text: &&String| !text.is_empty() && text.trim().is_empty();
    let space = texts[role..].iter().take_while(is_space).count();
    let end = role + space;
    let is_whole_header = end == texts.len() && ROLES.contains(&texts[..role].concat().as_str());
    if role == 0 || is_whole_header || texts[role..end].concat().contains('\n') { end } else { 0 }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::model::SpecialTokens;
    use serde_json::json;

    /// Returns the field `sentences` for these ranges of tokens.
    pub(crate) fn list(ranges: &[(usize, usize)]) -> Vec<Value> {
        let ranges = ranges.iter().enumerate();
        ranges.map(|(at, (start, end))| json!({"turn_id": 1, "sentence_id": at, "start": start, "end": end})).collect()
    }

    /// Returns turn and text of each sentence of a prompt with these tokens. Those in angle brackets are control tokens.
    fn split(tokens: &[&str]) -> Vec<(i64, String)> {
        let pieces = tokens.iter().map(|token| Box::from(token.as_bytes())).collect();
        let control = tokens.iter().map(|token| token.starts_with('<')).collect();
        let vocabulary = Vocabulary::new(pieces, control, Vec::new(), SpecialTokens::default(), |_, _, _| Vec::new());
        let prompt: Vec<TokenId> = (0..tokens.len() as TokenId).collect();
        let sentences = split_sentences(&vocabulary, &prompt);
        sentences.iter().map(|sentence| (sentence.turn, tokens[sentence.range()].concat())).collect()
    }

    #[test]
    fn markup_of_chat_templates_is_in_no_sentence() {
        let chatml =
            ["<im_start>", "us", "er", "\n", "What", "?", " Hi", "<im_end>", "\n", "<im_start>", "assistant", "\n"];
        let llama = [
            "<bos>",
            "<header>",
            "user",
            "</header>",
            "\n\n",
            "What",
            "?",
            " Hi",
            "<eot>",
            "<header>",
            "assistant",
            "</header>",
            "\n\n",
        ];
        let gemma = ["<bos>", "<turn>", "user", "\n", "What", "?", " Hi", "</turn>", "\n", "<turn>", "model", "\n"];
        let mistral = ["<s>", "<INST>", " ", "What", "?", " Hi", "</INST>"];
        for tokens in [&chatml[..], &llama, &gemma, &mistral] {
            assert_eq!(split(tokens), [(0, "What?".to_owned()), (0, " Hi".to_owned())], "{tokens:?}");
        }
    }

    #[test]
    fn text_after_control_token_is_in_sentences() {
        for text in [&["The", " sky", ".", "\n"][..], &["你", "好", "。", "\n"], &["", "🦊", "\n"], &["Yes", ",", "\n"]]
        {
            let tokens = [&["<user>"][..], text].concat();
            let sentences = split(&tokens);
            assert_eq!(sentences.iter().map(|(_, text)| text.as_str()).collect::<String>(), text.concat());
        }
        for tokens in [&["<s>", "<INST>", "Yes", "</INST>"][..], &["<bos>", "Yes"]] {
            assert_eq!(split(tokens), [(0, "Yes".to_owned())], "{tokens:?}");
        }
        assert_eq!(
            split(&["<user>", "\n", "A", "\n", "B", "<end>", "C", "!"]),
            [(0, "A\n".to_owned()), (0, "B".to_owned()), (1, "C!".to_owned())]
        );
    }

    #[test]
    fn sentences_may_not_have_more_tokens_than_prompt() {
        assert_eq!(listed_sentences(&list(&[(0, 2), (1, 3)]), 4).unwrap().len(), 2);
        let error = listed_sentences(&list(&[(0, 2), (0, 3)]), 4).unwrap_err().problem().detail;
        assert!(error.starts_with("`sentences` must have at most 4 tokens in total"), "{error}");
    }

    #[test]
    fn sentences_must_be_within_prompt() {
        let valid = json!({"turn_id": 1, "sentence_id": 3, "start": 1, "end": 2});
        assert!(sentence(0, &valid, 2).is_ok());
        for (field, value) in [("end", json!(3)), ("start", json!(2)), ("start", json!(-1)), ("turn_id", json!("x"))] {
            let mut wrong = valid.clone();
            wrong[field] = value;
            let error = sentence(4, &wrong, 2).unwrap_err().problem().detail;
            assert!(error.starts_with("`sentences[4]` must be"), "{error}");
        }
    }
}
