//! Rules that keep tests quick and independent of the machine's speed.

use super::files;
use regex::Regex;

#[test]
fn tests_sleep_50_ms_at_most() {
    let sleep = Regex::new(r"sleep\((?:std::time::|tokio::time::)?Duration::from_(\w+)\((\d+)").unwrap();
    let mut too_long = Vec::new();
    let mut found = 0;
    for (path, text) in files("tests/it") {
        for (number, line) in text.lines().enumerate() {
            let Some(captures) = sleep.captures(line) else { continue };
            found += 1;
            let is_short = match &captures[1] {
                "micros" | "nanos" => true,
                "millis" => captures[2].parse::<u64>().unwrap() <= 50,
                _ => false,
            };
            if !is_short {
                too_long.push(format!("{path}:{}: {}", number + 1, line.trim()));
            }
        }
    }
    assert!(found > 20, "the pattern matches {found} sleeps only");
    assert!(too_long.is_empty(), "wait for a condition in steps of at most 50 ms:\n{}", too_long.join("\n"));
}
