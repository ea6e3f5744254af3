use crate::cli::output;
use crate::cli::table::format_table;
use crate::config::flags::DataFlags;
use crate::store::SpoolStatus;
use crate::store::admin::{DatabaseStatus, NodeStatus, PartitionUnit, TablePlacement};
use std::fmt::Write as _;
use std::process::ExitCode;

/// Show sizes, partitions, shards and nodes of the database, and the spooled records in the data directory
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Status as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    data: DataFlags,
}

/// Prints the status.
pub async fn status(args: Args) -> anyhow::Result<ExitCode> {
    let mut admin = super::open(&args.data.config()?).await?;
    let status = admin.status().await;
    admin.close().await;
    let status = status?;
    if args.json {
        output::print_line(serde_json::to_string_pretty(&status)?)?;
    } else {
        output::print(text(&status))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn text(status: &DatabaseStatus) -> String {
    let mut out = format!(
        "PostgreSQL {}, schema {}, {}, {}\n\n",
        status.server_version,
        status.schema_version,
        status.runs.map_or("a node with runs is unreachable".to_owned(), |runs| format!("{runs} runs")),
        size(status.bytes)
    );
    let rows = status.tables.iter().map(|table| {
        let count = |number: u64| if number == 0 { "-".to_owned() } else { number.to_string() };
        let place = match table.placement {
            TablePlacement::Local => "local",
            TablePlacement::Distributed => "distributed",
            TablePlacement::Reference => "every node",
        };
        [table.name.clone(), place.to_owned(), count(table.shards), count(table.partitions), size(table.bytes)]
    });
    push_table(&mut out, ["TABLE", "PLACEMENT", "SHARDS", "PARTITIONS", "SIZE"], 3, rows.collect());
    let partitions = &status.partitions;
    let unit = if partitions.unit == PartitionUnit::Day { "day" } else { "month" };
    let span = match (partitions.first_day, partitions.last_day) {
        (Some(first), Some(last)) => format!(" from {first} to {last}"),
        _ => String::new(),
    };
    let _ = writeln!(out, "\nPartitions: {}{span}; new ones span a {unit}", partitions.count);
    if let Some(citus) = &status.citus {
        let _ = writeln!(
            out,
            "Citus {}: {} shards of partitions, citus.shard_count {}\n",
            citus.version, citus.shard_tables, citus.shard_count
        );
        push_table(&mut out, ["NODE", "ROLE", "STATE", "SHARDS", "SIZE"], 2, citus.nodes.iter().map(node).collect());
        for advice in &citus.advice {
            let _ = writeln!(out, "Note: {advice}");
        }
    }
    let _ = writeln!(out, "Spool: {}", spool(&status.spool));
    out
}

fn node(node: &NodeStatus) -> [String; 5] {
    let role = if node.is_coordinator { "coordinator" } else { "worker" };
    let state = match (node.is_active, node.is_reachable) {
        (_, false) => "unreachable",
        (false, true) => "not active",
        (true, true) => "active",
    };
    [node.address.clone(), role.into(), state.into(), node.shards.to_string(), size(node.bytes)]
}

fn spool(spool: &SpoolStatus) -> String {
    let mut text = match spool.records {
        0 => "empty".to_owned(),
        records => format!("{records} records, {}", size(spool.bytes)),
    };
    if let Some(lag) = spool.lag_s {
        let _ = write!(text, ", the oldest {lag} s old");
    }
    if spool.refused_bytes > 0 {
        let _ =
            write!(text, "; {} of rejected or damaged records in *.refused and *.damaged", size(spool.refused_bytes));
    }
    text
}

/// Appends a table whose last `numeric` columns are aligned right.
fn push_table<const N: usize>(out: &mut String, head: [&str; N], numeric: usize, mut rows: Vec<[String; N]>) {
    rows.insert(0, head.map(str::to_owned));
    out.push_str(&format_table(&rows, numeric));
}

fn size(bytes: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let unit = (bytes.max(1).ilog2() / 10).min(4);
    match unit {
        0 => format!("{bytes} B"),
        _ => format!("{:.1} {}", bytes as f64 / f64::from(1 << 10).powi(unit.cast_signed()), UNITS[unit as usize]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_use_the_largest_unit_that_fits() {
        assert_eq!([0, 1023, 1024, 1536 << 20, 5 << 40].map(size), ["0 B", "1023 B", "1.0 KiB", "1.5 GiB", "5.0 TiB"]);
    }

    #[test]
    fn spool_status_has_number_and_age_of_records() {
        let status = SpoolStatus { files: 1, records: 3, bytes: 2048, lag_s: Some(7), refused_bytes: 0 };
        assert_eq!(spool(&status), "3 records, 2.0 KiB, the oldest 7 s old");
        assert_eq!(spool(&SpoolStatus::default()), "empty");
    }
}
