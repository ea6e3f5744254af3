//! The embedded PostgreSQL server: start, stop, crash, and its schema.

use super::{Data, LiveRun, document, kill, psql};
use std::time::{Duration, Instant};
use thunder::events::{RunStatus, Scope};
use thunder::recording::RecorderHandle;
use thunder::store::{Database, EmbeddedError, Error, Store};

#[tokio::test]
async fn concurrent_starts_on_directory_are_rejected() {
    let data = Data::embedded();
    let starts: Vec<_> =
        (0..6).map(|_| data.database()).map(|database| tokio::spawn(Store::open(database, |_| {}))).collect();
    let mut opened = Vec::new();
    for start in starts {
        match start.await.unwrap() {
            Ok(store) => opened.push(store),
            Err(error @ Error::Embedded(EmbeddedError::InUse { .. })) => {
                let text = error.to_string();
                assert!(text.contains(&data.0.display().to_string()) && text.contains("--data-dir"), "{text}");
            }
            Err(error) => panic!("{error}"),
        }
    }
    assert_eq!(opened.len(), 1);
    opened.pop().unwrap().close().await;
    data.open().await.close().await;
}

#[tokio::test]
async fn data_survives_a_stop_and_stays_private() {
    let data = Data::embedded();
    let store = data.open().await;
    let run_id = store.ingest(&Scope::All, None, document("kept", 5)).await.unwrap().run_id;
    let url = data.url();
    assert_eq!(psql(&url, "show fsync").await, "on");
    assert_eq!(psql(&url, "show listen_addresses").await, "");
    let socket = psql(&url, "show unix_socket_directories").await;
    let mode = std::process::Command::new("stat").args(["-c", "%a", &socket]).output().unwrap();
    assert_eq!(String::from_utf8_lossy(&mode.stdout).trim(), "700");
    store.close().await;
    assert!(!data.0.join("postgres/data/postmaster.pid").exists(), "the server must be stopped");
    assert!(!std::path::Path::new(&socket).exists(), "the folder of the socket must be removed");
    let store = data.open().await;
    assert_eq!(store.find(&Scope::All, "kept").await.unwrap().unwrap().run_id, run_id);
    store.close().await;
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn database_yields_to_the_decoding_threads() {
    let data = Data::embedded();
    let store = data.open().await;
    let nice_value = |pid: &str| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap();
        // The nice value is the 17th field after the name.
        stat.rsplit_once(") ").unwrap().1.split(' ').nth(16).unwrap().parse::<i32>().unwrap()
    };
    assert!(nice_value(&data.postmaster().await.to_string()) > nice_value("self"));
    store.close().await;
}

#[tokio::test]
async fn start_recovers_from_interrupted_initdb_and_stale_pid_file() {
    let data = Data::embedded();
    std::fs::create_dir_all(data.0.join("postgres/data.new/base")).unwrap();
    if nix::unistd::geteuid().is_root() {
        let user = nix::unistd::User::from_name("postgres").unwrap().unwrap();
        nix::unistd::chown(&data.0.join("postgres"), Some(user.uid), Some(user.gid)).unwrap();
    }
    let store = data.open().await;
    store.ingest(&Scope::All, None, document("kept", 5)).await.unwrap();
    store.close().await;
    // The file has the id of a process that is not PostgreSQL.
    let pid_file = format!("{}\n{}\n1\n5432\n/tmp\n*\n", std::process::id(), data.0.join("postgres/data").display());
    std::fs::write(data.0.join("postgres/data/postmaster.pid"), pid_file).unwrap();
    let store = data.open().await;
    assert!(store.find(&Scope::All, "kept").await.unwrap().is_some());
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn killed_embedded_server_is_restarted() {
    let data = Data::embedded();
    let store = data.open().await;
    store.ingest(&Scope::All, None, document("kept", 5)).await.unwrap();
    // After SIGTERM the server waits for its connections to close and accepts no other.
    for signal in ["-9", "-TERM", "-INT"] {
        let killed = data.postmaster().await;
        kill(killed, signal);
        let begun = Instant::now();
        while store.find(&Scope::All, "kept").await.is_err() || data.postmaster().await == killed {
            assert!(begun.elapsed() < Duration::from_mins(1), "the server is not restarted after {signal}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    store.close().await;
}

#[tokio::test]
async fn migrations_are_applied_once_by_concurrent_starts() {
    let data = Data::empty();
    let url = data.url();
    let starts: Vec<_> = (0..6)
        .map(|number| Database::Url { url: url.clone(), direct_url: None, data_dir: data.0.join(number.to_string()) })
        .map(|database| tokio::spawn(Store::open(database, |_| {})))
        .collect();
    for start in starts {
        start.await.unwrap().unwrap().close().await;
    }
    let history = "select string_agg(version::text, ' ' order by version) from refinery_schema_history";
    let files = std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/migrations")).unwrap();
    let number = |name: String| name.trim_start_matches('V').split('_').next().unwrap().parse().unwrap();
    let mut versions: Vec<u32> = files.map(|file| number(file.unwrap().file_name().into_string().unwrap())).collect();
    versions.sort_unstable();
    let versions: Vec<String> = versions.iter().map(ToString::to_string).collect();
    assert_eq!(psql(&url, history).await, versions.join(" "));
    // Six tables have partitions for three days and a default partition.
    assert_eq!(psql(&url, "select count(*) from pg_inherits where inhparent::regclass in ('events', 'mod_calls', 'mod_logs', 'actions', 'attention', 'run_columns')").await, "24");
    assert_eq!(psql(&url, "select make_partitions((now() at time zone 'utc')::date + 1, 5)").await, "18");
}

#[tokio::test]
async fn schema_of_later_release_is_rejected() {
    let data = Data::new();
    let store = data.open().await;
    let later = "insert into refinery_schema_history values (9999, 'later', now()::text, '0')";
    psql(&data.url(), later).await;
    store.close().await;
    let error = Store::open(data.database(), |_| {}).await.err().unwrap();
    assert!(matches!(error, Error::NewerSchema { found: 9999, .. }), "{error}");
}

#[tokio::test]
async fn read_only_database_is_not_ready() {
    let data = Data::embedded();
    let store = data.open().await;
    store.ready().await.unwrap();
    let url = data.url();
    psql(&url, "alter system set default_transaction_read_only = on").await;
    psql(&url, "select pg_reload_conf()").await;
    let begun = Instant::now();
    while store.ready().await.is_ok() {
        assert!(begun.elapsed() < Duration::from_mins(1), "the database is still ready");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(store.ingest(&Scope::All, None, document("kept", 5)).await.is_err());
    store.close().await;
}

#[tokio::test]
async fn rows_of_a_day_without_partition_are_in_the_default_partition() {
    let data = Data::new();
    let store = data.open().await;
    let url = data.url();
    let id = psql(&url, "select first_run_id('2020-02-03')").await;
    psql(&url, &format!("insert into mod_logs values ('{id}', 0, 0, 'm', 'x', 'INFO')")).await;
    assert_eq!(psql(&url, "select make_partitions('2020-02-03', 1)").await, "5");
    assert_eq!(psql(&url, "select log_message from mod_logs_default").await, "x");
    assert_eq!(store.damaged_links().await.unwrap().len(), 1);
    store.close().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_runs_of_dead_servers_are_interrupted() {
    let data = Data::new();
    let first = data.open().await;
    let url = |folder: &str| Database::Url { url: data.url(), direct_url: None, data_dir: data.0.join(folder) };
    let dead_server = Store::open(url("a"), |_| {}).await.unwrap();
    let (mut dead, mut alive) = (LiveRun::new("dead"), LiveRun::new("alive"));
    for (store, run) in [(&dead_server, &mut dead), (&first, &mut alive)] {
        store.start_recorder();
        let RecorderHandle { signals: recorder, .. } = store.recorder();
        for signal in [run.started(), run.prefilled(), run.token(" a")] {
            recorder.send(signal).await.unwrap();
        }
        while store.find(&Scope::All, &run.run_id().to_string()).await.unwrap().is_none_or(|run| run.events < 4) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    // A server can end after it has stored attention and before it stores its event.
    let attention = format!("insert into attention values ('{}', 999, 1, 1, '{{0}}', '', '')", dead.run_id());
    psql(&data.url(), &attention).await;
    dead_server.close().await;
    let next = Store::open(url("a"), |_| {}).await.unwrap();
    let status = async |name: &str| next.find(&Scope::All, name).await.unwrap().unwrap().status;
    assert_eq!(status("dead").await, RunStatus::Interrupted);
    assert_eq!(status("alive").await, RunStatus::Running);
    assert!(next.columns(&Scope::All, dead.run_id()).await.unwrap().is_some());
    assert_eq!(next.damaged_links().await.unwrap(), Vec::<String>::new());
    next.close().await;
    first.close().await;
}

/// PostgreSQL keeps running when the process that started it is killed.
#[test]
fn embedded_server_of_killed_process_is_replaced() {
    let data = Data::embedded();
    let runtime = || tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    let first = runtime();
    let store = first.block_on(data.open());
    first.block_on(store.ingest(&Scope::All, None, document("kept", 5))).unwrap();
    let orphan = first.block_on(data.postmaster());
    // The tasks of the store end without stopping PostgreSQL, as if the process were killed.
    first.shutdown_background();
    drop(store);
    assert!(std::path::Path::new(&format!("/proc/{orphan}")).exists());
    let second = runtime();
    second.block_on(async {
        let store = data.open().await;
        assert_ne!(data.postmaster().await, orphan);
        assert!(store.find(&Scope::All, "kept").await.unwrap().is_some());
        store.close().await;
    });
}
