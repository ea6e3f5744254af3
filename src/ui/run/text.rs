//! A run as plain text and a table of events, for browsers without JavaScript.

use super::feedback::{self, FeedbackView};
use super::notes::{self, NoteView};
use super::reported::{self, ReportedView};
use super::view::{Banner, RunSummaryView, banners};
use crate::events::{ActionRecord, ActionType, Event, EventType, RunId, Scope, TokenId, TraceItem};
use crate::server::{ApiError, App};
use crate::store::RunSummary;
use crate::trace::columns;
use crate::trace::fold::{NEVER, flags};
use crate::ui::error;
use crate::ui::shell::{Shell, render};
use askama::Template;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use serde::Deserialize;

/// Events per page.
const EVENTS_PER_PAGE: i32 = 300;

/// Maximum log lines per event.
const MAX_LINES: usize = 40;

/// Maximum candidates per forward pass.
const MAX_CANDIDATES: usize = 3;

#[derive(Template)]
#[template(path = "replay_text.html")]
struct TextPage {
    shell: Shell,
    run: RunSummaryView,
    banners: Vec<Banner>,
    reported: ReportedView,
    notes: Vec<NoteView>,
    feedback: Vec<FeedbackView>,
    prompt: String,
    answer: String,
    from: i32,
    to: i32,
    events: Vec<EventView>,
    earlier_href: String,
    later_href: String,
}

struct EventView {
    seq: i32,
    href: String,
    step: i32,
    kind: &'static str,
    description: String,
    mods: Vec<Line>,
    /// Number of omitted log lines.
    more: usize,
    logs: usize,
}

struct Line {
    tone: &'static str,
    text: String,
}

/// Renders events starting at `from`.
pub(super) async fn page(app: &App, scope: &Scope, run: &RunSummary, from: i32, headers: &HeaderMap) -> Response {
    match read(app, scope, run, from.clamp(0, run.events.max(0)), headers).await {
        Ok(page) => render(StatusCode::OK, &page),
        Err(error) => error::render(headers, &error),
    }
}

async fn read(
    app: &App,
    scope: &Scope,
    run: &RunSummary,
    from: i32,
    headers: &HeaderMap,
) -> Result<TextPage, ApiError> {
    let store = app.store()?;
    let to = from.saturating_add(EVENTS_PER_PAGE).min(run.events);
    // The description of an `Added` event may need the `Sampled` event before it.
    let items = store.items(scope, run.run_id, (from - 1).max(0)..to).await?;
    let mut events = table(run.run_id, &items);
    events.retain(|event| event.seq >= from);
    let columns = store.columns(scope, run.run_id).await?;
    let (prompt, answer) = match columns.as_deref().map(columns::decode).transpose() {
        Ok(columns) => columns.map(|columns| texts(&columns)).unwrap_or_default(),
        Err(error) => return Err(ApiError::internal(error)),
    };
    let link = |from: i32| format!("/runs/{}?view=text&from={from}", run.run_id);
    Ok(TextPage {
        shell: Shell::new(headers, "runs"),
        banners: banners(run),
        reported: reported::find(app, scope, run).await,
        notes: notes::list(app, scope, run).await,
        feedback: feedback::list(app, scope, run).await,
        prompt: if prompt.is_empty() { run.prompt_preview.clone() } else { prompt },
        answer: if answer.is_empty() { run.output_preview.clone() } else { answer },
        from,
        to: (to - 1).max(from),
        events,
        earlier_href: if from > 0 { link((from - EVENTS_PER_PAGE).max(0)) } else { String::new() },
        later_href: if to < run.events { link(to) } else { String::new() },
        run: RunSummaryView::new(run, ""),
    })
}

/// Returns prompt and answer at the end of the run.
fn texts(columns: &columns::Columns) -> (String, String) {
    let mut prompt = String::new();
    let mut answer = String::new();
    for row in columns.rows.iter().filter(|row| row.removed_at == NEVER) {
        if row.flags & flags::PROMPT != 0 { prompt.push_str(&row.text) } else { answer.push_str(&row.text) }
    }
    (prompt, answer)
}

fn table(run: RunId, items: &[TraceItem]) -> Vec<EventView> {
    let mut rows: Vec<EventView> = Vec::new();
    let mut caller = "";
    let mut sampled: Option<&Event> = None;
    for item in items {
        if let TraceItem::Event(event) = item {
            rows.push(EventView {
                seq: event.sequence_order,
                href: format!("/runs/{run}?at={}", event.sequence_order),
                step: event.step,
                kind: event.event_type.as_str(),
                description: description(event, sampled.filter(|sampled| sampled.step == event.step)),
                mods: Vec::new(),
                more: 0,
                logs: 0,
            });
            match event.event_type {
                EventType::Sampled => sampled = Some(event),
                EventType::Prefilled | EventType::ForwardPass => sampled = None,
                EventType::Added => {}
            }
            continue;
        }
        let Some(row) = rows.last_mut() else { continue };
        match item {
            TraceItem::ModCall(call) => {
                caller = &call.mod_name;
                if call.exception_occurred {
                    let message = call.exception_message.as_deref().unwrap_or("raised an exception");
                    row.mods.push(Line { tone: "err", text: format!("{caller}: {message}") });
                }
            }
            TraceItem::ModLog(_) if row.logs == MAX_LINES => row.more += 1,
            TraceItem::ModLog(log) => {
                row.logs += 1;
                row.mods.push(Line { tone: "hint", text: format!("{}: {}", log.mod_name, log.log_message) });
            }
            TraceItem::Action(action) if action.action_type != ActionType::Noop => {
                row.mods.push(Line { tone: "", text: format!("{caller}: {}", action_text(action)) });
            }
            _ => {}
        }
    }
    rows
}

/// A candidate in the `top_tokens` of an ingested run.
#[derive(Deserialize)]
struct Candidate {
    token: Option<TokenId>,
    #[serde(alias = "token_str")]
    text: Option<String>,
    prob: Option<f64>,
    logprob: Option<f64>,
}

/// Returns the description of an event. `sampled` is the `Sampled` event of its step, if there is one before it.
fn description(event: &Event, sampled: Option<&Event>) -> String {
    match event.event_type {
        EventType::Prefilled => match event.prompt_length {
            Some(length) => format!("prompt of {}", token_count(length.max(0) as usize)),
            None => String::new(),
        },
        EventType::ForwardPass => candidates(event)
            .or_else(|| event.input_text.as_ref().map(|text| format!("after {text:?}")))
            .unwrap_or_default(),
        EventType::Sampled => match (&event.token_text, event.sampled_token) {
            (Some(text), _) => format!("{text:?}"),
            (None, Some(token)) => format!("token {token}"),
            (None, None) => String::new(),
        },
        EventType::Added => added(event, sampled),
    }
}

/// Returns the most probable candidates of a `ForwardPass`; `None` if there are none in a known form.
fn candidates(event: &Event) -> Option<String> {
    let measured = event.measured.as_deref().map(|measured| &measured.model).filter(|model| !model.is_empty());
    let mut found: Vec<(String, f64)> = match (measured, &event.top_tokens) {
        (Some(model), _) => model.iter().map(|candidate| (candidate.text.clone(), candidate.prob.into())).collect(),
        (None, Some(top)) => serde_json::from_str::<Vec<Candidate>>(top.get())
            .ok()?
            .into_iter()
            .filter_map(|Candidate { token, text, prob, logprob }| {
                let text = text.or_else(|| token.map(|token| format!("⟨{token}⟩")))?;
                Some((text, prob.or_else(|| logprob.map(f64::exp))?))
            })
            .collect(),
        (None, None) => return None,
    };
    found.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    let shown = found.iter().take(MAX_CANDIDATES).map(|(text, prob)| format!("{text:?} {:.1}%", prob * 100.0));
    Some(shown.collect::<Vec<_>>().join("  ")).filter(|text| !text.is_empty())
}

/// Returns the description of an `Added` event: its text if that is known, else the number of tokens.
fn added(event: &Event, sampled: Option<&Event>) -> String {
    let measured = event.measured.as_deref();
    let discarded = measured.map_or(0, |measured| measured.discarded);
    if discarded == 1 {
        return "the last token is not part of the answer".into();
    } else if discarded > 0 {
        return format!("the last {discarded} tokens are not part of the answer");
    }
    let mut text: String = measured.map(|m| m.tokens.iter().map(|t| t.text.as_str()).collect()).unwrap_or_default();
    let listed = event.added_tokens.as_deref();
    let count = listed.map(<[_]>::len).or_else(|| event.added_token_count.map(|count| count.max(0) as usize));
    // Traces of other engines have the text only in the `Sampled` event.
    if let Some(sampled) = sampled.filter(|_| text.is_empty() && count == Some(1))
        && listed.is_none_or(|tokens| sampled.sampled_token.is_none_or(|token| tokens == [token]))
    {
        text = sampled.token_text.clone().unwrap_or_default();
    }
    let forced = if event.forced == Some(true) { "forced " } else { "" };
    if text.is_empty() { format!("{forced}{}", token_count(count.unwrap_or(0))) } else { format!("{forced}{text:?}") }
}

fn token_count(count: usize) -> String {
    if count == 1 { "1 token".to_owned() } else { format!("{count} tokens") }
}

fn action_text(action: &ActionRecord) -> String {
    let name = action.action_type.as_str();
    match action.action_type {
        ActionType::Backtrack => format!("{name} {}", action.backtrack_steps.unwrap_or(0)),
        ActionType::ForceTokens | ActionType::ForceOutput => {
            format!("{name} {}", action.tokens_preview.as_deref().map(|text| format!("{text:?}")).unwrap_or_default())
        }
        ActionType::EmitError => format!("{name}: {}", action.error_message.as_deref().unwrap_or_default()),
        _ => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{Measurements, ModCall};
    use crate::ui::run::sample;

    #[test]
    fn events_of_another_engine_are_described() {
        let event = |kind: EventType, step: i32| Event::new(kind, step, 0, None);
        let mut read = event(EventType::ForwardPass, 1);
        read.input_text = Some("Once".into());
        for (top, text) in [
            (r#"[{"token": 7, "prob": 0.25}, {"token": 8, "text": " a", "prob": 0.5}]"#, "\" a\" 50.0%  \"⟨7⟩\" 25.0%"),
            (r#"[{"token": 7, "token_str": "b", "logprob": 0.0}]"#, "\"b\" 100.0%"),
            ("[]", "after \"Once\""),
            ("[[7, 0.5]]", "after \"Once\""),
            (r#"{"7": 0.5}"#, "after \"Once\""),
        ] {
            read.top_tokens = Some(serde_json::from_str(top).unwrap());
            assert_eq!(description(&read, None), text, "{top}");
        }
        let mut sampled = event(EventType::Sampled, 1);
        (sampled.sampled_token, sampled.token_text) = (Some(5), Some(" there".into()));
        let mut added = event(EventType::Added, 1);
        (added.added_tokens, added.added_token_count) = (Some(vec![5]), Some(1));
        let rows = table(RunId::now(), &[sampled, added.clone()].map(TraceItem::Event));
        assert_eq!(rows[1].description, "\" there\"");
        assert_eq!(description(&added, None), "1 token");
        (added.added_tokens, added.added_token_count, added.forced) = (None, Some(3), Some(true));
        assert_eq!(description(&added, None), "forced 3 tokens");
        let mut prefilled = event(EventType::Prefilled, 0);
        prefilled.prompt_length = Some(1);
        assert_eq!(description(&prefilled, None), "prompt of 1 token");
    }

    #[test]
    fn events_are_described() {
        let mut sampled = Event::new(EventType::Sampled, 1, 0, None);
        sampled.token_text = Some(" <b>\u{202e}".into());
        let call = ModCall {
            event_sequence_order: 0,
            mod_name: "ban".into(),
            event_type: EventType::Sampled,
            step: 1,
            created_at: None,
            execution_time_ms: None,
            exception_occurred: false,
            exception_message: None,
            exception_traceback: None,
        };
        let mut back = ActionRecord::new(0, ActionType::Backtrack, None);
        back.backtrack_steps = Some(3);
        let mut read = Event::new(EventType::ForwardPass, 2, 1, None);
        read.input_text = Some("Once upon".into());
        assert_eq!(description(&read, None), "after \"Once upon\"");
        for (discarded, text) in [(1, "the last token is"), (2, "the last 2 tokens are")] {
            let mut event = Event::new(EventType::Added, 2, 2, None);
            event.measured = Some(Box::new(Measurements { discarded, ..Measurements::default() }));
            assert_eq!(description(&event, None), format!("{text} not part of the answer"));
        }
        let run = sample();
        let events = table(run.run_id, &[TraceItem::Event(sampled), TraceItem::ModCall(call), TraceItem::Action(back)]);
        assert_eq!(events[0].description, "\" <b>\\u{202e}\"");
        assert_eq!(events[0].mods[0].text, "ban: Backtrack 3");
        let page = TextPage {
            shell: Shell::new(&HeaderMap::new(), "runs"),
            banners: banners(&run),
            reported: ReportedView::default(),
            notes: Vec::new(),
            feedback: Vec::new(),
            prompt: "a".into(),
            answer: "<i>".into(),
            from: 0,
            to: 0,
            events,
            earlier_href: String::new(),
            later_href: String::new(),
            run: RunSummaryView::new(&run, ""),
        };
        let html = page.render().unwrap();
        crate::ui::checks::page(&html);
        assert!(!html.contains("<i>"));
    }
}
