use crate::cli::output;
use crate::config::flags::DataFlags;
use crate::store::admin::{Admin, DistributionOptions, DistributionPlan, PartitionUnit, Partitioning};
use anyhow::{Context, bail};
use clap::ValueEnum;
use std::fmt::Write as _;
use std::process::ExitCode;

/// Distribute the tables over the nodes of Citus by `run_id`; a repeated command continues an interrupted one
#[derive(Debug, clap::Args)]
pub struct Args {
    /// SQL of the steps, without executing them
    #[arg(long)]
    dry_run: bool,
    /// Number of shards, 1 to 64000; default: `citus.shard_count` of the server
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u32).range(1..=64_000))]
    shards: Option<u32>,
    /// Time span of a partition; auto chooses a month if daily partitions for --keep-days, or for a year, would result in
    /// more than 10000 tables
    #[arg(long, value_name = "SPAN", default_value = "auto")]
    partitions: PartitionSpan,
    #[command(flatten)]
    data: DataFlags,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum PartitionSpan {
    Auto,
    Day,
    Month,
}

/// Prints or executes the steps.
pub async fn distribute(args: Args) -> anyhow::Result<ExitCode> {
    let config = args.data.config()?;
    let options = DistributionOptions {
        shards: args.shards,
        partitioning: match args.partitions {
            PartitionSpan::Auto => Partitioning::Automatic,
            PartitionSpan::Day => Partitioning::Fixed(PartitionUnit::Day),
            PartitionSpan::Month => Partitioning::Fixed(PartitionUnit::Month),
        },
        keep_days: config.keep_days,
    };
    let mut admin = super::open(&config).await?;
    let outcome = if args.dry_run { show(&mut admin, &options).await } else { execute(&mut admin, &options).await };
    admin.close().await;
    outcome.map(|()| ExitCode::SUCCESS)
}

async fn show(admin: &mut Admin, options: &DistributionOptions) -> anyhow::Result<()> {
    Ok(output::print(script(&admin.distribution(options).await?))?)
}

async fn execute(admin: &mut Admin, options: &DistributionOptions) -> anyhow::Result<()> {
    admin.migrate(|step| eprintln!("thunder: {step}")).await?;
    let distribution = admin.distribution(options).await?;
    if !distribution.obstacles.is_empty() {
        bail!("the tables cannot be distributed: {}", distribution.obstacles.join("; "));
    }
    if let Some(version) = &distribution.citus {
        output::print_line(format_args!("Citus {version}: {} shards", distribution.shards))?;
    }
    for advice in &distribution.advice {
        output::print_line(format_args!("Note: {advice}"))?;
    }
    let count = distribution.steps.len();
    for (number, step) in (1..).zip(&distribution.steps) {
        output::print(format!("[{number}/{count}] {} … ", step.title))?;
        let result = admin.execute(step).await;
        output::print_line(
            result.as_ref().map_or("failed".to_owned(), |outcome| format!("{:.1} s", outcome.elapsed.as_secs_f64())),
        )?;
        result.with_context(|| {
            format!(
                "cannot {}; the previous steps are complete, and the next run of the command continues here",
                step.title
            )
        })?;
    }
    Ok(output::print_line("all tables are distributed")?)
}

/// Returns the steps as a script for psql.
fn script(distribution: &DistributionPlan) -> String {
    let mut out = String::new();
    let citus = distribution.citus.as_ref().map_or("no Citus".to_owned(), |version| format!("Citus {version}"));
    let unit = if distribution.unit == PartitionUnit::Day { "day" } else { "month" };
    let _ = writeln!(out, "-- {citus}, {} shards, one partition per {unit}", distribution.shards);
    for obstacle in &distribution.obstacles {
        let _ = writeln!(out, "-- obstacle: {obstacle}");
    }
    for advice in &distribution.advice {
        let _ = writeln!(out, "-- note: {advice}");
    }
    for step in &distribution.steps {
        let _ = writeln!(out, "\n-- {}\nbegin;", step.title);
        for statement in &step.statements {
            let _ = writeln!(out, "{statement};");
        }
        out.push_str("commit;\n");
    }
    if distribution.steps.is_empty() {
        out.push_str("-- all tables are distributed\n");
    }
    out
}
