//! Rules that keep tests quick and independent of the machine's speed.

use super::files;

/// Returns the duration that a line sleeps, in milliseconds and rounded down; `None` if it does not sleep or the
/// duration is not a constant.
fn slept_ms(line: &str) -> Option<u64> {
    let argument = line.split_once("sleep(")?.1;
    let argument = argument.trim_start_matches("std::time::").trim_start_matches("tokio::time::");
    let (unit, number) = argument.strip_prefix("Duration::from_")?.split_once('(')?;
    let digits: String = number.chars().take_while(char::is_ascii_digit).collect();
    let number: u64 = digits.parse().ok()?;
    Some(match unit {
        "nanos" => number / 1_000_000,
        "micros" => number / 1000,
        "millis" => number,
        _ => number * 1000,
    })
}

#[test]
fn tests_sleep_50_ms_at_most() {
    let mut too_long = Vec::new();
    let mut found = 0;
    for (path, text) in files("tests/it") {
        for (number, line) in text.lines().enumerate() {
            let Some(slept_ms) = slept_ms(line) else { continue };
            found += 1;
            if slept_ms > 50 {
                too_long.push(format!("{path}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    assert!(found > 20, "only {found} sleeps were found");
    assert!(too_long.is_empty(), "wait for a condition in steps of at most 50 ms:\n{}", too_long.join("\n"));
}
