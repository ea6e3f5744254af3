//! Lists of files in several pages.

use super::server::{COMMIT, Faults, Hub, REPOSITORY};
use super::{bytes, folder, pull};

#[test]
fn model_on_a_later_page_of_the_list_is_found() {
    let hub = Hub::start(&[("a.md", bytes(1)), ("b.md", bytes(2)), ("c.md", bytes(3)), ("d-Q8_0.gguf", bytes(4))]);
    hub.set(Faults { page_size: Some(2), token: Some("hf_secret".to_owned()), ..Faults::default() });
    let arguments = [&*format!("{REPOSITORY}:Q8_0"), "--hf-token", "hf_secret"];
    let path = pull(&hub, &folder(), &arguments).unwrap();
    assert_eq!(std::fs::read(path).unwrap(), bytes(4));
    let page = format!("GET 127.0.0.1 /api/models/{REPOSITORY}/tree/{COMMIT} - Bearer hf_secret");
    assert_eq!(hub.requests()[1..3], [page.clone(), page]);

    // A server that sends pages without end.
    hub.set(Faults { page_size: Some(0), token: Some("hf_secret".to_owned()), ..Faults::default() });
    let error = pull(&hub, &folder(), &arguments).unwrap_err();
    assert!(error.contains("more than 1000 pages"), "{error}");
}
