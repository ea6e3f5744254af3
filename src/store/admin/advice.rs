//! Advice on the number of shards.

use super::PartitionUnit;
use super::plan::PARTITIONED;

/// Returns recommendations for an operator; `nodes` is the number of nodes that accept shards.
pub(super) fn advice(shards: u64, nodes: u64, unit: PartitionUnit) -> Vec<String> {
    let mut advice = Vec::new();
    if nodes == 0 {
        advice.push("no node accepts shards: add a worker with select citus_add_node('host', 5432)".to_owned());
        return advice;
    }
    if shards < nodes {
        let idle = nodes - shards;
        advice.push(format!("{shards} shards leave {idle} of {nodes} nodes without rows: use {} or more", 2 * nodes));
    } else if !shards.is_multiple_of(nodes) {
        let even = shards.next_multiple_of(nodes);
        advice.push(format!("{shards} shards cannot be distributed evenly over {nodes} nodes: use {even}"));
    }
    let tables = shards * PARTITIONED.len() as u64;
    let (span, years) = match unit {
        PartitionUnit::Day => ("day", 365),
        PartitionUnit::Month => ("month", 12),
    };
    advice.push(format!(
        "partitions by {span} create {tables} tables per {span}, {} per year; more than 2 to 4 shards per worker core add \
         tables without adding speed",
        tables * years
    ));
    advice
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_names_missing_nodes_and_uneven_shards() {
        assert!(advice(32, 0, PartitionUnit::Day)[0].contains("citus_add_node"));
        assert_eq!(advice(2, 3, PartitionUnit::Day)[0], "2 shards leave 1 of 3 nodes without rows: use 6 or more");
        assert_eq!(advice(32, 3, PartitionUnit::Day)[0], "32 shards cannot be distributed evenly over 3 nodes: use 33");
        assert!(
            advice(32, 2, PartitionUnit::Month)[0]
                .starts_with("partitions by month create 192 tables per month, 2304 per year")
        );
    }
}
