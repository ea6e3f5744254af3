//! Mods in the user's files: a Python file, or a folder that is a package.

use super::upload::{MAX_BYTES, MAX_FILES, ModSource, is_identifier};
use crate::mods::ModFactory;
use crate::mods::python::{LoadError, PythonMods, read_source};
use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Calls that define a mod without a decorator.
const MOD_CONSTRUCTORS: &[&str] = &["create_mod(", "self_prompt_mod("];

/// A source that was read from a file or a folder.
#[derive(Debug)]
pub struct LocalSource {
    /// Name in errors and tracebacks: that of the file or of the package.
    name: String,
    source: ModSource,
    /// Modules of a package to import; `None` for a file.
    modules: Vec<Option<String>>,
}

impl LocalSource {
    /// Reads a file, or the files of a package without its tests. All modules of a package that define mods are imported.
    ///
    /// # Errors
    /// A file cannot be read, or the folder is not a package that can be uploaded.
    pub fn read(path: &Path) -> Result<Self, LoadError> {
        if path.is_dir() {
            return Self::read_package(path);
        }
        let source = ModSource::Text(read_source(path).map_err(|error| unreadable(path, error))?);
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Self { name, source, modules: vec![None] })
    }

    fn read_package(folder: &Path) -> Result<Self, LoadError> {
        let root = folder.canonicalize().map_err(|error| unreadable(folder, error))?;
        // `.` and `..` have no name.
        let name = folder.file_name().or(root.file_name()).unwrap_or_default().to_string_lossy().into_owned();
        let reject = |message: String| Err(failed(&name, message));
        if !is_identifier(&name) {
            return reject(format!(
                "a folder of mods is a Python package, and '{name}' is not a valid package name; use letters, digits and '_'"
            ));
        }
        let folders = package_folders(&root).map_err(|error| unreadable(folder, error))?;
        let mut paths = Vec::new();
        for folder in &folders {
            paths.extend(python_files(folder).map_err(|error| unreadable(folder, error))?);
        }
        if paths.len().max(folders.len()) > MAX_FILES {
            return reject(format!("a package must have at most {MAX_FILES} Python files and {MAX_FILES} folders"));
        }
        let (mut files, mut bytes) = (BTreeMap::new(), 0);
        for path in paths {
            let real = path.canonicalize().map_err(|error| unreadable(&path, error))?;
            let Ok(relative) = path.strip_prefix(&root).map(Path::display) else { continue };
            if real.is_dir() {
                return reject(format!("{relative} is a link to a folder; replace it by the folder"));
            }
            if !real.starts_with(&root) {
                return reject(format!("{relative} is a link to a file outside of the folder; replace it by the file"));
            }
            let text = read_source(&real).map_err(|error| unreadable(&path, error))?;
            bytes += text.len();
            if bytes > MAX_BYTES {
                return reject(format!("the Python files of a package must have at most {MAX_BYTES} bytes in total"));
            }
            files.insert(format!("{name}/{relative}"), text);
        }
        let modules =
            files.iter().filter(|(_, text)| defines_mods(text)).map(|(path, _)| Some(module_name(path))).collect();
        Ok(Self { name, source: ModSource::Files(files), modules })
    }

    /// Selects the module of a package to import. It can be named without the name of the package.
    ///
    /// # Errors
    /// The source has no such module.
    pub fn select(&mut self, module: &str) -> Result<(), String> {
        let ModSource::Files(files) = &self.source else {
            return Err(format!("{}: it is a file without the module {module}; name a folder", self.name));
        };
        let all: Vec<String> = files.keys().map(|path| module_name(path)).collect();
        let is_named =
            |name: &&String| *name == module || name.split_once('.').is_some_and(|(_, inner)| inner == module);
        let Some(found) = all.iter().find(is_named) else {
            return Err(format!("{}: there is no module {module}; the folder has {}", self.name, all.join(", ")));
        };
        self.modules = vec![Some(found.clone())];
        Ok(())
    }

    /// Returns the text or the files.
    #[must_use]
    pub const fn source(&self) -> &ModSource {
        &self.source
    }

    /// Returns false for a package in which no file defines a mod.
    #[must_use]
    pub const fn has_mods(&self) -> bool {
        !self.modules.is_empty()
    }

    /// Imports the source and returns its mods.
    ///
    /// # Errors
    /// The Python error with its traceback; a source without any mod, or with two mods of the same name, is an error too.
    pub fn load_all(&self, python: &PythonMods) -> Result<Vec<Arc<dyn ModFactory>>, LoadError> {
        if !self.has_mods() {
            let message = "no file has a mod; put @mod before a function(event, actions, tokenizer)";
            return Err(failed(&self.name, message.to_owned()));
        }
        let mut found: Vec<Arc<dyn ModFactory>> = Vec::new();
        for module in &self.modules {
            for factory in self.source.load_all(&self.name, module.as_deref(), python)? {
                let name = factory.describe().name;
                if let Some(other) = found.iter().find(|other| other.describe().name == name) {
                    let modules =
                        [other, &factory].map(|mod_| mod_.upload().and_then(|upload| upload.module.as_deref()));
                    let [first, second] = modules.map(Option::unwrap_or_default);
                    let message = format!(
                        "the modules {first} and {second} have a mod '{name}'; rename one with @mod(name=\"…\"), or push \
                         one module with --module"
                    );
                    return Err(failed(&self.name, message));
                }
                found.push(factory);
            }
        }
        Ok(found)
    }
}

/// Returns a folder and the folders in it that can have modules of the package, at most one more than a package may have.
/// Links are not followed, because they can form a circle.
pub(super) fn package_folders(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut folders = vec![root.to_owned()];
    let mut next = 0;
    while next < folders.len() && folders.len() <= MAX_FILES {
        for entry in std::fs::read_dir(&folders[next])? {
            let entry = entry?;
            let name = entry.file_name();
            let is_module = name.to_str().is_some_and(|name| is_identifier(name) && name != "__pycache__");
            if is_module && entry.file_type()?.is_dir() {
                folders.push(entry.path());
                if folders.len() > MAX_FILES {
                    break;
                }
            }
        }
        next += 1;
    }
    Ok(folders)
}

/// Returns the modules in a folder, without tests, and the links to folders that can have modules.
fn python_files(folder: &Path) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        let is_link = is_identifier(name) && entry.file_type()?.is_symlink() && entry.path().is_dir();
        let stem = name.strip_suffix(".py");
        if is_link || stem.is_some_and(|stem| is_identifier(stem) && !stem.starts_with("test_") && stem != "conftest") {
            files.push(entry.path());
        }
    }
    Ok(files)
}

/// Returns true if a text defines a mod: with a line `@mod`, also as a name of a module, or with a call.
fn defines_mods(text: &str) -> bool {
    let is_decorator = |line: &str| {
        let name = line.trim_start().strip_prefix('@').unwrap_or_default();
        let name = name.split(|c: char| c != '.' && c != '_' && !c.is_alphanumeric()).next().unwrap_or_default();
        name.rsplit('.').next() == Some("mod")
    };
    text.lines().any(is_decorator) || MOD_CONSTRUCTORS.iter().any(|call| text.contains(call))
}

/// Returns the name of the module in a file of a package.
fn module_name(path: &str) -> String {
    path.trim_end_matches(".py").trim_end_matches("/__init__").replace('/', ".")
}

fn unreadable(path: &Path, source: io::Error) -> LoadError {
    LoadError::Unreadable { path: path.display().to_string(), source }
}

fn failed(file: &str, message: String) -> LoadError {
    LoadError::Failed { file: file.to_owned(), message, traceback: None, is_transient: false }
}

#[cfg(test)]
mod tests {
    use super::{LocalSource, MAX_BYTES, MAX_FILES, ModSource, defines_mods, package_folders};
    use crate::events::system;
    use crate::mods::python::PythonMods;
    use crate::mods::registry::ModUpload;
    use serde_json::json;
    use std::path::{Path, PathBuf};

    /// Creates a folder with a package that has one mod.
    fn new_package() -> PathBuf {
        let package = std::env::temp_dir().join(format!("thunder-test-{}", system::new_id())).join("pack");
        std::fs::create_dir_all(package.join("deep")).unwrap();
        std::fs::write(package.join("deep/calm.py"), "@mod\n").unwrap();
        package
    }

    fn error(package: &Path) -> String {
        LocalSource::read(package).unwrap_err().to_string()
    }

    #[test]
    fn package_has_its_modules_without_tests_and_other_files() {
        let package = new_package();
        for file in ["__init__.py", "test_calm.py", "conftest.py", "a-b.py", "notes.txt"] {
            std::fs::write(package.join(file), "").unwrap();
        }
        std::os::unix::fs::symlink("deep/calm.py", package.join("linked.py")).unwrap();
        let mut read = LocalSource::read(&package).unwrap();
        let ModSource::Files(files) = read.source() else { panic!("a package has files") };
        assert_eq!(files.keys().collect::<Vec<_>>(), ["pack/__init__.py", "pack/deep/calm.py", "pack/linked.py"]);
        assert_eq!(read.modules, [Some("pack.deep.calm".to_owned()), Some("pack.linked".to_owned())]);
        read.select("linked").unwrap();
        assert_eq!(read.modules, [Some("pack.linked".to_owned())]);
        let unknown = read.select("angry").unwrap_err();
        assert_eq!(unknown, "pack: there is no module angry; the folder has pack, pack.deep.calm, pack.linked");
        let link = package.with_file_name("other");
        std::os::unix::fs::symlink(&package, &link).unwrap();
        assert_eq!(LocalSource::read(&link).unwrap().name, "other");
        std::fs::remove_dir_all(package.parent().unwrap()).unwrap();
    }

    #[test]
    fn mods_of_a_package_are_those_that_its_modules_define() {
        for text in ["@mod\ndef a():", "if x:\n    @mod(name='b')", "@thunder_mods.mod\n", "a = create_mod(b)"] {
            assert!(defines_mods(text), "{text}");
        }
        for text in ["from .calm import calm  # its @mod", "@model\n", "@mods.other\n", "mod = 1"] {
            assert!(!defines_mods(text), "{text}");
        }
        let package = new_package();
        let load = || LocalSource::read(&package).unwrap().load_all(&PythonMods::default());
        let text =
            |name: &str| format!("from thunder_mods import mod\n@mod\ndef {name}(event, actions):\n    '{name}'\n");
        let init = format!("from .deep.calm import calm\n{}", text("own"));
        std::fs::write(package.join("deep/calm.py"), text("calm")).unwrap();
        std::fs::write(package.join("__init__.py"), &init).unwrap();
        let names: Vec<_> = load().unwrap().iter().map(|factory| factory.describe().name).collect();
        assert_eq!(names, ["own", "calm"]);
        // The module of an upload may be one that imports the mod.
        let source = json!({"pack/__init__.py": init, "pack/deep/__init__.py": "", "pack/deep/calm.py": text("calm")});
        let upload: ModUpload =
            serde_json::from_value(json!({"name": "calm", "module": "pack", "source": source})).unwrap();
        let loaded = upload.load(upload.hash(), &PythonMods::default()).unwrap().describe();
        assert_eq!((&*loaded.name, &*loaded.description), ("calm", "calm"));
        std::fs::write(package.join("calm.py"), text("calm")).unwrap();
        let error = load().err().unwrap().to_string();
        assert!(error.contains("the modules pack.calm and pack.deep.calm have a mod 'calm'"), "{error}");
        std::fs::remove_dir_all(package.parent().unwrap()).unwrap();
    }

    #[test]
    fn package_beyond_the_limits_is_rejected() {
        let package = new_package();
        let outside = package.with_file_name("outside.py");
        std::fs::write(&outside, "").unwrap();
        std::os::unix::fs::symlink(&outside, package.join("linked.py")).unwrap();
        assert!(error(&package).contains("linked.py is a link to a file outside of the folder"));
        std::fs::remove_file(package.join("linked.py")).unwrap();
        std::os::unix::fs::symlink(&package, package.join("circle")).unwrap();
        assert!(error(&package).contains("circle is a link to a folder; replace it by the folder"));
        std::fs::remove_file(package.join("circle")).unwrap();
        std::fs::write(package.join("large.py"), " ".repeat(MAX_BYTES)).unwrap();
        assert!(error(&package).contains("at most 1048576 bytes in total"));
        std::fs::remove_file(package.join("large.py")).unwrap();
        for number in 0..MAX_FILES {
            std::fs::write(package.join(format!("m{number}.py")), "").unwrap();
        }
        assert!(error(&package).contains("at most 100 Python files"));
        for number in 0..2 * MAX_FILES {
            std::fs::create_dir(package.join(format!("d{number}"))).unwrap();
        }
        assert_eq!(package_folders(&package).unwrap().len(), MAX_FILES + 1);
        std::fs::remove_dir_all(package.parent().unwrap()).unwrap();
    }
}
