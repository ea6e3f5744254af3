//! Chooses the model that the binary carries: the demo model, or the tiny random one where there is none.

use std::path::Path;

fn main() {
    let models = Path::new(&std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it")).join("fixtures/models");
    let demo = models.join("demo.gguf");
    let chosen = if demo.exists() { demo } else { models.join("tiny.gguf") };
    println!("cargo:rerun-if-changed=build.rs");
    println!("cargo:rerun-if-changed={}", models.display());
    println!("cargo:rustc-env=THUNDER_BUNDLED_MODEL={}", chosen.display());
}
