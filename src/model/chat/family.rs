//! Families of models: how their answers say a tool call and a thought, whose role a tool's result has, and what ends
//! a turn.
//!
//! A family is told by the markers in its chat template, not by the model's name, which anybody can change. A model
//! whose template knows no tools gets them described by us, and answers as the Hermes family does.

use serde::Serialize;

/// A line of models whose answers look alike.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Family {
    /// Qwen 2 and 3, Hermes, Granite 4: JSON in `<tool_call>`.
    Hermes,
    /// Qwen 3 Coder: tagged parameters in `<tool_call><function=…>`.
    QwenCoder,
    /// Llama 3.x: bare JSON, or code behind `<|python_tag|>`.
    Llama3,
    /// Functionary and Llama 3.1's own tools: `<function=name>{…}</function>`.
    Functionary,
    /// Mistral, Ministral, Magistral, Devstral: `[TOOL_CALLS]`.
    Mistral,
    /// GLM 4: the name on a line of its own, then JSON.
    Glm4,
    /// GLM 4.5 and newer: `<arg_key>` and `<arg_value>` in `<tool_call>`.
    Glm45,
    /// `DeepSeek` V3 and R1, and what was distilled from them.
    DeepSeek,
    /// Kimi K2.
    Kimi,
    /// Command R7B, Command A: JSON in `<|START_ACTION|>`.
    CommandR,
    /// Phi 4 and Granite 3: a JSON list behind `<|tool_call|>`.
    Phi,
    /// Nemotron: a JSON list in `<TOOLCALL>`.
    Nemotron,
    /// gpt-oss: channels.
    Harmony,
    /// Gemma.
    Gemma,
    /// Anything else, `ChatML` and models without a template included.
    Plain,
}

/// How the family's answers are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    /// The family.
    pub family: Family,
    /// What opens a block of tool calls; empty when a call stands bare at the beginning of the answer.
    pub open: &'static [&'static str],
    /// What closes it.
    pub close: &'static [&'static str],
    /// How a call is written within the block.
    pub call: CallShape,
    /// What stands around a thought.
    pub thought: (&'static str, &'static str),
    /// Markers around ordinary text, which are not part of it.
    pub silent: &'static [&'static str],
    /// The role under which the family's template takes a tool's result.
    pub tool_role: &'static str,
    /// Tokens that end a turn, besides those that the vocabulary says end a generation.
    pub end_of_turn: &'static [&'static str],
}

/// How one call is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallShape {
    /// An object with the name and the arguments under these keys, or a list of such objects.
    Json {
        /// Key of the name, as the model writes it; others are understood too.
        name: &'static str,
        /// Key of the arguments.
        arguments: &'static str,
    },
    /// The name, then the arguments as an object.
    Named {
        /// Before the name.
        before: &'static str,
        /// Between name and arguments.
        between: &'static str,
        /// Further texts that may stand before the arguments.
        also: &'static [&'static str],
        /// After the arguments.
        after: &'static [&'static str],
    },
    /// The name and each parameter in tags.
    Tagged(Tags),
    /// gpt-oss: a message to the function, on its own channel.
    Channel,
}

/// Tags around a call's parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tags {
    /// Before and after the name.
    pub name: (&'static str, &'static str),
    /// Before and after a parameter's key.
    pub key: (&'static str, &'static str),
    /// Before and after its value, whitespace not counted.
    pub value: (&'static str, &'static str),
    /// After the last parameter.
    pub end: &'static str,
}

const THINK: (&str, &str) = ("<think>", "</think>");
const OBJECT: CallShape = CallShape::Json { name: "name", arguments: "arguments" };

const HERMES: Format = Format {
    family: Family::Hermes,
    open: &["<tool_call>"],
    close: &["</tool_call>"],
    call: OBJECT,
    thought: THINK,
    silent: &[],
    tool_role: "tool",
    end_of_turn: &["<|im_end|>"],
};

impl Family {
    /// The family whose markers are in the template.
    #[must_use]
    pub fn of(template: &str) -> Self {
        let has = |marker: &str| template.contains(marker);
        // The more special markers first: a template may mention another family's, too.
        let families: [(bool, Self); 16] = [
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
            (has("<tool_call>"), Self::Hermes),
            (has("<|observation|>"), Self::Glm4),
            (has("<|start_header_id|>"), Self::Llama3),
            (has("<start_of_turn>"), Self::Gemma),
            (has("<|assistant|>") && has("<|end|>"), Self::Phi),
            (has("<|START_OF_TURN_TOKEN|>"), Self::CommandR),
        ];
        families.into_iter().find_map(|(found, family)| found.then_some(family)).unwrap_or(Self::Plain)
    }

    /// How its answers are written.
    #[must_use]
    pub const fn format(self) -> Format {
        let base = Format { family: self, ..HERMES };
        match self {
            Self::Hermes | Self::Plain => base,
            Self::Gemma => Format { end_of_turn: &["<end_of_turn>"], ..base },
            Self::QwenCoder => Format {
                call: CallShape::Tagged(Tags {
                    name: ("<function=", ">"),
                    key: ("<parameter=", ">"),
                    value: ("", "</parameter>"),
                    end: "</function>",
                }),
                ..base
            },
            Self::Llama3 => Format {
                open: &["<|python_tag|>"],
                close: &[],
                call: CallShape::Json { name: "name", arguments: "parameters" },
                tool_role: "ipython",
                end_of_turn: &["<|eot_id|>", "<|eom_id|>"],
                ..base
            },
            Self::Functionary => Format {
                open: &["<function="],
                close: &[],
                call: CallShape::Named { before: "", between: ">", also: &[], after: &["</function>"] },
                tool_role: "tool",
                end_of_turn: &["<|eot_id|>", "<|eom_id|>"],
                ..base
            },
            Self::Mistral => Format {
                open: &["[TOOL_CALLS]"],
                close: &[],
                call: CallShape::Named { before: "", between: "[ARGS]", also: &["[CALL_ID]"], after: &[] },
                thought: ("[THINK]", "[/THINK]"),
                end_of_turn: &["</s>"],
                ..base
            },
            Self::Glm4 => Format {
                open: &[],
                close: &[],
                call: CallShape::Named { before: "", between: "\n", also: &[], after: &[] },
                tool_role: "observation",
                end_of_turn: &["<|user|>", "<|observation|>"],
                ..base
            },
            Self::Glm45 => Format {
                call: CallShape::Tagged(Tags {
                    name: ("", ""),
                    key: ("<arg_key>", "</arg_key>"),
                    value: ("<arg_value>", "</arg_value>"),
                    end: "",
                }),
                tool_role: "tool",
                end_of_turn: &["<|user|>", "<|observation|>"],
                ..base
            },
            Self::DeepSeek => Format {
                open: &["<｜tool▁calls▁begin｜>"],
                close: &["<｜tool▁calls▁end｜>"],
                call: CallShape::Named {
                    before: "<｜tool▁call▁begin｜>",
                    between: "<｜tool▁sep｜>",
                    also: &["function<｜tool▁sep｜>", "```json"],
                    after: &["```", "<｜tool▁call▁end｜>"],
                },
                end_of_turn: &["<｜end▁of▁sentence｜>"],
                ..base
            },
            Self::Kimi => Format {
                open: &["<|tool_calls_section_begin|>"],
                close: &["<|tool_calls_section_end|>"],
                call: CallShape::Named {
                    before: "<|tool_call_begin|>",
                    between: "<|tool_call_argument_begin|>",
                    also: &[],
                    after: &["<|tool_call_end|>"],
                },
                ..base
            },
            Self::CommandR => Format {
                open: &["<|START_ACTION|>"],
                close: &["<|END_ACTION|>"],
                call: CallShape::Json { name: "tool_name", arguments: "parameters" },
                thought: ("<|START_THINKING|>", "<|END_THINKING|>"),
                silent: &["<|START_RESPONSE|>", "<|END_RESPONSE|>", "<|START_TEXT|>", "<|END_TEXT|>"],
                end_of_turn: &["<|END_OF_TURN_TOKEN|>"],
                ..base
            },
            Self::Phi => Format {
                open: &["<|tool_call|>"],
                close: &["<|/tool_call|>"],
                end_of_turn: &["<|end|>", "<|end_of_text|>"],
                ..base
            },
            Self::Nemotron => Format { open: &["<TOOLCALL>"], close: &["</TOOLCALL>"], end_of_turn: &[], ..base },
            Self::Harmony => Format {
                open: &[],
                close: &[],
                call: CallShape::Channel,
                thought: ("<|channel|>analysis<|message|>", "<|end|>"),
                end_of_turn: &["<|return|>", "<|call|>"],
                ..base
            },
        }
    }
}

impl Format {
    /// Every text that structures an answer. Where the vocabulary has one as a control token, that token is part of
    /// the answer's text although control tokens are not.
    #[must_use]
    pub fn markers(&self) -> Vec<&'static str> {
        let mut markers = Vec::new();
        markers.extend(self.open);
        markers.extend(self.close);
        markers.extend(self.silent);
        match self.call {
            CallShape::Json { .. } => markers.extend([self.thought.0, self.thought.1]),
            CallShape::Named { before, between, also, after } => {
                markers.extend([self.thought.0, self.thought.1, before, between]);
                markers.extend(also);
                markers.extend(after);
            }
            CallShape::Tagged(tags) => {
                markers.extend([self.thought.0, self.thought.1, tags.end]);
                for (open, close) in [tags.name, tags.key, tags.value] {
                    markers.extend([open, close]);
                }
            }
            CallShape::Channel => markers.extend(super::answer::CHANNEL_MARKERS),
        }
        // `function<｜tool▁sep｜>` is a word and a token.
        markers
            .into_iter()
            .map(|marker| marker.strip_prefix("function").unwrap_or(marker))
            .filter(|m| !m.is_empty())
            .collect()
    }

    /// How the answers of the model with this template are written.
    #[must_use]
    pub fn of(template: &str) -> Self {
        let format = Family::of(template).format();
        match format.call {
            // Mistral wrote a list before it wrote names and arguments.
            CallShape::Named { .. } if format.family == Family::Mistral && !template.contains("[ARGS]") => {
                Self { call: OBJECT, ..format }
            }
            // DeepSeek's first models put the arguments in a fence.
            CallShape::Named { before, between, after, .. }
                if format.family == Family::DeepSeek && !template.contains("```json") =>
            {
                Self {
                    call: CallShape::Named { before, between, also: &["function<｜tool▁sep｜>"], after }, ..format
                }
            }
            _ => format,
        }
    }

    /// The same family as a model answers whose template knows no tools, and which was told of them by us.
    #[must_use]
    pub fn without_own_tools(self) -> Self {
        Self { family: Family::Hermes, open: HERMES.open, close: HERMES.close, call: HERMES.call, ..self }
    }
}

#[cfg(test)]
mod tests {
    use super::Family;

    #[test]
    fn a_template_tells_its_family() {
        for (template, family) in [
            ("{{ '<|im_start|>' }}{% if tools %}<tool_call>{% endif %}", Family::Hermes),
            ("<|start_header_id|>ipython<|end_header_id|>", Family::Llama3),
            ("[INST] [/INST] [TOOL_CALLS]", Family::Mistral),
            ("[gMASK]<sop><|observation|>", Family::Glm4),
            ("<tool_call>{{ name }}<arg_key>", Family::Glm45),
            ("<tool_call><function=f><parameter=a>", Family::QwenCoder),
            ("<start_of_turn>model", Family::Gemma),
            ("<|user|>hi<|end|><|assistant|>", Family::Phi),
            ("<｜User｜>hi<｜Assistant｜><think>", Family::DeepSeek),
            ("<|START_OF_TURN_TOKEN|><|START_ACTION|>", Family::CommandR),
            ("<|start|>assistant<|channel|>final<|message|>", Family::Harmony),
            ("[INST] {{ m.content }} [/INST]", Family::Plain),
            ("", Family::Plain),
        ] {
            assert_eq!(Family::of(template), family, "{template}");
        }
        assert_eq!(Family::Glm4.format().tool_role, "observation");
        assert_eq!(Family::Llama3.format().tool_role, "ipython");
    }
}
