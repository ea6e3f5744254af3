//! Loading of mods from source.

use super::{HEADER, harness, lines, load_error, python_mods};
use crate::mods::python::PythonMods;
use std::time::Duration;

#[test]
fn load_error_states_reason() {
    let error = load_error("def f(:\n    pass\n", None);
    assert!(error.to_string().starts_with("broken.py: SyntaxError: "), "{error}");
    assert!(error.traceback().unwrap().contains("def f(:"), "{:?}", error.traceback());
    let error = load_error("x = 1\n", None);
    assert!(error.to_string().contains("has no mod; decorate"), "{error}");
    let error = load_error(&format!("{HEADER}@mod\ndef f(e, a): pass\n"), Some("g"));
    assert!(error.to_string().ends_with("broken.py has no function 'g'; its mods are: f"), "{error}");
    let two = format!("{HEADER}@mod\ndef f(e, a): pass\n@mod\ndef g(e, a): pass\n");
    let error = load_error(&two, None);
    assert!(error.to_string().ends_with("none is named 'broken'; use the name of one: f, g"), "{error}");
    assert!(python_mods().load_one("one", &two, Some("g")).is_ok());
    let error = load_error("import nowhere\n", None);
    let message = error.to_string();
    assert!(message.contains("ModuleNotFoundError: No module named 'nowhere' (mods run on Python 3."), "{message}");
    assert!(
        message.contains("/python3") && message.contains("set THUNDER_PYTHON=PATH to use another one"),
        "{message}"
    );
    assert!(error.traceback().unwrap().contains("File \"broken.py\", line 1"));
    // The loader's own `from __future__ import annotations` does not apply to mods.
    let error = load_error(&format!("{HEADER}@mod\ndef f(e, a) -> Missing: pass\n"), None);
    assert!(error.to_string().ends_with("NameError: name 'Missing' is not defined"), "{error}");
    let named =
        "from __future__ import annotations\nfrom thunder_mods import mod\n@mod\ndef f(e, a) -> Missing: pass\n";
    assert!(python_mods().load_one("named", named, None).is_ok());
    let error = load_error("import sys; sys.exit(1)\n", None);
    assert!(error.to_string().ends_with("SystemExit: 1"), "{error}");
    let mut mods = python_mods();
    mods.limits.import = Duration::from_secs(10);
    let error = mods.load_one("slow", "import time\ntime.sleep(60)\n", None).err().unwrap();
    assert!(error.to_string().ends_with("the import failed: deadline of 10000 ms exceeded"), "{error}");
    assert!(error.traceback().unwrap().contains("slow.py"), "{:?}", error.traceback());
    assert!(error.is_transient() && !load_error("x = 1\n", None).is_transient());
}

#[test]
fn invalid_declarations_are_rejected() {
    let error = |declaration: &str| {
        let source = format!("{HEADER}{declaration}\n");
        python_mods().load_all("file.py".to_owned(), source).err().expect("it was loaded").to_string()
    };
    let holdback = error("@mod(holdback=-1)\ndef f(e, a): pass");
    assert!(holdback.contains("ValueError: holdback must be an integer of 0 or more"), "{holdback}");
    let name = error("@mod(name='a/b')\ndef f(e, a): pass");
    assert!(name.starts_with("file.py: the name of the mod must be 1 to 64 letters"), "{name}");
    let twice = error("@mod(name='a')\ndef f(e, a): pass\n@mod(name='a')\ndef g(e, a): pass");
    assert_eq!(twice, "file.py: two mods have the name 'a'; rename one with @mod(name=\"…\")");
    // The name of an upload replaces that of its source.
    let upload = format!("{HEADER}@mod(name='my mod', holdback=2**63)\ndef f(e, a): pass\n");
    assert_eq!(python_mods().load_one("upload", &upload, None).unwrap().describe().name, "upload");
    assert_eq!(
        error("f = mod(lambda e, a: None)"),
        "file.py: the name of the mod must be 1 to 64 letters, digits, '_', '-' and '.', and begin with a letter, a \
         digit or '_', got \"<lambda>\"; rename it with @mod(name=\"…\")"
    );
}

#[test]
fn sdk_works_with_oldest_supported_python() {
    let Some(python) = std::env::var_os("THUNDER_TEST_OLDEST_PYTHON") else {
        eprintln!("skipped: THUNDER_TEST_OLDEST_PYTHON names no Python 3.9");
        return;
    };
    let mods = PythonMods { python: Some(python.into()), ..python_mods() };
    let source = format!("{HEADER}@mod\ndef v(e, a, t):\n    print(sys.version_info[:2], t.encode('Hello'), e.text)\n");
    let factory = mods.load_one("v", &source, None).unwrap();
    assert_eq!(lines(&harness(&factory).add(65)), ["(3, 9) [263] A"]);
}
