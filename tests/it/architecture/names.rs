//! The rules of names and of the first lines of documentation.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use syn::spanned::Spanned;
use syn::visit::{self, Visit};

/// Names that several public types may share: clap's arguments of a command, and the error of a module.
const SHARED_TYPE_NAMES: &[&str] = &["Args", "Error"];

/// Words that are not terms of the field, as a whole identifier in any case style.
const COINED_NAMES: &[&str] = &[
    "asked",
    "asking",
    "at_work",
    "behind_thought",
    "desk",
    "door",
    "farewell",
    "go_on",
    "heard",
    "keeper",
    "land",
    "landed",
    "landing",
    "last_will",
    "last_words",
    "let_go",
    "look_for_answer",
    "meant",
    "moment",
    "nap",
    "obey",
    "passage",
    "pass_on",
    "promise",
    "promises",
    "said",
    "serve_resting",
    "sourced",
    "stood",
    "talk",
    "telling",
    "told",
    "wishes",
];

/// First words of a test name that hide its subject.
const TEST_OPENERS: &[&str] =
    &["a", "an", "of", "that", "the", "there", "what", "whatever", "where", "who", "whoever", "whose"];

/// Words that open a question and not a description.
const QUESTION_WORDS: &[&str] = &["How", "What", "When", "Where", "Whether", "Which", "Who", "Whose", "Why"];

/// Beginnings of constants that are limits, and the word to use instead.
const LIMIT_PREFIXES: &[(&str, &str)] =
    &[("MOST_", "MAX_"), ("LONGEST_", "MAX_"), ("LARGEST_", "MAX_"), ("LEAST_", "MIN_"), ("FEWEST_", "MIN_")];

static SOURCE: LazyLock<Names> = LazyLock::new(Names::from_source);

/// The public types and the problems found in the source.
#[derive(Default)]
struct Names {
    path: String,
    /// Public types by name, each with its location.
    types: BTreeMap<String, Vec<String>>,
    problems: Vec<String>,
}

impl Names {
    fn from_source() -> Self {
        let mut names = Self::default();
        for (path, text) in super::files("src").into_iter().chain(super::files("tests")) {
            names.path = path;
            let file = syn::parse_file(&text).unwrap_or_else(|error| panic!("{}: {error}", names.path));
            names.check_documentation(&file.attrs);
            names.visit_file(&file);
        }
        names
    }

    fn location(&self, span: proc_macro2::Span) -> String {
        format!("{}:{}", self.path, span.start().line)
    }

    fn check_name(&mut self, ident: &syn::Ident) {
        let name = snake_case(&ident.to_string());
        if COINED_NAMES.contains(&name.as_str()) {
            self.problems.push(format!("{}: `{ident}` is not a term of the field", self.location(ident.span())));
        }
    }

    fn check_function(&mut self, attributes: &[syn::Attribute], signature: &syn::Signature) {
        let ident = &signature.ident;
        let name = ident.to_string();
        if name == "of" || name.starts_with("of_") {
            let location = self.location(ident.span());
            self.problems
                .push(format!("{location}: `{name}` does not say what is done: use `new`, `from_…` or a verb"));
        }
        let is_test = attributes.iter().any(|one| one.path().segments.last().is_some_and(|last| last.ident == "test"));
        let first = name.split('_').next().unwrap_or_default();
        if is_test && TEST_OPENERS.contains(&first) {
            let location = self.location(ident.span());
            self.problems
                .push(format!("{location}: `{name}` begins with `{first}`: name the subject, then the expectation"));
        }
    }

    fn check_type(&mut self, visibility: &syn::Visibility, ident: &syn::Ident) {
        self.check_name(ident);
        if !matches!(visibility, syn::Visibility::Inherited) && self.path.starts_with("src/") {
            let location = self.location(ident.span());
            self.types.entry(ident.to_string()).or_default().push(location);
        }
    }

    fn check_documentation(&mut self, attributes: &[syn::Attribute]) {
        let Some(first) = attributes.iter().find(|attribute| attribute.path().is_ident("doc")) else { return };
        let syn::Meta::NameValue(syn::MetaNameValue {
            value: syn::Expr::Lit(syn::ExprLit { lit: syn::Lit::Str(text), .. }),
            ..
        }) = &first.meta
        else {
            return;
        };
        let line = text.value();
        let word = line.split_whitespace().next().unwrap_or_default();
        if QUESTION_WORDS.contains(&word) {
            self.problems.push(format!("{}: a doc comment opens with `{word}`:{line}", self.location(first.span())));
        }
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item_struct(&mut self, item: &'ast syn::ItemStruct) {
        self.check_type(&item.vis, &item.ident);
        visit::visit_item_struct(self, item);
    }

    fn visit_item_enum(&mut self, item: &'ast syn::ItemEnum) {
        self.check_type(&item.vis, &item.ident);
        visit::visit_item_enum(self, item);
    }

    fn visit_item_trait(&mut self, item: &'ast syn::ItemTrait) {
        self.check_type(&item.vis, &item.ident);
        visit::visit_item_trait(self, item);
    }

    fn visit_item_type(&mut self, item: &'ast syn::ItemType) {
        self.check_type(&item.vis, &item.ident);
        visit::visit_item_type(self, item);
    }

    fn visit_item_mod(&mut self, item: &'ast syn::ItemMod) {
        self.check_name(&item.ident);
        visit::visit_item_mod(self, item);
    }

    fn visit_signature(&mut self, signature: &'ast syn::Signature) {
        self.check_name(&signature.ident);
        visit::visit_signature(self, signature);
    }

    fn visit_pat_ident(&mut self, pattern: &'ast syn::PatIdent) {
        self.check_name(&pattern.ident);
        visit::visit_pat_ident(self, pattern);
    }

    fn visit_item_fn(&mut self, function: &'ast syn::ItemFn) {
        self.check_function(&function.attrs, &function.sig);
        visit::visit_item_fn(self, function);
    }

    fn visit_item_const(&mut self, item: &'ast syn::ItemConst) {
        self.check_name(&item.ident);
        let name = item.ident.to_string();
        if let Some((prefix, instead)) = LIMIT_PREFIXES.iter().find(|(prefix, _)| name.starts_with(prefix)) {
            self.problems
                .push(format!("{}: `{name}` begins with {prefix}: use {instead}", self.location(item.ident.span())));
        }
        visit::visit_item_const(self, item);
    }

    fn visit_attribute(&mut self, _: &'ast syn::Attribute) {}

    fn visit_item(&mut self, item: &'ast syn::Item) {
        let attributes = match item {
            syn::Item::Const(item) => &item.attrs,
            syn::Item::Enum(item) => &item.attrs,
            syn::Item::Fn(item) => &item.attrs,
            syn::Item::Mod(item) => &item.attrs,
            syn::Item::Static(item) => &item.attrs,
            syn::Item::Struct(item) => &item.attrs,
            syn::Item::Trait(item) => &item.attrs,
            syn::Item::Type(item) => &item.attrs,
            _ => &Vec::new(),
        };
        self.check_documentation(attributes);
        visit::visit_item(self, item);
    }

    fn visit_field(&mut self, field: &'ast syn::Field) {
        self.check_documentation(&field.attrs);
        if let Some(ident) = &field.ident {
            self.check_name(ident);
        }
        visit::visit_field(self, field);
    }

    fn visit_variant(&mut self, variant: &'ast syn::Variant) {
        self.check_documentation(&variant.attrs);
        visit::visit_variant(self, variant);
    }

    fn visit_impl_item_fn(&mut self, function: &'ast syn::ImplItemFn) {
        self.check_documentation(&function.attrs);
        self.check_function(&function.attrs, &function.sig);
        visit::visit_impl_item_fn(self, function);
    }

    fn visit_trait_item_fn(&mut self, function: &'ast syn::TraitItemFn) {
        self.check_documentation(&function.attrs);
        self.check_function(&function.attrs, &function.sig);
        visit::visit_trait_item_fn(self, function);
    }
}

/// Returns `AtWork` and `AT_WORK` as `at_work`.
fn snake_case(name: &str) -> String {
    if name.chars().all(|c| !c.is_lowercase()) {
        return name.to_lowercase();
    }
    let mut result = String::with_capacity(name.len() + 4);
    for (index, c) in name.char_indices() {
        if c.is_uppercase() && index > 0 {
            result.push('_');
        }
        result.extend(c.to_lowercase());
    }
    result
}

#[test]
fn names_and_doc_comments_follow_the_vocabulary() {
    let problems = &SOURCE.problems;
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n"));
}

#[test]
fn public_type_names_are_unique() {
    let shared: Vec<_> = SOURCE
        .types
        .iter()
        .filter(|(name, locations)| locations.len() > 1 && !SHARED_TYPE_NAMES.contains(&name.as_str()))
        .map(|(name, locations)| format!("{name}: {}", locations.join(", ")))
        .collect();
    assert!(shared.is_empty(), "{} names of several public types:\n{}", shared.len(), shared.join("\n"));
}

#[test]
fn every_case_style_is_converted_to_snake_case() {
    for (given, expected) in [("AtWork", "at_work"), ("AT_WORK", "at_work"), ("at_work", "at_work"), ("Said", "said")] {
        assert_eq!(snake_case(given), expected);
    }
}
