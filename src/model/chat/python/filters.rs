//! minijinja's filters and text methods that create texts and lists, with a limit of memory.

use super::budget::{VALUE_BYTES, spend, spend_text};
use super::{MAX_INDENT, indent, json};
use minijinja::value::{Rest, Value, ValueOrKwargs};
use minijinja::{Environment, Error, State, filters};
use std::borrow::Cow;

/// The size of a filter's result.
#[derive(Debug, Clone, Copy)]
enum ResultSize {
    /// The text of the arguments.
    Text,
    /// The text of the arguments as JSON, which may be indented.
    Json,
    /// The text with an indentation of each line.
    Indented,
    /// The text with replacements.
    Replaced,
    /// The texts of a list with separators.
    Joined,
    /// A format such as `%10d` with the texts of its arguments.
    PercentFormatted,
    /// A format such as `{:>10}` with the texts of its arguments.
    BraceFormatted,
    /// A list of the arguments' values, or of parts of a text.
    List,
    /// A list of lists, whose number or length is an argument.
    Groups,
}

pub(super) fn install(environment: &mut Environment<'static>) {
    use ResultSize::{Groups, Indented, Joined, Json, List, PercentFormatted, Replaced, Text};
    let limited = [
        ("lower", Text, Value::from_function(filters::lower)),
        ("upper", Text, Value::from_function(filters::upper)),
        ("title", Text, Value::from_function(filters::title)),
        ("capitalize", Text, Value::from_function(filters::capitalize)),
        ("trim", Text, Value::from_function(filters::trim)),
        ("string", Text, Value::from_function(filters::string)),
        ("escape", Text, Value::from_function(filters::escape)),
        ("e", Text, Value::from_function(filters::escape)),
        ("safe", Text, Value::from_function(filters::safe)),
        ("pprint", Text, Value::from_function(filters::pprint)),
        ("sum", Text, Value::from_function(filters::sum)),
        ("tojson", Json, Value::from_function(json::tojson)),
        ("indent", Indented, Value::from_function(indent)),
        ("replace", Replaced, Value::from_function(filters::replace)),
        ("join", Joined, Value::from_function(filters::join)),
        ("format", PercentFormatted, Value::from_function(filters::format)),
        ("split", List, Value::from_function(filters::split)),
        ("lines", List, Value::from_function(filters::lines)),
        ("list", List, Value::from_function(filters::list)),
        ("sort", List, Value::from_function(filters::sort)),
        ("dictsort", List, Value::from_function(filters::dictsort)),
        ("reverse", List, Value::from_function(filters::reverse)),
        ("batch", Groups, Value::from_function(filters::batch)),
        ("slice", Groups, Value::from_function(filters::slice)),
        ("unique", List, Value::from_function(filters::unique)),
        ("map", List, Value::from_function(filters::map)),
        ("select", List, Value::from_function(filters::select)),
        ("reject", List, Value::from_function(filters::reject)),
        ("selectattr", List, Value::from_function(filters::selectattr)),
        ("rejectattr", List, Value::from_function(filters::rejectattr)),
        ("groupby", List, Value::from_function(filters::groupby)),
        ("chain", List, Value::from_function(filters::chain)),
        ("zip", List, Value::from_function(filters::zip)),
    ];
    for (name, size, filter) in limited {
        let call = move |state: &mut State<'_, '_>, arguments: Rest<ValueOrKwargs>| -> Result<Value, Error> {
            let arguments = arguments.into_values();
            spend_result(state, size, &arguments)?;
            let result = filter.call(state, &arguments)?;
            if matches!(size, ResultSize::Json) {
                spend_text(state, &result)?;
            }
            Ok(result)
        };
        environment.add_filter(name, call);
    }
}

/// Counts the result of a text's method.
pub(super) fn spend_method(
    state: &mut State<'_, '_>,
    text: &Value,
    method: &str,
    arguments: &[Value],
) -> Result<(), Error> {
    let size = match method {
        "upper" | "lower" | "title" | "capitalize" | "strip" | "lstrip" | "rstrip" | "removeprefix"
        | "removesuffix" => ResultSize::Text,
        "split" | "rsplit" | "splitlines" | "partition" | "rpartition" => ResultSize::List,
        "replace" => ResultSize::Replaced,
        "format" => ResultSize::BraceFormatted,
        "join" => {
            // The text is the separator.
            let Some(list) = arguments.first() else { return Ok(()) };
            return spend_result(state, ResultSize::Joined, &[list.clone(), text.clone()]);
        }
        _ => return Ok(()),
    };
    let arguments: Vec<Value> = std::iter::once(text).chain(arguments).cloned().collect();
    spend_result(state, size, &arguments)
}

/// Counts the result of a filter with these arguments, before it is created.
fn spend_result(state: &mut State<'_, '_>, size: ResultSize, arguments: &[Value]) -> Result<(), Error> {
    if matches!(size, ResultSize::List | ResultSize::Groups) {
        return arguments.iter().try_for_each(|argument| {
            let number = argument.as_usize().filter(|_| matches!(size, ResultSize::Groups));
            let count = argument.as_str().map(str::len).or(number).or_else(|| argument.len());
            spend(state, count.unwrap_or(0).saturating_mul(VALUE_BYTES + 1))
        });
    }
    let mut bytes = 0usize;
    for argument in arguments {
        bytes = bytes.saturating_add(spend_text(state, argument)?);
    }
    let text = |index: usize| arguments.get(index).map_or(Cow::Borrowed(""), text_of);
    let more = match size {
        ResultSize::Text | ResultSize::Json | ResultSize::List | ResultSize::Groups => 0,
        ResultSize::Indented => text(0).matches('\n').count().saturating_add(1).saturating_mul(MAX_INDENT),
        ResultSize::Replaced => text(0).matches(&*text(1)).count().saturating_mul(text(2).len()),
        ResultSize::Joined => {
            let items = arguments.first().and_then(Value::len).unwrap_or(0);
            arguments.iter().skip(1).map(|separator| text_of(separator).len()).sum::<usize>().saturating_mul(items)
        }
        ResultSize::PercentFormatted | ResultSize::BraceFormatted => {
            let format = text(0);
            // Each argument may be written at each place.
            let places = format.matches(['%', '{']).count();
            places.saturating_mul(bytes).saturating_add(width(size, &format, arguments))
        }
    };
    spend(state, more)
}

fn text_of(value: &Value) -> Cow<'_, str> {
    value.as_str().map_or_else(|| Cow::Owned(value.to_string()), Cow::Borrowed)
}

/// Returns the sum of the widths and precisions in a format.
fn width(size: ResultSize, format: &str, arguments: &[Value]) -> usize {
    let is_option = |letter: char| letter.is_ascii_digit() || "-+ #.*".contains(letter);
    let options: Vec<&str> = if matches!(size, ResultSize::BraceFormatted) {
        let in_braces = format.split('{').skip(1).filter_map(|text| text.split('}').next());
        in_braces.filter_map(|text| text.split_once(':')).map(|(_, options)| options).collect()
    } else {
        let directives = format.split('%').skip(1);
        directives.filter_map(|text| text.split(|letter: char| !is_option(letter)).next()).collect()
    };
    let numbers = options
        .iter()
        .flat_map(|options| options.split(|letter: char| !letter.is_ascii_digit()))
        .filter(|digits| !digits.is_empty())
        .map(|digits| digits.parse().unwrap_or(usize::MAX));
    // `*` takes the width from the arguments.
    let takes_width = options.iter().any(|options| options.contains('*'));
    let given = arguments.iter().filter(|_| takes_width).filter_map(Value::as_usize);
    numbers.chain(given).fold(0, usize::saturating_add)
}
