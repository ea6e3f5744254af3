//! Modules of the dashboard as one script, for exported pages without a server.

use super::assets;
use std::fmt::Write as _;

/// Returns a module and everything that it imports as one script. Each module is a function; imports become constants.
/// Supports only the forms of imports and exports that the dashboard's modules use; a test checks these.
pub(super) fn script(entry: &str) -> String {
    let mut script = String::from("'use strict';\nconst modules = {};\n");
    for name in dependency_order(entry) {
        let text = assets::without_comments(&assets::text(&name));
        let Module { imports, body, exports } = parse(&name, &text);
        // Writing to a String cannot fail.
        let _ = writeln!(script, "(() => {{");
        for (names, from) in imports {
            let _ = writeln!(script, "const {{ {} }} = modules['{from}'];", names.replace(" as ", ": "));
        }
        let _ = writeln!(script, "{body}modules['{name}'] = {{ {} }};\n}})();", exports.join(", "));
    }
    script
}

/// Returns the module and all that it imports, each after its imports.
fn dependency_order(entry: &str) -> Vec<String> {
    fn visit(name: &str, order: &mut Vec<String>) {
        for import in assets::imports(name) {
            if !order.contains(&import) {
                visit(&import, order);
            }
        }
        order.push(name.to_owned());
    }
    let mut order = Vec::new();
    visit(entry, &mut order);
    order
}

struct Module {
    /// Imported names, and the path of the module.
    imports: Vec<(String, String)>,
    /// The text without imports, and without `export`.
    body: String,
    exports: Vec<String>,
}

fn parse(name: &str, text: &str) -> Module {
    let (mut imports, mut body, mut exports) = (Vec::new(), String::new(), Vec::new());
    let mut lines = text.lines();
    while let Some(line) = lines.next() {
        if line.starts_with("import ") {
            let mut whole = line.to_owned();
            while !whole.ends_with("';") {
                let Some(next) = lines.next() else { break };
                whole.push(' ');
                whole.push_str(next.trim());
            }
            let names = whole.split_once('{').and_then(|(_, rest)| rest.split_once('}')).map(|(names, _)| names.trim());
            let target = whole.split('\'').nth(1).unwrap_or_default();
            if let Some(names) = names {
                imports.push((names.trim_end_matches(',').to_owned(), assets::resolve(name, target)));
            }
            continue;
        }
        let own = line.strip_prefix("export ").unwrap_or(line);
        if own.len() < line.len() {
            let words = own.split(|c: char| !c.is_ascii_alphanumeric() && c != '_' && c != '$');
            let name = words.filter(|word| !word.is_empty()).find(|word| !KEYWORDS.contains(word));
            exports.extend(name.map(str::to_owned));
        }
        body.push_str(own);
        body.push('\n');
    }
    Module { imports, body, exports }
}

const KEYWORDS: [&str; 4] = ["async", "class", "const", "function"];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_become_functions_in_the_order_of_their_imports() {
        let script = script("replay/exported-page.js");
        let at = |text: &str| script.find(text).unwrap_or_else(|| panic!("{text} is missing"));
        assert!(at("modules['dom.js'] = {") < at("modules['replay/run.js'] = { Run"));
        assert!(at("modules['replay/run.js'] = {") < at("modules['replay/replay.js'] = { Replay }"));
        assert!(script.contains("const { h } = modules['dom.js'];"));
        assert!(!script.lines().any(|line| line.starts_with("import ") || line.starts_with("export ")), "{script}");
    }

    #[test]
    fn modules_use_only_known_forms_and_cannot_end_the_script() {
        for name in dependency_order("replay/exported-page.js") {
            let text = assets::text(&name);
            assert!(!text.to_lowercase().contains("</script") && !text.contains("<!--"), "{name}");
            let exported = text.lines().filter_map(|line| line.strip_prefix("export "));
            for line in exported {
                assert!(KEYWORDS.iter().any(|keyword| line.starts_with(&format!("{keyword} "))), "{name}: {line}");
            }
            let imported = text.lines().filter(|line| line.starts_with("import "));
            for line in imported {
                assert!(line.starts_with("import {"), "{name}: {line}");
            }
        }
    }
}
