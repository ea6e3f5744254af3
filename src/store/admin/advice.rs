//! Advice on the number of shards.

use super::PartitionUnit;
use super::plan::PARTITIONED;

/// Returns what an operator should know about these numbers; `nodes` are those that take shards.
pub(super) fn advice(shards: u64, nodes: u64, unit: PartitionUnit) -> Vec<String> {
    let mut advice = Vec::new();
    if nodes == 0 {
        advice.push("no node takes shards: add a worker with select citus_add_node('host', 5432)".to_owned());
        return advice;
    }
    if shards < nodes {
        let idle = nodes - shards;
        advice
            .push(format!("{shards} shards leave {idle} of {nodes} nodes without rows: choose at least {}", 2 * nodes));
    } else if !shards.is_multiple_of(nodes) {
        let even = shards.next_multiple_of(nodes);
        advice.push(format!("{shards} shards cannot be spread evenly over {nodes} nodes: {even} can"));
    }
    let tables = shards * PARTITIONED.len() as u64;
    let (span, years) = match unit {
        PartitionUnit::Day => ("day", 365),
        PartitionUnit::Month => ("month", 12),
    };
    advice.push(format!(
        "a partition spans a {span}: {tables} tables each {span}, {} a year; more shards than 2 to 4 for each core of the \
         workers cost tables and bring no speed",
        tables * years
    ));
    advice
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uneven_and_missing_shards_are_named() {
        assert!(advice(32, 0, PartitionUnit::Day)[0].contains("citus_add_node"));
        assert_eq!(advice(2, 3, PartitionUnit::Day)[0], "2 shards leave 1 of 3 nodes without rows: choose at least 6");
        assert_eq!(advice(32, 3, PartitionUnit::Day)[0], "32 shards cannot be spread evenly over 3 nodes: 33 can");
        assert!(
            advice(32, 2, PartitionUnit::Month)[0]
                .starts_with("a partition spans a month: 192 tables each month, 2304 a year")
        );
    }
}
