use super::{PhraseMatch, Phrases};
use crate::model::{SpecialTokens, Vocabulary};
use crate::mods::builtin::testing::vocabulary;
use proptest::prelude::*;

fn found(phrases: &[&str], text: &str, added: usize) -> Option<PhraseMatch> {
    let vocabulary = vocabulary();
    let tokens = vocabulary.encode_plain(text);
    Phrases::new(phrases, false, false).find(&vocabulary, &tokens, added, false)
}

#[test]
fn match_counts_tokens_from_start_of_phrase() {
    // " a", " very", " bad", " idea"
    let expected = |tokens, after: &str| PhraseMatch {
        phrase: 0,
        tokens,
        tokens_from_char_boundary: tokens,
        before: " ".into(),
        after: after.into(),
        is_cut: false,
    };
    assert_eq!(found(&["bad idea"], "Hello a very bad idea", 1), Some(expected(2, "")));
    assert_eq!(found(&["very bad"], "Hello a very bad idea", 2), Some(expected(3, " idea")));
    assert_eq!(found(&["very bad"], "Hello a very bad idea", 1), None, "it ended before the new token");
}

#[test]
fn replaced_tokens_begin_with_a_character() {
    let pieces = Vec::from([&b"\xd0"[..], b"\xb4\xd0\xb0", b"x\xd0"].map(Box::<[u8]>::from));
    let special = SpecialTokens::default();
    let vocabulary = Vocabulary::new(pieces, vec![false; 3], Vec::new(), special, |_, _, _| Vec::new());
    let phrases = Phrases::new(&["а"], false, false);
    // The second token has the end of "д".
    let hit = phrases.find(&vocabulary, &[2, 1], 1, false).unwrap();
    assert_eq!((hit.tokens, hit.tokens_from_char_boundary, hit.before.as_str(), hit.is_cut), (1, 2, "xд", false));
    let phrases = Phrases::new(&["аб"], false, false);
    assert_eq!(phrases.holdback(&vocabulary, &[2, 1]), 2);
    let cut = Phrases::new(&["да"], false, false).find(&vocabulary, &[0, 1, 0], 2, false).unwrap();
    assert_eq!((cut.tokens, cut.tokens_from_char_boundary, cut.before.as_str(), cut.is_cut), (3, 3, "", true));
}

#[test]
fn earliest_phrase_wins_then_longest() {
    assert_eq!(found(&["idea", "bad idea", "bad"], " bad idea", 2).unwrap().phrase, 1);
}

#[test]
fn case_folding_handles_multibyte_characters() {
    assert_eq!(found(&["ÄRGER"], "so ärger", 1).unwrap().tokens, 6);
    let vocabulary = vocabulary();
    let tokens = vocabulary.encode_plain("ärger");
    assert!(Phrases::new(&["Ärger"], true, false).find(&vocabulary, &tokens, 1, false).is_none());
}

#[test]
fn holdback_covers_partial_phrases() {
    let vocabulary = vocabulary();
    let phrases = Phrases::new(&["very bad", "bäh"], false, false);
    let held = |text: &str| phrases.holdback(&vocabulary, &vocabulary.encode_plain(text));
    assert_eq!(held("Hello"), 0);
    assert_eq!(held("Hello very"), 1);
    assert_eq!(held("Hello very b"), 2, "' very' and ' b'");
    assert_eq!(held("Hello verx"), 0);
    let mut tokens = vocabulary.encode_plain("Hello b");
    tokens.push(0xc3);
    assert_eq!(phrases.holdback(&vocabulary, &tokens), 2, "half of an ä");
}

#[test]
fn whole_words_wait_for_next_character() {
    let vocabulary = vocabulary();
    let phrases = Phrases::new(&["bad", "c++"], false, true);
    let find = |text: &str, over| {
        let tokens = vocabulary.encode_plain(text);
        phrases.find(&vocabulary, &tokens, tokens.len(), over).map(|found| found.phrase)
    };
    assert_eq!(find("a bad", false), None, "it may become 'badly'");
    assert_eq!(find("a bad", true), Some(0));
    assert_eq!(find("a bad!", false), Some(0));
    assert_eq!(find("a badly", true), None);
    assert_eq!(find("abad ", true), None);
    assert_eq!(find("C++", false), Some(1), "it does not end with a word");
    assert_eq!(find("c++x", false), Some(1));
    let held = |text: &str| phrases.holdback(&vocabulary, &vocabulary.encode_plain(text));
    assert_eq!((held("a bad"), held("a bad "), held("a badx")), (1, 0, 0));
}

proptest! {
    #[test]
    fn search_for_many_phrases_equals_separate_searches(
        text in "[abA ]{0,24}", phrases in proptest::collection::vec("[abA ]{1,4}", 1..6), whole: bool, over: bool,
    ) {
        let vocabulary = vocabulary();
        let tokens = vocabulary.encode_plain(&text);
        let texts: Vec<&str> = phrases.iter().map(String::as_str).collect();
        let all = Phrases::new(&texts, false, whole);
        let single = |text: &&str| Phrases::new(&[text], false, whole);
        let one_by_one = texts.iter().enumerate().filter_map(|(index, text)| {
            let found = single(text).find(&vocabulary, &tokens, tokens.len(), over)?;
            let before = vocabulary.decode(&tokens[..tokens.len() - found.tokens]) + &found.before;
            Some((before.len(), std::cmp::Reverse(text.len()), index))
        });
        let found = all.find(&vocabulary, &tokens, tokens.len(), over).map(|found| found.phrase);
        prop_assert_eq!(found, one_by_one.min().map(|(.., index)| index));
        let held = texts.iter().map(|text| single(text).holdback(&vocabulary, &tokens)).max();
        prop_assert_eq!(Some(all.holdback(&vocabulary, &tokens)), held);
        let within = texts.iter().any(|phrase| text.to_lowercase().contains(&phrase.to_lowercase()));
        prop_assert_eq!(all.find_in(&text).is_some(), within);
    }

    #[test]
    fn find_equals_search_in_whole_text(text in "[ab ]{0,30}", phrase in "[ab ]{1,5}") {
        let vocabulary = vocabulary();
        let tokens = vocabulary.encode_plain(&text);
        let phrases = Phrases::new(&[&phrase], true, false);
        let hit = phrases.find(&vocabulary, &tokens, tokens.len(), false);
        prop_assert_eq!(hit.is_some(), text.contains(&phrase));
        if let Some(hit) = hit {
            let kept = vocabulary.decode(&tokens[..tokens.len() - hit.tokens]);
            prop_assert_eq!(kept + &hit.before, text.split(&phrase).next().unwrap());
            prop_assert!(hit.tokens <= tokens.len());
        }
    }

    #[test]
    fn found_phrase_was_held_back(text in "[abä ]{0,30}", phrase in "[abä ]{1,6}") {
        let vocabulary = vocabulary();
        let tokens = vocabulary.encode_plain(&text);
        let phrases = Phrases::new(&[&phrase], true, false);
        for end in 1..=tokens.len() {
            let held = phrases.holdback(&vocabulary, &tokens[..end - 1]);
            prop_assert!(held <= phrases.max_tokens());
            if let Some(hit) = phrases.find(&vocabulary, &tokens[..end], 1, false) {
                prop_assert!(hit.tokens <= held + 1);
                break;
            }
        }
    }
}
