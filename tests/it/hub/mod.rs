//! Download of models from a server with the routes of the Hugging Face Hub.

mod lists;
mod server;

use super::harness::{ErrorTable, Server, folder, model, text, thunder};
use serde_json::json;
use server::{COMMIT, Faults, Hub, REPOSITORY, sha256};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

/// Returns the content of a file.
fn bytes(size: usize) -> Vec<u8> {
    (0..size).map(|at| (at * 31 + at / 251) as u8).collect()
}

fn command(hub: &Hub, cache: &Path, arguments: &[&str]) -> Command {
    let mut command = thunder();
    command.args(arguments).env("HF_ENDPOINT", hub.url()).env("HF_HUB_CACHE", cache);
    command
}

/// Downloads a model; returns its path, or the error output.
fn pull(hub: &Hub, cache: &Path, arguments: &[&str]) -> Result<PathBuf, String> {
    let Output { status, stdout, stderr } =
        command(hub, cache, &[&["models", "pull"], arguments].concat()).output().unwrap();
    if status.success() { Ok(PathBuf::from(text(&stdout).trim_end())) } else { Err(text(&stderr)) }
}

fn repository(cache: &Path) -> PathBuf {
    cache.join(format!("models--{}", REPOSITORY.replace('/', "--")))
}

/// Returns all files below a folder.
fn tree(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut pending = vec![folder.to_owned()];
    while let Some(next) = pending.pop() {
        for entry in std::fs::read_dir(next).into_iter().flatten().flatten() {
            let path = entry.path();
            if entry.file_type().unwrap().is_dir() {
                pending.push(path);
            } else {
                found.push(path.strip_prefix(folder).unwrap().to_str().unwrap().to_owned());
            }
        }
    }
    found.sort();
    found
}

#[test]
fn interrupted_download_resumes_and_has_the_layout_of_the_hub_cache() {
    let (model, other) = (bytes(300_000), bytes(1000));
    let hub = Hub::start(&[("x-Q8_0.gguf", other), ("sub dir/x-Q4_K_M.gguf", model.clone()), ("README.md", bytes(9))]);
    hub.set(Faults { cuts: vec![20_000, 10_000], token: Some("hf_secret".to_owned()), ..Faults::default() });
    let cache = folder();
    let path = pull(&hub, &cache, &[REPOSITORY, "--hf-token", "hf_secret"]).unwrap();

    let repository = repository(&cache);
    assert_eq!(path, repository.join("snapshots").join(COMMIT).join("sub dir/x-Q4_K_M.gguf"));
    assert_eq!(std::fs::read(&path).unwrap(), model);
    let blob = format!("blobs/{}", sha256(&model));
    assert_eq!(std::fs::read_link(&path).unwrap(), Path::new("../../..").join(&blob));
    assert_eq!(tree(&repository), [blob.as_str(), "refs/main", &format!("snapshots/{COMMIT}/sub dir/x-Q4_K_M.gguf")]);
    assert_eq!(std::fs::read_to_string(repository.join("refs/main")).unwrap(), COMMIT);

    let name = "sub%20dir/x-Q4_K_M.gguf";
    let bearer = "Bearer hf_secret";
    let mut expected = vec![
        format!("GET 127.0.0.1 /api/models/{REPOSITORY}/refs - {bearer}"),
        format!("GET 127.0.0.1 /api/models/{REPOSITORY}/tree/{COMMIT} - {bearer}"),
    ];
    for range in ["-", "bytes=20000-", "bytes=30000-"] {
        expected.push(format!("GET 127.0.0.1 /{REPOSITORY}/resolve/{COMMIT}/{name} {range} {bearer}"));
        expected.push(format!("GET localhost /storage/{name} {range} -"));
    }
    assert_eq!(hub.requests(), expected);

    // The newest version is in the cache.
    assert_eq!(pull(&hub, &cache, &[REPOSITORY, "--hf-token", "hf_secret"]).unwrap(), path);
    assert_eq!(hub.requests().len(), 2);
    pull(&hub, &cache, &[&format!("{REPOSITORY}:q8_0"), "--hf-token", "hf_secret"]).unwrap();
    let listed = command(&hub, &cache, &["models", "list"]).output().unwrap().stdout;
    let listed = String::from_utf8(listed).unwrap();
    let rows: Vec<Vec<&str>> = listed.lines().map(|line| line.splitn(2, "  ").map(str::trim).collect()).collect();
    assert_eq!(rows.len(), 2, "{listed}");
    assert_eq!(rows[0], [format!("{REPOSITORY}:Q4_K_M"), format!("0.3 MiB  {}", path.display())]);
    assert_eq!(rows[1][0], format!("{REPOSITORY}:Q8_0"));
}

#[test]
fn partial_download_is_continued_and_verified() {
    let model = bytes(200_000);
    let hub = Hub::start(&[("x.gguf", model.clone())]);
    let cache = folder();
    let blobs = repository(&cache).join("blobs");
    std::fs::create_dir_all(&blobs).unwrap();
    let partial = blobs.join(format!("{}.incomplete", sha256(&model)));
    std::fs::write(&partial, &model[..150_000]).unwrap();
    let path = pull(&hub, &cache, &[REPOSITORY]).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), model);
    assert!(hub.requests().last().unwrap().contains(" bytes=150000- "));

    // The partial file has other bytes.
    std::fs::remove_dir_all(repository(&cache)).unwrap();
    std::fs::create_dir_all(&blobs).unwrap();
    std::fs::write(&partial, vec![7; 150_000]).unwrap();
    let mut errors = ErrorTable::default();
    errors.add_text("other bytes in the partial file", &pull(&hub, &cache, &[REPOSITORY]).unwrap_err());
    insta::assert_snapshot!("partial_download_errors", errors);
    assert_eq!(pull(&hub, &cache, &[REPOSITORY]).map(|path| std::fs::read(path).unwrap()), Ok(model));
}

#[test]
fn file_with_wrong_checksum_is_not_kept() {
    let hub = Hub::start(&[("x.gguf", bytes(5000))]);
    hub.set(Faults { is_corrupt: true, ..Faults::default() });
    let cache = folder();
    let mut errors = ErrorTable::default();
    errors.add_text("other bytes from the hub", &pull(&hub, &cache, &[REPOSITORY]).unwrap_err());
    insta::assert_snapshot!("checksum_errors", errors);
    let files = tree(&cache);
    assert!(files.len() == 1 && files[0].ends_with(".incomplete"), "{files:?}");
    assert_eq!(std::fs::metadata(cache.join(&files[0])).unwrap().len(), 0);
}

#[test]
fn failed_download_names_the_reason() {
    let hub = Hub::start(&[("x-Q8_0.gguf", bytes(10)), ("m-00001-of-00002.gguf", bytes(10))]);
    let cache = folder();
    let pull_error = |arguments: &[&str]| pull(&hub, &cache, arguments).unwrap_err();
    let mut errors = ErrorTable::default();
    for arguments in [
        &["user/unknown"][..],
        &[&format!("{REPOSITORY}:Q2_K")],
        &[REPOSITORY, "--hf-file", "m-00001-of-00002.gguf"],
        &["../../etc:Q8_0"],
        &[REPOSITORY, "--offline"],
    ] {
        errors.add_text(arguments.join(" "), &pull_error(arguments));
    }
    hub.set(Faults { token: Some("hf_other".to_owned()), ..Faults::default() });
    for arguments in [&[REPOSITORY][..], &[REPOSITORY, "--hf-token", "hf_secret"]] {
        errors.add_text(format!("{} (another token is required)", arguments.join(" ")), &pull_error(arguments));
    }
    insta::assert_snapshot!("download_errors", errors);
    let mut closed = command(&hub, &cache, &["models", "pull", REPOSITORY]);
    let error = closed.env("HF_ENDPOINT", "http://127.0.0.1:1").output().unwrap().stderr;
    assert!(String::from_utf8(error).unwrap().contains("127.0.0.1 does not answer"));

    // The client retries after temporary errors of the server, but not after an invalid response.
    hub.set(Faults { statuses: vec![200, 200, 503, 429], ..Faults::default() });
    assert!(pull_error(&[REPOSITORY]).contains("is invalid"));
    assert_eq!(tree(&cache), [""; 0]);
}

#[test]
fn malicious_paths_of_the_server_stay_in_the_cache() {
    let hub = Hub::start(&[("x-Q4_0.gguf", bytes(10))]);
    let root = folder();
    let cache = root.join("cache");
    let file =
        |path: &str, oid: &str| json!({"type": "file", "path": path, "size": 10, "oid": oid, "lfs": {"oid": oid}});
    let hash = sha256(&bytes(10));
    let hostile = [
        "../../../../evil-Q4_K_M.gguf",
        "/tmp/evil-Q4_K_M.gguf",
        "a/../../b-Q4_K_M.gguf",
        "a\\b-Q4_K_M.gguf",
        "\u{1b}[2J-Q4_K_M.gguf",
        "",
    ];
    let mut additional_files: Vec<_> = hostile.iter().map(|path| file(path, &hash)).collect();
    additional_files.extend(["../../evil", "", "zz"].iter().map(|oid| file("oid-Q4_K_M.gguf", oid)));
    hub.set(Faults { additional_files, ..Faults::default() });
    let path = pull(&hub, &cache, &[REPOSITORY]).unwrap();
    assert!(path.ends_with("x-Q4_0.gguf"), "{path:?}");
    let mut errors = ErrorTable::default();
    errors.add_text("Q4_K_M", &pull(&hub, &cache, &[&format!("{REPOSITORY}:Q4_K_M")]).unwrap_err());
    for path in &hostile[..4] {
        errors.add_text(path, &pull(&hub, &cache, &[REPOSITORY, "--hf-file", path]).unwrap_err());
    }
    hub.set(Faults { commit: Some("../../../../../evil".to_owned()), ..Faults::default() });
    errors.add_text("a commit that is a path", &pull(&hub, &cache, &[REPOSITORY]).unwrap_err());
    insta::assert_snapshot!("malicious_path_errors", errors);
    let found = tree(&root);
    let below = format!("cache/models--{}/", REPOSITORY.replace('/', "--"));
    assert!(found.len() == 3 && found.iter().all(|path| path.starts_with(&below)), "{found:?}");
}

#[test]
fn split_model_is_downloaded_with_all_parts() {
    let parts = [bytes(100), bytes(200), bytes(300)];
    let hub = Hub::start(&[
        ("s-Q4_K_M-00003-of-00003.gguf", parts[2].clone()),
        ("s-Q4_K_M-00001-of-00003.gguf", parts[0].clone()),
        ("s-Q4_K_M-00002-of-00003.gguf", parts[1].clone()),
    ]);
    let cache = folder();
    let first = pull(&hub, &cache, &[REPOSITORY]).unwrap();
    assert!(first.ends_with("s-Q4_K_M-00001-of-00003.gguf"), "{first:?}");
    let url = format!("{}/plain/s-Q4_K_M-00001-of-00003.gguf", hub.url());
    let from_url = pull(&hub, &cache, &["--model-url", &url]).unwrap();
    for first in [first, from_url] {
        for (number, bytes) in parts.iter().enumerate() {
            let part = first.with_file_name(format!("s-Q4_K_M-0000{}-of-00003.gguf", number + 1));
            assert_eq!(std::fs::read(part).unwrap(), *bytes);
        }
    }
}

#[test]
fn file_of_a_url_is_cached_by_its_version() {
    let model = bytes(4000);
    let hub = Hub::start(&[("x.gguf", model.clone()), ("mtp-mmproj.gguf", bytes(10))]);
    let cache = folder();
    let companion = format!("{}/plain/mtp-mmproj.gguf", hub.url());
    let path = pull(&hub, &cache, &["--model-url", &companion]).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), bytes(10), "a URL names its file, whatever the name");
    assert_eq!(pull(&hub, &cache, &["-mu", &companion, "--offline"]), Ok(path));
    let plain = format!("{}/plain/x.gguf", hub.url());
    hub.set(Faults { cuts: vec![1000], ..Faults::default() });
    let path = pull(&hub, &cache, &["--model-url", &plain, "--hf-token", "hf_secret"]).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), model);
    hub.requests();
    assert_eq!(pull(&hub, &cache, &["-mu", &plain]), Ok(path.clone()));
    assert_eq!(hub.requests(), ["HEAD 127.0.0.1 /plain/x.gguf - -"]);
    assert_eq!(pull(&hub, &cache, &["-mu", &plain, "--offline"]), Ok(path));
    assert_eq!(hub.requests(), [""; 0]);

    // A hub has the checksum in the header of the redirect.
    let linked = format!("{}/{REPOSITORY}/resolve/main/x.gguf", hub.url());
    hub.set(Faults { is_corrupt: true, ..Faults::default() });
    let mut errors = ErrorTable::default();
    let error = pull(&hub, &cache, &["--model-url", &linked]).unwrap_err();
    // The first line contains a hash of the address.
    errors.add_text("other bytes", error.lines().last().unwrap());
    hub.set(Faults::default());
    // The token is sent only to the hub.
    let elsewhere = plain.replace("127.0.0.1", "localhost");
    hub.requests();
    pull(&hub, &cache, &["--model-url", &elsewhere, "--hf-token", "hf_secret"]).unwrap();
    assert_eq!(hub.requests(), ["HEAD localhost /plain/x.gguf - -", "GET localhost /plain/x.gguf - -"]);
    for invalid in ["x.gguf", "file:///x.gguf", "http://localhost/x.bin", "http://localhost/x-00002-of-00003.gguf"] {
        errors.add_text(invalid, &pull(&hub, &cache, &["--model-url", invalid]).unwrap_err());
    }
    insta::assert_snapshot!("model_url_errors", errors);
}

#[test]
fn escapes_in_a_url_are_kept() {
    let parts = [bytes(100), bytes(200)];
    let hub = Hub::start(&[
        ("my model.gguf", bytes(10)),
        ("a b-00001-of-00002.gguf", parts[0].clone()),
        ("a b-00002-of-00002.gguf", parts[1].clone()),
    ]);
    let cache = folder();
    let url = format!("{}/plain/my%20model.gguf?download=true", hub.url());
    let path = pull(&hub, &cache, &["--model-url", &url]).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), bytes(10));
    assert_eq!(hub.requests()[0], "HEAD 127.0.0.1 /plain/my%20model.gguf - -");
    let url = format!("{}/plain/a%20b-00001-of-00002.gguf", hub.url());
    let first = pull(&hub, &cache, &["--model-url", &url]).unwrap();
    let second = first.with_file_name("a%20b-00002-of-00002.gguf");
    assert_eq!([first, second].map(|path| std::fs::read(path).unwrap()), parts);
}

#[test]
fn doctor_warns_of_a_model_that_a_start_would_download() {
    let hub = Hub::start(&[("x.gguf", bytes(10))]);
    let cache = folder();
    let database = ["--port", "0", "--database-url", "postgres://127.0.0.1:1/x"];
    let wanted = ["doctor", "--hf-repo", REPOSITORY, "--hf-file", "x.gguf"];
    for (flag, verdict, reason) in [
        (&[][..], "warning", format!("`thunder models pull {REPOSITORY} --hf-file x.gguf`")),
        (&["--offline"], "FAILED", format!("{REPOSITORY} named x.gguf is not in the cache")),
    ] {
        let report = text(&command(&hub, &cache, &[&wanted, flag, &database].concat()).output().unwrap().stdout);
        let line = report.lines().find(|line| line[9..].starts_with("model")).unwrap();
        assert!(line.starts_with(verdict) && line.contains(&reason), "{report}");
    }
    assert_eq!(hub.requests(), [""; 0]);
}

#[test]
fn quantization_of_an_older_version_is_found() {
    let hub = Hub::start(&[("x-Q4_K_M.gguf", bytes(10)), ("x-Q8_0.gguf", bytes(20))]);
    let cache = folder();
    let small = format!("{REPOSITORY}:Q4_K_M");
    let older = pull(&hub, &cache, &[&small]).unwrap();
    let commit = "a".repeat(40);
    hub.set(Faults { commit: Some(commit.clone()), ..Faults::default() });
    let newer = pull(&hub, &cache, &[&format!("{REPOSITORY}:Q8_0")]).unwrap();
    assert!(newer.ends_with(format!("{commit}/x-Q8_0.gguf")), "{newer:?}");
    assert_eq!(pull(&hub, &cache, &[&small, "--offline"]), Ok(older));
    let listed = text(&command(&hub, &cache, &["models", "list"]).output().unwrap().stdout);
    assert_eq!(listed.lines().count(), 2, "{listed}");
    // The same file in both versions is listed once, and the current version is preferred.
    let current = pull(&hub, &cache, &[&small]).unwrap();
    assert_eq!(pull(&hub, &cache, &[&small, "--offline"]), Ok(current));
    let listed = text(&command(&hub, &cache, &["models", "list"]).output().unwrap().stdout);
    assert_eq!(listed.lines().count(), 2, "{listed}");
}

#[test]
fn server_validates_its_flags_before_the_download() {
    let hub = Hub::start(&[("x.gguf", bytes(10))]);
    let arguments = ["serve", "--hf-repo", REPOSITORY, "--listen", "0.0.0.0:0", "--data-dir", "/nowhere"];
    let error = text(&command(&hub, &folder(), &arguments).output().unwrap().stderr);
    assert!(error.contains("no API key is set"), "{error}");
    assert_eq!(hub.requests(), [""; 0]);
}

/// Returns the size of the only partial file.
fn partial_size(cache: &Path) -> u64 {
    let files = tree(cache);
    assert!(files.len() == 1 && files[0].ends_with(".incomplete"), "{files:?}");
    std::fs::metadata(cache.join(&files[0])).unwrap().len()
}

#[test]
fn partial_download_is_kept_when_the_server_does_not_send_the_file() {
    let model = bytes(4000);
    let hub = Hub::start(&[("x.gguf", model.clone())]);
    let cache = folder();
    hub.set(Faults { cuts: vec![1000], replies: vec![(404, "")], ..Faults::default() });
    pull(&hub, &cache, &[REPOSITORY]).unwrap_err();
    assert_eq!(partial_size(&cache), 1000);
    let mut errors = ErrorTable::default();
    for reply in [(401, ""), (403, ""), (204, ""), (200, "<html>Log in to the network</html>")] {
        hub.set(Faults { replies: vec![reply], ..Faults::default() });
        let error = pull(&hub, &cache, &[REPOSITORY]).unwrap_err();
        assert_eq!(partial_size(&cache), 1000, "{error}");
        errors.add_text(format!("{reply:?}"), &error);
    }
    insta::assert_snapshot!("download_reply_errors", errors);
    hub.set(Faults::default());
    hub.requests();
    let path = pull(&hub, &cache, &[REPOSITORY]).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), model);
    assert!(hub.requests().last().unwrap().contains(" bytes=1000- "));

    // The login page is not the beginning of the file, either.
    let cache = folder();
    hub.set(Faults { replies: vec![(200, "<html>Log in to the network</html>")], ..Faults::default() });
    pull(&hub, &cache, &[REPOSITORY]).unwrap_err();
    assert_eq!(partial_size(&cache), 0);
    // The download starts again if the server cannot continue it.
    hub.set(Faults { cuts: vec![1000], replies: vec![(416, "")], ..Faults::default() });
    let path = pull(&hub, &cache, &[REPOSITORY]).unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), model);
}

#[test]
fn file_of_a_url_is_never_mixed_from_two_versions() {
    let hub = Hub::start(&[("x.gguf", bytes(4000))]);
    let url = format!("{}/plain/x.gguf", hub.url());
    let arguments = ["--model-url", &url];
    let versions = [
        [("last-modified", "Mon, 02 Mar 2026 00:00:00 GMT"), ("last-modified", "Tue, 03 Mar 2026 00:00:00 GMT")],
        [("etag", "\"one\""), ("etag", "\"two\"")],
        [("etag", "W/\"one\""), ("etag", "W/\"two\"")],
    ];
    for [old, new] in versions {
        let cache = folder();
        // The first cut applies to the response without a body, the look-up.
        let (cuts, replies) = (vec![usize::MAX, 1000], vec![(404, "")]);
        hub.set(Faults { cuts, replies, versions: vec![old; 2], ..Faults::default() });
        pull(&hub, &cache, &arguments).unwrap_err();
        assert_eq!(partial_size(&cache), 1000);
        // The file changes between the look-up and the download.
        for versions in [vec![old, new], vec![new, old]] {
            hub.set(Faults { versions, ..Faults::default() });
            let error = pull(&hub, &cache, &arguments).unwrap_err();
            assert!(error.contains("x.gguf has changed on 127.0.0.1 since the download began"), "{error}");
        }
        hub.requests();
        hub.set(Faults { versions: vec![new; 2], is_corrupt: true, ..Faults::default() });
        let path = pull(&hub, &cache, &arguments).unwrap();
        assert_eq!(hub.requests()[1], "GET 127.0.0.1 /plain/x.gguf - -", "the new version begins with its first byte");
        assert_ne!(std::fs::read(&path).unwrap(), bytes(4000));

        // The old version is continued.
        hub.set(Faults { versions: vec![old; 2], ..Faults::default() });
        let path = pull(&hub, &cache, &arguments).unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), bytes(4000));
        let condition = if old.1.starts_with("W/") { String::new() } else { format!(" if {}", old.1) };
        assert_eq!(hub.requests()[1], format!("GET 127.0.0.1 /plain/x.gguf bytes=1000-{condition} -"));
    }
}

#[test]
fn repository_of_the_command_line_overrides_the_environment() {
    let hub = Hub::start(&[("x.gguf", bytes(10))]);
    let mut pull = command(&hub, &folder(), &["models", "pull", REPOSITORY]);
    let Output { status, stderr, .. } = pull.env("THUNDER_HF_REPO", "user/other").output().unwrap();
    assert!(status.success(), "{}", text(&stderr));
}

#[tokio::test]
async fn server_downloads_its_model_once_and_starts_offline_afterwards() {
    let hub = Hub::start(&[("tiny-Q4_K_M.gguf", std::fs::read(model()).unwrap())]);
    let cache = folder();
    let url = hub.url();
    let env = [("HF_ENDPOINT", url.as_str()), ("HF_HUB_CACHE", cache.to_str().unwrap())];
    let server = Server::start_with_env(&["--hf-repo", REPOSITORY], &env);
    server.wait_ready().await;
    let answer = server.answer("/v1/completions", &json!({"prompt": "Once", "max_tokens": 2})).await;
    assert_eq!(answer["model"], "tiny-Q4_K_M");
    server.stop("TERM").await;
    hub.requests();

    // The hub fails.
    hub.set(Faults { statuses: vec![500; 10], ..Faults::default() });
    let server = Server::start_with_env(&["--hf-repo", REPOSITORY, "-t", "1"], &env);
    server.wait_ready().await;
    assert!(server.log().contains("using the cached version"), "{}", server.log());
    server.stop("TERM").await;
    hub.requests();
    let server = Server::start_with_env(&["--hf-repo", REPOSITORY, "--offline"], &env);
    server.wait_ready().await;
    assert_eq!(hub.requests(), [""; 0]);
}
