//! A run as plain text and a table of events, for browsers without JavaScript.

use super::feedback::{self, FeedbackView};
use super::notes::{self, NoteView};
use super::reported::{self, ReportedView};
use super::view::{Banner, RunSummaryView, banners};
use crate::events::{ActionRecord, ActionType, Event, EventType, RunId, Scope, TraceItem};
use crate::server::{ApiError, App};
use crate::store::RunSummary;
use crate::trace::columns;
use crate::trace::fold::{NEVER, flags};
use crate::ui::error;
use crate::ui::shell::{Shell, render};
use askama::Template;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;

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
    let items = store.items(scope, run.run_id, from..to).await?;
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
        events: table(run.run_id, &items),
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
    for item in items {
        if let TraceItem::Event(event) = item {
            rows.push(EventView {
                seq: event.sequence_order,
                href: format!("/runs/{run}?at={}", event.sequence_order),
                step: event.step,
                kind: event.event_type.as_str(),
                description: description(event),
                mods: Vec::new(),
                more: 0,
                logs: 0,
            });
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

fn description(event: &Event) -> String {
    let measured = event.measured.as_deref();
    match event.event_type {
        EventType::Prefilled => match event.prompt_length {
            Some(length) => format!("prompt of {length} tokens"),
            None => String::new(),
        },
        EventType::ForwardPass => measured
            .map(|measured| {
                let candidate = |c: &crate::events::Alternative| format!("{:?} {:.1}%", c.text, c.prob * 100.0);
                measured.model.iter().take(MAX_CANDIDATES).map(candidate).collect::<Vec<_>>().join("  ")
            })
            .filter(|candidates| !candidates.is_empty())
            .or_else(|| event.input_text.as_ref().map(|text| format!("after {text:?}")))
            .unwrap_or_default(),
        EventType::Sampled => match (&event.token_text, event.sampled_token) {
            (Some(text), _) => format!("{text:?}"),
            (None, Some(token)) => format!("token {token}"),
            (None, None) => String::new(),
        },
        EventType::Added => {
            let text: String = measured.map(|m| m.tokens.iter().map(|t| t.text.as_str()).collect()).unwrap_or_default();
            let forced = if event.forced == Some(true) { "forced " } else { "" };
            let discarded = measured.map_or(0, |measured| measured.discarded);
            if discarded == 1 {
                "the last token is not part of the answer".into()
            } else if discarded > 0 {
                format!("the last {discarded} tokens are not part of the answer")
            } else if text.is_empty() {
                format!("{forced}{} tokens", event.added_tokens.as_ref().map_or(0, Vec::len))
            } else {
                format!("{forced}{text:?}")
            }
        }
    }
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
        assert_eq!(description(&read), "after \"Once upon\"");
        for (discarded, text) in [(1, "the last token is"), (2, "the last 2 tokens are")] {
            let mut event = Event::new(EventType::Added, 2, 2, None);
            event.measured = Some(Box::new(Measurements { discarded, ..Measurements::default() }));
            assert_eq!(description(&event), format!("{text} not part of the answer"));
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
