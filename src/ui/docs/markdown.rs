//! Markdown to HTML: sections with anchors, links between pages, tables that scroll.

use pulldown_cmark::{CowStr, Event, HeadingLevel, Options, Parser, Tag, TagEnd, html};
use serde::Serialize;
use std::collections::HashMap;
use std::fmt::Write as _;

/// Page whose tables list flags, which are sections for the search.
const FLAGS: &str = "flags";

/// A part of the table of contents.
pub(super) struct Group {
    pub(super) title: String,
    pub(super) entries: Vec<ContentsEntry>,
}

/// A page in the table of contents.
pub(super) struct ContentsEntry {
    pub(super) slug: String,
    pub(super) title: String,
}

/// A rendered page.
pub(super) struct Page {
    pub(super) slug: String,
    pub(super) title: String,
    pub(super) html: String,
    pub(super) sections: Vec<Section>,
    pub(super) markdown: String,
    /// Targets of its links to the handbook, e.g. `concepts#run`.
    #[cfg_attr(not(test), expect(dead_code, reason = "used by a test"))]
    pub(super) links: Vec<String>,
}

/// A heading and the text below it, or a flag and its description.
#[derive(Serialize)]
pub(super) struct Section {
    /// Level of the heading; 0 for a flag.
    #[serde(skip)]
    pub(super) level: u8,
    pub(super) heading: String,
    pub(super) anchor: String,
    pub(super) text: String,
}

/// Reads the table of contents: headings of level 2 are groups, the links below them pages.
pub(super) fn contents(markdown: &str) -> Vec<Group> {
    let mut groups: Vec<Group> = Vec::new();
    let mut events = Parser::new(markdown);
    while let Some(event) = events.next() {
        match event {
            Event::Start(Tag::Heading { level: HeadingLevel::H2, .. }) => {
                groups.push(Group { title: text_until_end(&mut events), entries: Vec::new() });
            }
            Event::Start(Tag::Link { dest_url, .. }) => {
                if let (Some(slug), Some(group)) = (dest_url.strip_suffix(".md"), groups.last_mut()) {
                    group.entries.push(ContentsEntry { slug: slug.to_owned(), title: text_until_end(&mut events) });
                }
            }
            _ => {}
        }
    }
    groups
}

/// Reads the text of the element that has just started.
fn text_until_end<'a>(events: &mut impl Iterator<Item = Event<'a>>) -> String {
    let mut text = String::new();
    let mut depth = 1;
    for event in events {
        match event {
            Event::Start(_) => depth += 1,
            Event::End(_) => depth -= 1,
            Event::Text(part) | Event::Code(part) => text.push_str(&part),
            _ => {}
        }
        if depth == 0 {
            break;
        }
    }
    text
}

impl Page {
    /// Renders a page. HTML in the Markdown is omitted.
    pub(super) fn render(slug: &str, markdown: String) -> Self {
        let mut rendering = Rendering { has_flags: slug == FLAGS, ..Rendering::default() };
        let mut events = Vec::new();
        for event in Parser::new_ext(&markdown, Options::ENABLE_TABLES) {
            rendering.push_event(event, &mut events);
        }
        let mut html = String::new();
        html::push_html(&mut html, events.into_iter());
        let Rendering { sections, links, .. } = rendering;
        let title = sections.first().map(|section| section.heading.clone()).unwrap_or_default();
        Self { slug: slug.to_owned(), title, html, sections, markdown, links }
    }
}

#[derive(Default)]
struct Rendering {
    sections: Vec<Section>,
    links: Vec<String>,
    /// Number of uses of each anchor.
    anchors: HashMap<String, usize>,
    /// True if the first column of the tables lists flags.
    has_flags: bool,
    /// Position of the heading or flag that is open, and its text so far.
    heading: Option<(usize, String)>,
    /// True while a link is open that is omitted because its target is not served.
    dropped_link: bool,
}

impl Rendering {
    /// Adds an event to `out`, with anchors at headings and resolved links.
    fn push_event<'a>(&mut self, event: Event<'a>, out: &mut Vec<Event<'a>>) {
        match event {
            Event::Html(_) | Event::InlineHtml(_) | Event::Start(Tag::HtmlBlock) | Event::End(TagEnd::HtmlBlock) => {}
            Event::Start(Tag::Heading { .. }) => {
                self.heading = Some((out.len(), String::new()));
                out.push(event);
            }
            Event::End(TagEnd::Heading(level)) => self.end_heading(level, out),
            Event::Start(Tag::Table(_)) => {
                out.push(Event::Html(r#"<div class="scroll" tabindex="0" role="group" aria-label="Table">"#.into()));
                out.push(event);
            }
            Event::End(TagEnd::Table) => {
                out.push(event);
                out.push(Event::Html("</div>".into()));
            }
            Event::Start(Tag::Link { link_type, dest_url, title, id }) => match self.target(&dest_url) {
                Some(dest_url) => out.push(Event::Start(Tag::Link { link_type, dest_url: dest_url.into(), title, id })),
                None => self.dropped_link = true,
            },
            Event::End(TagEnd::Link) if self.dropped_link => self.dropped_link = false,
            Event::Code(_)
                if self.has_flags
                    && matches!(out[..], [.., Event::Start(Tag::TableRow), Event::Start(Tag::TableCell)]) =>
            {
                self.heading = Some((out.len(), String::new()));
                self.collect(&event);
                out.push(event);
            }
            Event::End(TagEnd::TableCell) if self.heading.is_some() => {
                self.end_flag(out);
                out.push(event);
            }
            event => {
                self.collect(&event);
                out.push(event);
            }
        }
    }

    /// Adds text to the heading that is open, or to the section.
    fn collect(&mut self, event: &Event<'_>) {
        let text = match event {
            Event::Text(text) | Event::Code(text) => text,
            Event::SoftBreak | Event::HardBreak | Event::End(_) => &CowStr::Borrowed(" "),
            _ => return,
        };
        if let Some((_, heading)) = &mut self.heading {
            heading.push_str(text);
        } else if let Some(section) = self.sections.last_mut()
            && !(section.text.ends_with(' ') && &**text == " ")
        {
            section.text.push_str(text);
        }
    }

    fn end_heading(&mut self, level: HeadingLevel, out: &mut Vec<Event<'_>>) {
        let Some((at, heading)) = self.heading.take() else { return };
        let anchor = self.anchor(&heading);
        if let Some(Event::Start(Tag::Heading { id, .. })) = out.get_mut(at) {
            *id = Some(anchor.clone().into());
        }
        if level != HeadingLevel::H1 {
            let link = format!(
                r##" <a class="anchor" href="#{anchor}"><span class="visually-hidden">Link to this section</span></a>"##
            );
            out.push(Event::Html(link.into()));
        }
        out.push(Event::End(TagEnd::Heading(level)));
        self.sections.push(Section { level: level as u8, heading, anchor, text: String::new() });
    }

    /// Ends the cell of a flag such as `-m --model PATH`, whose anchor is `--model`.
    fn end_flag(&mut self, out: &mut Vec<Event<'_>>) {
        let Some((at, heading)) = self.heading.take() else { return };
        let words = || heading.split_whitespace().filter(|word| word.starts_with('-'));
        // A value such as `-1..3` begins with '-', too.
        let name =
            words().find(|word| word.starts_with("--")).or_else(|| words().next()).unwrap_or(&heading).to_owned();
        let anchor = self.anchor(&name);
        out.insert(at, Event::Html(format!(r#"<span id="{anchor}"></span>"#).into()));
        self.sections.push(Section { level: 0, heading, anchor, text: String::new() });
    }

    /// Returns the anchor of a heading as GitHub generates it, so that links work there, too.
    fn anchor(&mut self, heading: &str) -> String {
        let kept = heading.chars().filter(|c| c.is_alphanumeric() || matches!(c, '-' | '_' | ' '));
        let mut anchor = kept.collect::<String>().to_lowercase().replace(' ', "-");
        let count = self.anchors.entry(anchor.clone()).or_default();
        if *count > 0 {
            // Writing to a String cannot fail.
            let _ = write!(anchor, "-{count}");
        }
        *count += 1;
        anchor
    }

    /// Returns the URL of a link on a page; `None` for files of the repository, which are not served.
    fn target(&mut self, link: &str) -> Option<String> {
        if link.starts_with("../") {
            return None;
        }
        if link.contains("://") || link.starts_with('/') || link.starts_with("mailto:") {
            return Some(link.to_owned());
        }
        let (file, anchor) = link.split_once('#').unwrap_or((link, ""));
        let slug = file.strip_suffix(".md").unwrap_or(file);
        let target = if anchor.is_empty() { slug.to_owned() } else { format!("{slug}#{anchor}") };
        self.links.push(target.clone());
        Some(target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headings_get_anchors_as_on_github() {
        let page = Page::render("x", "# T\n\n## `POST /v1/x`: a, b\n\ntext\n\n## Same\n\n## Same\n".into());
        let anchors: Vec<_> = page.sections.iter().map(|section| section.anchor.as_str()).collect();
        assert_eq!(anchors, ["t", "post-v1x-a-b", "same", "same-1"]);
        assert_eq!(page.title, "T");
        assert!(
            page.html.contains(r#"<h2 id="same-1">"#) && page.html.contains(r##"href="#same-1""##),
            "{}",
            page.html
        );
        assert_eq!(page.sections[1].text.trim(), "text");
    }

    #[test]
    fn flags_are_sections_with_anchors_in_their_cells() {
        let table = "| Flag | Default | Meaning |\n|---|---|---|\n| `-m` `--model PATH` |  | File |\n| `--port PORT` | `1` | Port, see `--host` |\n| `--prio -1..3` |  | Priority |\n| `-v N` |  | Level |\n";
        let page = Page::render("flags", format!("# Flags\n\n## Model\n\n{table}"));
        let sections: Vec<_> =
            page.sections.iter().map(|s| (s.heading.as_str(), s.anchor.as_str(), s.text.trim())).collect();
        let expected = [
            ("-m --model PATH", "--model", "File"),
            ("--port PORT", "--port", "1 Port, see --host"),
            ("--prio -1..3", "--prio", "Priority"),
            ("-v N", "-v", "Level"),
        ];
        assert_eq!(sections[2..], expected);
        assert!(page.html.contains(r#"<td><span id="--port"></span><code>--port PORT</code></td>"#), "{}", page.html);
        assert_eq!(Page::render("other", format!("# Other\n\n{table}")).sections.len(), 1);
    }

    #[test]
    fn links_to_files_are_text_and_links_to_pages_lose_their_ending() {
        let page = Page::render("x", "[a](b.md#c) [s](../../src/x.rs) [w](https://x.y)".into());
        assert_eq!(page.html, "<p><a href=\"b#c\">a</a> s <a href=\"https://x.y\">w</a></p>\n");
        assert_eq!(page.links, ["b#c"]);
    }

    #[test]
    fn html_of_markdown_is_left_out() {
        let page = Page::render("x", "<!-- note -->\n\na <b onclick=\"x\">c</b> <script>d</script>\n".into());
        assert_eq!(page.html, "<p>a c d</p>\n");
    }

    #[test]
    fn contents_are_groups_of_links() {
        let groups = contents("# H\n\n## One\n\n- [A](a.md): text\n- [B `c`](b.md)\n\n## Two\n\n- [D](d.md)\n");
        let all: Vec<_> = groups
            .iter()
            .map(|group| {
                (group.title.as_str(), group.entries.iter().map(|e| (e.slug.as_str(), e.title.as_str())).collect())
            })
            .collect::<Vec<(&str, Vec<(&str, &str)>)>>();
        assert_eq!(all, [("One", vec![("a", "A"), ("b", "B c")]), ("Two", vec![("d", "D")])]);
    }
}
