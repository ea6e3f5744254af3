//! Prometheus' text format.

use crate::events::HistogramCounts;
use std::fmt::Write;

/// Labels of a sample: names and values.
pub(super) type Labels<'a> = &'a [(&'a str, &'a str)];

/// A response in Prometheus' text format.
#[derive(Debug, Default)]
pub(super) struct Exposition {
    text: String,
}

impl Exposition {
    /// Adds a metric with one value.
    pub(super) fn single(&mut self, kind: &str, name: &str, help: &str, value: f64) {
        self.family(kind, name, help);
        self.sample(name, &[], value);
    }

    /// Begins a metric, whose samples follow. `kind` is `counter`, `gauge` or `histogram`.
    pub(super) fn family(&mut self, kind: &str, name: &str, help: &str) {
        // Writing to a String cannot fail.
        let _ = writeln!(self.text, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Adds a value.
    pub(super) fn sample(&mut self, name: &str, labels: Labels<'_>, value: f64) {
        self.text.push_str(name);
        for (at, (label, value)) in labels.iter().enumerate() {
            let separator = if at == 0 { '{' } else { ',' };
            let value = value.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n");
            let _ = write!(self.text, "{separator}{label}=\"{value}\"");
        }
        if !labels.is_empty() {
            self.text.push('}');
        }
        let _ = writeln!(self.text, " {value}");
    }

    /// Adds a histogram.
    pub(super) fn histogram(&mut self, name: &str, labels: Labels<'_>, counts: &HistogramCounts) {
        let bucket = format!("{name}_bucket");
        let finite = counts.cumulative.iter().map(|(bound, count)| (bound.to_string(), *count));
        for (bound, count) in finite.chain([("+Inf".to_owned(), counts.count)]) {
            self.sample(&bucket, &[labels, &[("le", &bound)]].concat(), count as f64);
        }
        self.sample(&format!("{name}_sum"), labels, counts.sum);
        self.sample(&format!("{name}_count"), labels, counts.count as f64);
    }

    /// Returns the text.
    pub(super) fn into_text(self) -> String {
        self.text
    }
}

#[cfg(test)]
mod tests {
    use super::Exposition;
    use crate::events::HistogramCounts;

    #[test]
    fn labels_are_escaped_and_histograms_cumulative() {
        let mut exposition = Exposition::default();
        let counts = HistogramCounts { cumulative: vec![(0.005, 1), (2.5, 2)], count: 3, sum: 4.5 };
        exposition.family("histogram", "calls", "Calls.");
        exposition.histogram("calls", &[("mod", "a\"b\\")], &counts);
        let expected = concat!(
            "# HELP calls Calls.\n# TYPE calls histogram\n",
            "calls_bucket{mod=\"a\\\"b\\\\\",le=\"0.005\"} 1\n",
            "calls_bucket{mod=\"a\\\"b\\\\\",le=\"2.5\"} 2\n",
            "calls_bucket{mod=\"a\\\"b\\\\\",le=\"+Inf\"} 3\n",
            "calls_sum{mod=\"a\\\"b\\\\\"} 4.5\n",
            "calls_count{mod=\"a\\\"b\\\\\"} 3\n",
        );
        assert_eq!(exposition.into_text(), expected);
    }
}
