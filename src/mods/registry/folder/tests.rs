use super::{MAX_FILES, ModFolder, REREAD_DELAY, Registration, label};
use crate::events::system;
use crate::mods::python::{LoadError, PythonMods};
use crate::mods::{ModRegistry, ModSource};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

fn new_folder() -> PathBuf {
    let path = std::env::temp_dir().join(format!("thunder-test-{}", system::new_id()));
    std::fs::create_dir(&path).unwrap();
    path
}

/// Returns the source of a file with mods of these names.
fn mods(names: &[&str]) -> String {
    let functions = names.iter().map(|name| format!("\n\n@mod\ndef {name}(event, actions):\n    pass\n"));
    format!("from thunder_mods import mod\n{}", functions.collect::<String>())
}

#[test]
fn rejected_mod_does_not_restart_other_mods_of_its_file() {
    let path = new_folder();
    std::fs::write(path.join("one.py"), mods(&["taken"])).unwrap();
    std::fs::write(path.join("two.py"), mods(&["kept", "taken"])).unwrap();
    let registry = ModRegistry::default();
    let mut folder = ModFolder::new(path.clone(), PythonMods::default());
    folder.sync(&registry).unwrap();
    let kept = registry.get("kept").unwrap();
    assert!(registry.problems()[0].message.contains("the name 'taken' is already used by the file one.py"));
    std::fs::write(path.join("three.py"), mods(&["third"])).unwrap();
    folder.sync(&registry).unwrap();
    assert!(Arc::ptr_eq(&kept, &registry.get("kept").unwrap()) && registry.get("third").is_some());
    std::fs::remove_file(path.join("one.py")).unwrap();
    folder.sync(&registry).unwrap();
    let by = registry.info("taken", None).unwrap().current.registered_by;
    assert_eq!((by.as_deref(), registry.problems()), (Some("two.py"), Vec::new()));
    assert!(Arc::ptr_eq(&kept, &registry.get("kept").unwrap()));
    std::fs::remove_dir_all(path).unwrap();
}

#[test]
fn file_is_imported_again_after_a_transient_failure() {
    let path = new_folder();
    let file = path.join("calm.py");
    let text = mods(&["calm"]);
    std::fs::write(&file, &text).unwrap();
    let registry = ModRegistry::default();
    let mut folder = ModFolder::new(path.clone(), PythonMods::default());
    let failure = LoadError::Failed {
        file: label(&file),
        message: "the import failed: deadline of 1 ms exceeded".to_owned(),
        traceback: None,
        is_transient: true,
    };
    folder.register_source(&file, Some(&ModSource::Text(text)), Err(failure), &registry, &mut Registration::default());
    folder.sync(&registry).unwrap();
    assert_eq!((registry.get("calm").is_some(), registry.problems().len()), (false, 1), "not due yet");
    let due = Instant::now();
    folder.sources.get_mut(&file).unwrap().retry.as_mut().unwrap().at = due;
    let moved = path.with_extension("moved");
    std::fs::rename(&path, &moved).unwrap();
    assert!(folder.resync(&registry).unwrap() >= due + REREAD_DELAY, "the folder is missing");
    std::fs::rename(&moved, &path).unwrap();
    assert_eq!(folder.resync(&registry), None);
    assert!(registry.get("calm").is_some() && registry.problems().is_empty());
    assert!(folder.sources[&file].retry.is_none());
    std::fs::remove_dir_all(path).unwrap();
}

#[test]
fn packages_without_mods_are_ignored() {
    let path = new_folder();
    for package in ["tests", "helpers", "my-mods", "pack"] {
        std::fs::create_dir(path.join(package)).unwrap();
        std::fs::write(path.join(package).join("__init__.py"), "# Helpers for a @mod.\n").unwrap();
    }
    std::fs::write(path.join("tests/test_calm.py"), mods(&["tested"])).unwrap();
    std::fs::write(path.join("my-mods/calm.py"), mods(&["calm"])).unwrap();
    std::fs::write(path.join("pack/calm.py"), mods(&["calm"])).unwrap();
    let registry = ModRegistry::default();
    let mut folder = ModFolder::new(path.clone(), PythonMods::default());
    folder.sync(&registry).unwrap();
    assert_eq!((registry.problems(), registry.get("calm").is_some()), (Vec::new(), true));
    std::fs::write(path.join("pack/calm.py"), "").unwrap();
    folder.sync(&registry).unwrap();
    assert_eq!((registry.problems(), registry.get("calm").is_some()), (Vec::new(), false));
    for number in 0..=MAX_FILES {
        std::fs::create_dir(path.join(format!("pack/d{number}"))).unwrap();
    }
    folder.sync(&registry).unwrap();
    let first = registry.problems();
    folder.sync(&registry).unwrap();
    assert_eq!((first.len(), registry.problems()), (1, first), "the error is reported once");
    assert_eq!(folder.package_folders().len(), 4, "only the root of a rejected package is watched");
    std::fs::remove_dir_all(path).unwrap();
}

#[test]
fn package_is_registered_again_after_a_change_of_a_file() {
    let path = new_folder();
    let package = path.join("pack");
    std::fs::create_dir(&package).unwrap();
    std::fs::write(path.join("test_pack.py"), "import pytest\n").unwrap();
    std::fs::write(package.join("words.py"), "WORD = 'one'\n").unwrap();
    let registry = Arc::new(ModRegistry::default());
    let mut folder = ModFolder::new(path.clone(), PythonMods::default());
    folder.sync(&registry).unwrap();
    assert_eq!(registry.problems().len(), 1, "test_pack.py is a file, because pack is not a package");
    std::fs::write(package.join("__init__.py"), format!("from .words import WORD\n{}", mods(&["calm"]))).unwrap();
    folder.sync(&registry).unwrap();
    assert_eq!(registry.problems(), Vec::new());
    let first = registry.get("calm").unwrap();
    assert_eq!(first.upload().unwrap().module.as_deref(), Some("pack"));
    assert_eq!(registry.info("calm", None).unwrap().current.registered_by.as_deref(), Some("pack/"));
    folder.sync(&registry).unwrap();
    assert!(Arc::ptr_eq(&first, &registry.get("calm").unwrap()), "it did not change");
    std::fs::write(package.join("words.py"), "WORD = 'two'\n").unwrap();
    folder.sync(&registry).unwrap();
    assert_ne!(registry.get("calm").unwrap().source_hash(), first.source_hash());
    assert!(folder.package_folders().iter().eq([&package]));
    std::fs::remove_dir_all(package).unwrap();
    folder.sync(&registry).unwrap();
    assert!(registry.get("calm").is_none());
    std::fs::remove_dir_all(path).unwrap();
}

#[test]
fn changes_of_a_replaced_package_are_registered() {
    let path = new_folder();
    let package = path.join("pack");
    let registry = Arc::new(ModRegistry::default());
    let _watch = ModFolder::new(path.clone(), PythonMods::default()).watch(Arc::clone(&registry)).unwrap();
    for names in [["first", "second"], ["third", "fourth"]] {
        std::fs::create_dir(&package).unwrap();
        for name in names {
            std::fs::write(package.join("__init__.py"), mods(&[name])).unwrap();
            let deadline = Instant::now() + Duration::from_secs(30);
            while registry.get(name).is_none() {
                assert!(Instant::now() < deadline, "{name} is not registered");
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        std::fs::remove_dir_all(&package).unwrap();
    }
    std::fs::remove_dir_all(path).unwrap();
}
