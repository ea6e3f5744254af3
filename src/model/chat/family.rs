//! Families of models: their syntax of tool calls and reasoning, the role of tool results, and the end of a turn.
//!
//! The markers in a model's chat template determine its family. The model's name does not, because it can be changed
//! freely. If the template supports no tools, Thunder describes them in a message, and the model answers like the
//! Hermes family.

use super::answer::channel::FINAL_HEADER;
use super::pattern::{Pattern, Placeholder};
use super::syntax::{AnswerSyntax, CallForm, CallShape, Keys, ReasoningMarkers, Tags};
use serde::Serialize;

/// Texts that end reasoning in the answers of any family.
pub const REASONING_END_MARKERS: [&str; 6] =
    ["</think>", "</thinking>", "</thought>", "[/THINK]", "<|END_THINKING|>", FINAL_HEADER];

/// A family of models with the same answer syntax.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ModelFamily {
    /// Qwen 2 and 3, Hermes, Granite 4: JSON in `<tool_call>`.
    Hermes,
    /// Qwen 3 Coder: tagged parameters in `<tool_call><function=…>`.
    QwenCoder,
    /// Llama 3.x: bare JSON, or code after `<|python_tag|>`.
    Llama3,
    /// Functionary and Llama 3.1's own tools: `<function=name>{…}</function>`.
    Functionary,
    /// Mistral, Ministral, Magistral, Devstral: `[TOOL_CALLS]`.
    Mistral,
    /// GLM 4: the name on a separate line, then JSON.
    Glm4,
    /// GLM 4.5 and newer: `<arg_key>` and `<arg_value>` in `<tool_call>`.
    Glm45,
    /// `DeepSeek` V3 and R1, and models distilled from them.
    DeepSeek,
    /// Kimi K2.
    Kimi,
    /// Command R7B, Command A: JSON in `<|START_ACTION|>`.
    CommandR,
    /// Phi 4 and Granite 3: a JSON list after `<|tool_call|>`.
    Phi,
    /// Nemotron: a JSON list in `<TOOLCALL>`.
    Nemotron,
    /// gpt-oss: channels.
    Harmony,
    /// LFM 2: Python calls in `<|tool_call_start|>`.
    Lfm2,
    /// Gemma.
    Gemma,
    /// All others, including `ChatML` and models without a template.
    Plain,
}

impl ModelFamily {
    /// Returns the family whose markers are in the template.
    #[must_use]
    pub fn from_template(template: &str) -> Self {
        let has = |marker: &str| template.contains(marker);
        // More specific markers come first: a template may also mention another family's.
        let families: [(bool, Self); 17] = [
            (has("<|channel|>"), Self::Harmony),
            (has("<|START_ACTION|>"), Self::CommandR),
            (has("<｜tool▁calls▁begin｜>") || has("<｜Assistant｜>"), Self::DeepSeek),
            (has("<|tool_calls_section_begin|>"), Self::Kimi),
            (has("[TOOL_CALLS]"), Self::Mistral),
            (has("<arg_key>"), Self::Glm45),
            (has("<function=") && has("<parameter="), Self::QwenCoder),
            (has("<function="), Self::Functionary),
            (has("<TOOLCALL>"), Self::Nemotron),
            (has("<|tool_call|>"), Self::Phi),
            (has("List of tools: [") || has("List of tools: <|tool_list_start|>["), Self::Lfm2),
            (has("<tool_call>"), Self::Hermes),
            (has("<|observation|>"), Self::Glm4),
            (has("<|start_header_id|>"), Self::Llama3),
            (has("<start_of_turn>"), Self::Gemma),
            (has("<|assistant|>") && has("<|end|>"), Self::Phi),
            (has("<|START_OF_TURN_TOKEN|>"), Self::CommandR),
        ];
        families.into_iter().find_map(|(found, family)| found.then_some(family)).unwrap_or(Self::Plain)
    }

    /// Returns the answer syntax that is known without a template.
    #[must_use]
    pub fn syntax(self) -> AnswerSyntax {
        let (open, close) = match self {
            Self::Mistral => ("[THINK]", "[/THINK]"),
            Self::CommandR => ("<|START_THINKING|>", "<|END_THINKING|>"),
            Self::Harmony => ("<|channel|>analysis<|message|>", "<|end|>"),
            _ => ("<think>", "</think>"),
        };
        let ignored_markers: &[&str] = match self {
            Self::CommandR => &["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"],
            _ => &[],
        };
        AnswerSyntax {
            family: self,
            calls: self.calls(),
            reasoning_markers: ReasoningMarkers::new(open, close),
            ignored_markers: ignored_markers.iter().map(|&marker| marker.to_owned()).collect(),
            text_marker: None,
            tool_role: match self {
                Self::Llama3 => "ipython",
                Self::Glm4 => "observation",
                _ => "tool",
            },
            end_of_turn: match self {
                Self::Gemma => &["<end_of_turn>"],
                Self::Llama3 | Self::Functionary => &["<|eot_id|>", "<|eom_id|>"],
                Self::Mistral => &["</s>"],
                Self::Glm4 | Self::Glm45 => &["<|user|>", "<|observation|>"],
                Self::DeepSeek => &["<｜end▁of▁sentence｜>"],
                Self::CommandR => &["<|END_OF_TURN_TOKEN|>"],
                Self::Phi => &["<|end|>", "<|end_of_text|>"],
                Self::Nemotron => &[],
                Self::Harmony => &["<|return|>", "<|call|>"],
                _ => &["<|im_end|>"],
            },
        }
    }

    /// Returns the forms of calls that are known without a template.
    fn calls(self) -> Vec<CallForm> {
        let object = || CallShape::object("name", "arguments");
        match self {
            Self::Hermes | Self::Plain | Self::Gemma => {
                vec![CallForm::new("<tool_call>\n", object(), "\n</tool_call>", "\n")]
            }
            Self::QwenCoder => {
                let tags = Tags {
                    after_name: ">".into(),
                    before_key: "\n<parameter=".into(),
                    middle: ">\n".into(),
                    after_value: "</parameter>".into(),
                    type_names: Vec::new(),
                    lines: true,
                };
                let before = "<tool_call>\n<function=";
                vec![CallForm::new(before, CallShape::Tagged(tags), "\n</function>\n</tool_call>", "\n")]
            }
            Self::Llama3 => vec![
                CallForm::new("", CallShape::object("name", "parameters"), "", "; "),
                CallForm::new("<|python_tag|>", CallShape::Code, "", "; "),
            ],
            Self::Functionary => vec![CallForm::new("<function=", CallShape::named(">"), "</function>", "")],
            Self::Mistral => vec![
                CallForm::new("[TOOL_CALLS]", CallShape::named("[ARGS]"), "", ""),
                CallForm::new(
                    "[TOOL_CALLS]",
                    CallShape::named(&format!("[CALL_ID]{}[ARGS]", Placeholder::Id.mark())),
                    "",
                    "",
                ),
                CallForm::new("", object(), "", ", ").in_list("[TOOL_CALLS]", ""),
            ],
            Self::Glm4 => vec![CallForm::new("", CallShape::named("\n"), "", "\n")],
            Self::Glm45 => {
                let tags = Tags {
                    after_name: Pattern::default(),
                    before_key: "\n<arg_key>".into(),
                    middle: "</arg_key>\n<arg_value>".into(),
                    after_value: "</arg_value>".into(),
                    type_names: Vec::new(),
                    lines: false,
                };
                vec![CallForm::new("<tool_call>", CallShape::Tagged(tags), "\n</tool_call>", "\n")]
            }
            Self::DeepSeek => {
                let call = |before: &str, middle: &str, after: &str, separator: &str| {
                    CallForm::new(before, CallShape::named(middle), after, separator)
                        .in_block("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>")
                };
                let fenced = "<｜tool▁call▁begin｜>function<｜tool▁sep｜>";
                vec![
                    call(fenced, "\n```json\n", "\n```<｜tool▁call▁end｜>", "\n"),
                    call("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>", ""),
                ]
            }
            Self::Kimi => {
                let middle = format!(":{}<|tool_call_argument_begin|>", Placeholder::Index.mark());
                let before = "<|tool_call_begin|>functions.";
                vec![
                    CallForm::new(before, CallShape::named(&middle), "<|tool_call_end|>", "")
                        .in_block("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
                ]
            }
            Self::CommandR => {
                let (index, name) = (Placeholder::Index.mark(), Placeholder::Name.mark());
                let head = format!("{{\"tool_call_id\": \"{index}\", \"tool_name\": \"{name}\", \"parameters\": ");
                let shape = CallShape::Json(Keys {
                    name: Some("tool_name".into()),
                    arguments: "parameters".into(),
                    head: Pattern::new(&head),
                    tail: "}".into(),
                });
                vec![CallForm::new("\n    ", shape, "", ",").in_list("<|START_ACTION|>", "<|END_ACTION|>")]
            }
            Self::Phi => vec![CallForm::new("", object(), "", ", ").in_list("<|tool_call|>", "<|/tool_call|>")],
            Self::Nemotron => vec![CallForm::new("", object(), "", ", ").in_list("<TOOLCALL>", "</TOOLCALL>")],
            Self::Lfm2 => {
                let form = CallForm::new("", CallShape::Python, "", ", ");
                vec![form.in_list("<|tool_call_start|>", "<|tool_call_end|>")]
            }
            Self::Harmony => vec![CallForm::new("", CallShape::Channel, "", "")],
        }
    }
}

impl AnswerSyntax {
    /// Returns the answer syntax for the markers in a template.
    #[must_use]
    pub fn from_markers(template: &str) -> Self {
        let mut syntax = ModelFamily::from_template(template).syntax();
        if syntax.family == ModelFamily::Mistral && !template.contains("[ARGS]") {
            // Older Mistral templates use a list instead of name and arguments.
            syntax.calls.reverse();
        }
        if syntax.family == ModelFamily::DeepSeek && !template.contains("```json") {
            // Only the first DeepSeek models write the arguments in a code fence.
            syntax.calls.reverse();
        }
        if template.contains("<response>") && template.contains("</response>") {
            syntax.ignored_markers.extend(["<response>".to_owned(), "</response>".to_owned()]);
        }
        if template.contains("[BEGIN FINAL RESPONSE]") {
            syntax.reasoning_markers = ReasoningMarkers::new("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]");
        }
        syntax
    }

    /// Adapts the syntax for a template without tools: the model follows the description of the tools in a message, or
    /// its training.
    #[must_use]
    pub fn without_own_tools(mut self) -> Self {
        let mut calls = ModelFamily::Hermes.calls();
        self.calls.retain(|form| !form.is_bare() && form.shape != CallShape::Channel && *form != calls[0]);
        calls.append(&mut self.calls);
        self.calls = calls;
        self
    }
}

#[cfg(test)]
mod tests {
    use super::ModelFamily;

    #[test]
    fn markers_in_the_template_determine_the_family() {
        for (template, family) in [
            ("{{ '<|im_start|>' }}{% if tools %}<tool_call>{% endif %}", ModelFamily::Hermes),
            ("<|start_header_id|>ipython<|end_header_id|>", ModelFamily::Llama3),
            ("[INST] [/INST] [TOOL_CALLS]", ModelFamily::Mistral),
            ("[gMASK]<sop><|observation|>", ModelFamily::Glm4),
            ("<tool_call>{{ name }}<arg_key>", ModelFamily::Glm45),
            ("<tool_call><function=f><parameter=a>", ModelFamily::QwenCoder),
            ("<start_of_turn>model", ModelFamily::Gemma),
            ("<|user|>hi<|end|><|assistant|>", ModelFamily::Phi),
            ("<｜User｜>hi<｜Assistant｜><think>", ModelFamily::DeepSeek),
            ("<|START_OF_TURN_TOKEN|><|START_ACTION|>", ModelFamily::CommandR),
            ("<|start|>assistant<|channel|>final<|message|>", ModelFamily::Harmony),
            ("[INST] {{ m.content }} [/INST]", ModelFamily::Plain),
            ("", ModelFamily::Plain),
        ] {
            assert_eq!(ModelFamily::from_template(template), family, "{template}");
        }
        assert_eq!(ModelFamily::Glm4.syntax().tool_role, "observation");
        assert_eq!(ModelFamily::Llama3.syntax().tool_role, "ipython");
    }
}
