//! Tools of `thunder chat`, from a file.

use anyhow::{Context, bail};
use serde_json::{Value, json};
use std::path::Path;

/// Reads tools from a file: a list of definitions in OpenAI's format, or of their functions only.
pub fn read_tools(path: &Path) -> anyhow::Result<Vec<Value>> {
    let path_text = path.display();
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {path_text}"))?;
    let list: Value = serde_json::from_str(&text).with_context(|| format!("{path_text} is not JSON"))?;
    let list = list.as_array().with_context(|| format!("{path_text} must contain a list of tools"))?;
    list.iter()
        .enumerate()
        .map(|(index, tool)| {
            let tool = if tool.get("function").is_some() {
                tool.clone()
            } else {
                json!({ "type": "function", "function": tool })
            };
            if tool["function"]["name"].as_str().is_none_or(str::is_empty) {
                bail!("{path_text}: tool {index} has no name; a tool is {{\"name\", \"description\", \"parameters\"}}");
            }
            Ok(tool)
        })
        .collect()
}
