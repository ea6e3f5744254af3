//! Reads the imports and the qualified paths of a module file with `syn`.

use proc_macro2::{TokenStream, TokenTree};
use std::collections::{HashMap, HashSet};
use syn::visit::{self, Visit};
use syn::{Attribute, Item, UseTree, Visibility};

/// A path from `crate`, e.g. `["api", "shared", "Fields"]`.
pub type CratePath = Vec<String>;

/// The paths and names of a module file.
#[derive(Default)]
pub struct Module {
    /// The file below `src/`.
    pub file: String,
    /// Names defined in the file.
    pub items: HashSet<String>,
    /// Names that it re-exports.
    pub exports: HashMap<String, CratePath>,
    /// Modules that it re-exports completely.
    pub globs: Vec<CratePath>,
    /// Paths in its code and in its private `use` items, with their lines.
    pub paths: Vec<(CratePath, usize)>,
    /// Paths in its `use` items, re-exports included, with their lines.
    pub imports: Vec<(CratePath, usize)>,
}

/// Parser of one file; inline modules are a part of it.
struct Reader<'a> {
    module: CratePath,
    found: &'a mut Module,
    /// Imported names and declared modules of the current scope.
    names: HashMap<String, CratePath>,
    /// Modules of other files that are compiled for tests only.
    test_modules: &'a mut HashSet<CratePath>,
}

/// Reads the items of the file of module `path`. Adds its modules for tests to `test_modules`.
pub fn read_module(file: &str, items: &[Item], path: &[String], test_modules: &mut HashSet<CratePath>) -> Module {
    let mut found = Module { file: file.to_owned(), ..Module::default() };
    Reader { module: path.to_vec(), found: &mut found, names: HashMap::new(), test_modules }.read(items);
    found
}

/// Returns true for attributes of tests and of modules for tests only.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        attribute.path().is_ident("test")
            || attribute.path().is_ident("cfg")
                && matches!(&attribute.meta, syn::Meta::List(list) if list.tokens.to_string().contains("test"))
    })
}

impl Reader<'_> {
    /// Returns the path from `crate` if it begins in this crate.
    fn absolute(&self, path: &[String]) -> Option<CratePath> {
        let mut rest = path;
        let mut base = match path.first()?.as_str() {
            "crate" => {
                rest = &rest[1..];
                Vec::new()
            }
            "self" | "super" => {
                let mut base = self.module.clone();
                while let Some(first @ ("self" | "super")) = rest.first().map(String::as_str) {
                    if first == "super" {
                        base.pop();
                    }
                    rest = &rest[1..];
                }
                base
            }
            name => {
                let base = self.names.get(name)?.clone();
                rest = &rest[1..];
                base
            }
        };
        base.extend(rest.iter().cloned());
        Some(base)
    }

    /// Adds the items of a `use` tree to `use_items`: the path, and the name that it introduces (`*` for a glob).
    fn use_items(tree: &UseTree, mut prefix: Vec<String>, use_items: &mut Vec<(Vec<String>, String)>) {
        match tree {
            UseTree::Path(path) => {
                prefix.push(path.ident.to_string());
                Self::use_items(&path.tree, prefix, use_items);
            }
            UseTree::Group(group) => {
                for item in &group.items {
                    Self::use_items(item, prefix.clone(), use_items);
                }
            }
            UseTree::Name(name) if name.ident == "self" => {
                let own = prefix.last().cloned().unwrap_or_default();
                use_items.push((prefix, own));
            }
            UseTree::Name(name) => {
                prefix.push(name.ident.to_string());
                use_items.push((prefix, name.ident.to_string()));
            }
            UseTree::Rename(rename) => {
                if rename.ident != "self" {
                    prefix.push(rename.ident.to_string());
                }
                use_items.push((prefix, rename.rename.to_string()));
            }
            UseTree::Glob(_) => use_items.push((prefix, "*".to_owned())),
        }
    }

    /// Adds the names of the `use` items and of the modules in `items` to the scope.
    fn declare(&mut self, items: &[&Item]) {
        for item in items {
            if let Item::Mod(module) = item {
                let mut path = self.module.clone();
                path.push(module.ident.to_string());
                self.names.insert(module.ident.to_string(), path);
            }
        }
        for item in items {
            let Item::Use(import) = item else { continue };
            if is_test(&import.attrs) {
                continue;
            }
            let mut use_items = Vec::new();
            Self::use_items(&import.tree, Vec::new(), &mut use_items);
            let line = import.use_token.span.start().line;
            for (path, name) in use_items {
                let Some(absolute) = self.absolute(&path) else { continue };
                self.found.imports.push((absolute.clone(), line));
                let is_export = !matches!(import.vis, Visibility::Inherited);
                match (name.as_str(), is_export) {
                    ("*", true) => self.found.globs.push(absolute),
                    (_, true) => {
                        self.found.exports.insert(name.clone(), absolute.clone());
                        self.names.insert(name, absolute);
                    }
                    (_, false) => {
                        self.found.paths.push((absolute.clone(), line));
                        if name != "*" {
                            self.names.insert(name, absolute);
                        }
                    }
                }
            }
        }
    }

    fn read(&mut self, items: &[Item]) {
        self.declare(&items.iter().collect::<Vec<_>>());
        for item in items {
            let name = match item {
                Item::Const(item) => Some(&item.ident),
                Item::Enum(item) => Some(&item.ident),
                Item::Fn(item) => Some(&item.sig.ident),
                Item::Macro(item) => item.ident.as_ref(),
                Item::Static(item) => Some(&item.ident),
                Item::Struct(item) => Some(&item.ident),
                Item::Trait(item) => Some(&item.ident),
                Item::Type(item) => Some(&item.ident),
                _ => None,
            };
            self.found.items.extend(name.map(ToString::to_string));
        }
        for item in items {
            self.visit_item(item);
        }
    }

    fn add_path(&mut self, path: &[String], line: usize) {
        if let Some(absolute) = self.absolute(path) {
            self.found.paths.push((absolute, line));
        }
    }

    /// Reads the paths in a macro's arguments.
    fn read_tokens(&mut self, tokens: TokenStream) {
        let mut path: Vec<String> = Vec::new();
        let (mut line, mut colons) = (0, 0);
        for token in tokens {
            match token {
                TokenTree::Ident(ident) => {
                    if colons != 2 {
                        self.add_path(&std::mem::take(&mut path), line);
                        line = ident.span().start().line;
                    }
                    path.push(ident.to_string());
                    colons = 0;
                }
                TokenTree::Punct(punct) if punct.as_char() == ':' => colons += 1,
                other => {
                    self.add_path(&std::mem::take(&mut path), line);
                    colons = 0;
                    if let TokenTree::Group(group) = other {
                        self.read_tokens(group.stream());
                    }
                }
            }
        }
        self.add_path(&path, line);
    }
}

impl<'ast> Visit<'ast> for Reader<'_> {
    fn visit_item(&mut self, item: &'ast Item) {
        let attributes: &[Attribute] = match item {
            Item::Fn(item) => &item.attrs,
            Item::Impl(item) => &item.attrs,
            Item::Mod(item) => &item.attrs,
            Item::Struct(item) => &item.attrs,
            Item::Use(_) => return,
            _ => &[],
        };
        if let Item::Mod(module) = item {
            let mut path = self.module.clone();
            path.push(module.ident.to_string());
            if is_test(attributes) {
                self.test_modules.insert(path);
            } else if let Some((_, items)) = &module.content {
                let outer = std::mem::replace(&mut self.module, path);
                let names = self.names.clone();
                self.read(items);
                (self.module, self.names) = (outer, names);
            }
        } else if !is_test(attributes) {
            visit::visit_item(self, item);
        }
    }

    fn visit_block(&mut self, block: &'ast syn::Block) {
        let names = self.names.clone();
        let items: Vec<&Item> = block
            .stmts
            .iter()
            .filter_map(|statement| match statement {
                syn::Stmt::Item(item) => Some(item),
                _ => None,
            })
            .collect();
        self.declare(&items);
        visit::visit_block(self, block);
        self.names = names;
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        if path.leading_colon.is_none() {
            let names: Vec<String> = path.segments.iter().map(|segment| segment.ident.to_string()).collect();
            let line = path.segments.first().map_or(0, |segment| segment.ident.span().start().line);
            self.add_path(&names, line);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        self.visit_path(&called.path);
        self.read_tokens(called.tokens.clone());
    }
}
