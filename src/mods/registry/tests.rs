use super::{ModOrigin, ModProblem, ModRef, ModRegistry, RegisteredVersion};
use crate::events::{Scope, Tenant, system};
use crate::mods::builtin::testing::{ModHarness, run};
use crate::mods::{Call, EventSet, ModDescription, ModException, ModFactory, ModInstance, Reply, ReplySender, RunView};
use serde_json::{Value, json};
use std::sync::Arc;

struct Named(&'static str, ModOrigin);

impl ModFactory for Named {
    fn describe(&self) -> ModDescription {
        ModDescription {
            name: self.0.into(),
            language: "python".into(),
            version: "1".into(),
            origin: self.1,
            ..ModDescription::default()
        }
    }

    fn start(&self, _: &Value, _: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        Ok(Box::new(Silent))
    }
}

/// A mod whose calls fail with the owner of the run, or, with the config `"lost"`, because their replies are lost.
struct Failing {
    loses_replies: bool,
}

impl ModFactory for Failing {
    fn describe(&self) -> ModDescription {
        Named("failing", ModOrigin::File).describe()
    }

    fn start(&self, config: &Value, _: &Arc<RunView>) -> Result<Box<dyn ModInstance>, String> {
        Ok(Box::new(Self { loses_replies: config == "lost" }))
    }
}

impl ModInstance for Failing {
    fn handles(&self) -> EventSet {
        EventSet::ALL
    }

    fn call(&mut self, call: &Call<'_>, new_sender: &dyn Fn() -> ReplySender) -> Option<Reply> {
        if self.loses_replies {
            drop(new_sender());
            return None;
        }
        Some(Reply::failed(ModException::new(format!("{:?}", call.run.owner))))
    }
}

struct Silent;

impl ModInstance for Silent {
    fn handles(&self) -> EventSet {
        EventSet::ALL
    }

    fn call(&mut self, _: &Call<'_>, _: &dyn Fn() -> ReplySender) -> Option<Reply> {
        Some(Reply::noop())
    }
}

fn version(hash: &str, origin: ModOrigin, by: &str) -> RegisteredVersion {
    RegisteredVersion { hash: hash.into(), origin, registered_at: None, registered_by: Some(by.into()) }
}

fn refs(name: &str) -> Vec<ModRef> {
    vec![ModRef { name: name.into(), config: Value::Null }]
}

#[test]
fn name_belongs_to_first_registration() {
    let registry = ModRegistry::with_builtin();
    let register = |name, origin, by| registry.register(Arc::new(Named(name, origin)), version("1", origin, by));
    assert_eq!(register("ban-phrases", ModOrigin::Uploaded, "key").unwrap_err().by, "a built-in mod");
    assert_eq!(register("ban-phrases", ModOrigin::File, "a.py").unwrap_err().by, "a built-in mod");
    assert_eq!(register("own", ModOrigin::File, "a.py"), Ok(false));
    assert_eq!(register("own", ModOrigin::File, "a.py"), Ok(true));
    assert_eq!(register("own", ModOrigin::File, "b.py").unwrap_err().by, "the file a.py");
    assert_eq!(register("own", ModOrigin::Uploaded, "key").unwrap_err().by, "a file of the server");
    assert_eq!(register("sent", ModOrigin::Uploaded, "key-1"), Ok(false));
    assert_eq!(register("sent", ModOrigin::Uploaded, "key-2"), Ok(true));
    assert_eq!(register("sent", ModOrigin::File, "sent.py").unwrap_err().by, "an uploaded mod");
}

#[test]
fn earlier_versions_are_listed_once() {
    let registry = ModRegistry::default();
    for hash in ["a", "b", "a", "c", "c"] {
        registry.register(Arc::new(Named("m", ModOrigin::File)), version(hash, ModOrigin::File, "m.py")).unwrap();
    }
    let shown = registry.info("m", None).unwrap();
    let earlier: Vec<&str> = shown.earlier.iter().map(|version| version.hash.as_str()).collect();
    assert_eq!((shown.current.hash.as_str(), &earlier[..]), ("c", &["b", "a"][..]));
}

#[test]
fn unknown_mod_error_lists_available_mods() {
    let registry = ModRegistry::default();
    registry.insert(Arc::new(Named("one", ModOrigin::File)));
    registry.insert(Arc::new(Named("two", ModOrigin::File)));
    assert_eq!(registry.select(refs("x")).unwrap_err().to_string(), "unknown mod 'x'; known mods: one, two");
    assert!(registry.set_enabled("one", false));
    assert_eq!(registry.select(refs("one")).unwrap_err().to_string(), "the mod 'one' is disabled; enabled mods: two");
    let problem =
        ModProblem { file: "x.py".into(), message: "SyntaxError: line 3".into(), traceback: None, at: system::now() };
    registry.set_problem("x.py", Some(problem));
    assert_eq!(
        registry.select(refs("x")).unwrap_err().to_string(),
        "the mod 'x' is unavailable: x.py could not be loaded (SyntaxError: line 3); known mods: two"
    );
    assert!(!registry.set_enabled("three", true));
}

#[test]
fn disabled_mod_fails_once_and_is_not_called_again() {
    let registry = ModRegistry::default();
    registry.insert(Arc::new(Named("one", ModOrigin::File)));
    let factory = registry.get("one").unwrap();
    let mut harness = ModHarness::new(&*factory, &json!(null));
    assert!(harness.forward(&[0.0; 4]).exception.is_none());
    registry.set_enabled("one", false);
    let exception = harness.forward(&[0.0; 4]).exception.unwrap();
    assert!(exception.message.starts_with("the mod 'one' was disabled during the run"), "{}", exception.message);
    let mut instance = factory.start(&Value::Null, &run()).unwrap();
    assert_eq!(instance.handles(), EventSet::ALL, "the instance is not informed yet");
    instance.finished();
    assert_eq!(harness.instance.handles(), EventSet::NONE);
    registry.set_enabled("one", true);
    assert_eq!(harness.instance.handles(), EventSet::NONE, "the instance has missed events");
    let mut later = ModHarness::new(&*factory, &json!(null));
    assert!(later.forward(&[0.0; 4]).exception.is_none(), "later runs call it");
    assert!(registry.remove("one"));
    assert!(later.forward(&[0.0; 4]).exception.unwrap().message.contains("removed"));
    assert_eq!(registry.info("one", None).map(|shown| shown.stats.calls), None);
}

#[test]
fn runs_of_earlier_versions_follow_changes_of_the_mod() {
    let registry = ModRegistry::default();
    let named = || -> Arc<dyn ModFactory> { Arc::new(Named("one", ModOrigin::Uploaded)) };
    let harness = || ModHarness::new(&*registry.with_status("one", named()), &json!(null));
    registry.insert(named());
    let (mut disabled, mut removed) = (harness(), harness());
    assert!(disabled.forward(&[0.0; 4]).exception.is_none());
    registry.set_enabled("one", false);
    assert!(disabled.forward(&[0.0; 4]).exception.unwrap().message.contains("disabled"));
    assert!(harness().forward(&[0.0; 4]).exception.unwrap().message.contains("disabled"));
    registry.set_enabled("one", true);
    registry.remove("one");
    assert!(removed.forward(&[0.0; 4]).exception.unwrap().message.contains("removed"));
    assert!(harness().forward(&[0.0; 4]).exception.is_none(), "runs of a removed mod can be repeated");
    registry.set_enabled("one", false);
    assert!(registry.is_disabled("one") && !registry.is_disabled("two"));
    assert!(harness().forward(&[0.0; 4]).exception.is_some(), "the name is disabled");
}

#[test]
fn last_failure_is_returned_to_the_owner_of_its_run() {
    let registry = ModRegistry::default();
    registry.insert(Arc::new(Failing { loses_replies: false }));
    let call = |owner: Option<&str>| {
        let mut harness = ModHarness::new(&*registry.get("failing").unwrap(), &json!(null));
        harness.run = Arc::new(RunView { owner: owner.map(Tenant::from), ..(*harness.run).clone() });
        assert!(harness.forward(&[0.0; 4]).exception.is_some());
    };
    let message = |scope: &Scope| {
        let info = registry.info("failing", Some(scope)).unwrap();
        info.stats.last_failure.map(|failure| failure.message)
    };
    let of = |tenant: &str| Scope::Owned { tenant: Some(tenant.into()), includes_unowned: false };
    call(Some("ann"));
    assert_eq!(message(&of("ann")).as_deref(), Some(r#"Some(Tenant("ann"))"#));
    assert_eq!((message(&of("bob")), message(&Scope::All).is_some()), (None, true));
    call(None);
    call(Some("bob"));
    assert_eq!(message(&of("ann")).as_deref(), Some(r#"Some(Tenant("ann"))"#), "others do not hide it");
    assert_eq!(message(&of("bob")).as_deref(), Some(r#"Some(Tenant("bob"))"#));
    let unowned = Scope::Owned { tenant: None, includes_unowned: true };
    assert_eq!(message(&unowned).as_deref(), Some("None"));
    assert_eq!(registry.list_info(Some(&of("eve")))[0].stats.failures, 3);
    assert!(registry.list_info(None)[0].stats.last_failure.is_none() && registry.info("failing", None).is_some());
}

#[test]
fn failed_call_is_counted_once() {
    let registry = ModRegistry::default();
    registry.insert(Arc::new(Failing { loses_replies: false }));
    for (config, message) in [(Value::Null, "None"), (json!("lost"), "the mod ended without a reply")] {
        let mut harness = ModHarness::new(&*registry.get("failing").unwrap(), &config);
        assert_eq!(harness.forward(&[0.0; 4]).exception.unwrap().message, message);
    }
    let stats = &registry.list_info(None)[0].stats;
    assert_eq!((stats.calls, stats.failures), (2, 2));
}

#[test]
fn new_version_of_disabled_mod_is_disabled() {
    let registry = ModRegistry::default();
    registry.insert(Arc::new(Named("one", ModOrigin::File)));
    registry.set_enabled("one", false);
    registry.insert(Arc::new(Named("one", ModOrigin::File)));
    assert!(!registry.info("one", None).unwrap().enabled);
}

#[test]
fn disabled_mod_is_disabled_after_it_is_removed_and_registered_again() {
    let registry = ModRegistry::default();
    let insert = |name| registry.insert(Arc::new(Named(name, ModOrigin::File)));
    let is_enabled = |name| registry.info(name, None).unwrap().enabled;
    insert("one");
    registry.set_enabled("one", false);
    assert!(registry.remove("one"));
    insert("one");
    assert!(!is_enabled("one"));
    assert_eq!(registry.select(refs("one")).unwrap_err().to_string(), "the mod 'one' is disabled; enabled mods: ");
    registry.set_enabled("one", true);
    registry.remove("one");
    insert("one");
    assert!(is_enabled("one"));

    assert!(!registry.set_enabled("late", false), "the mod is not registered yet");
    insert("late");
    assert!(!is_enabled("late"));
    registry.remove("late");
    assert!(!registry.set_enabled("late", true));
    insert("late");
    assert!(is_enabled("late"));
}

#[test]
fn upload_after_removal_of_disabled_upload_is_enabled() {
    let registry = ModRegistry::default();
    registry.insert(Arc::new(Named("sent", ModOrigin::Uploaded)));
    registry.set_enabled("sent", false);
    registry.remove("sent");
    registry.insert(Arc::new(Named("sent", ModOrigin::Uploaded)));
    assert!(registry.info("sent", None).unwrap().enabled);
}
