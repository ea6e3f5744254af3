use serde::{Deserialize, Serialize};
use std::fmt;
use std::sync::Arc;

/// The name of an owner of runs: one person or program, with one API key or several.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Tenant(Arc<str>);

impl Tenant {
    /// Returns the name.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Tenant {
    fn from(name: &str) -> Self {
        Self(name.into())
    }
}

impl From<String> for Tenant {
    fn from(name: String) -> Self {
        Self(name.into())
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// The owners whose runs, streams, sessions and slots a client may see and change.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Scope {
    /// All data, with and without an owner.
    All,
    /// Data of one tenant, and possibly data without an owner.
    Owned {
        /// The client's tenant; `None` for a client that has none.
        tenant: Option<Tenant>,
        /// True if it also covers data without an owner.
        includes_unowned: bool,
    },
}

impl Scope {
    /// Returns true if it covers data of `owner`; `None` means no owner.
    #[must_use]
    pub fn includes(&self, owner: Option<&Tenant>) -> bool {
        match self {
            Self::All => true,
            Self::Owned { tenant, includes_unowned } => match owner {
                Some(owner) => tenant.as_ref() == Some(owner),
                None => *includes_unowned,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Scope, Tenant};

    #[test]
    fn scope_covers_its_own_tenant_only() {
        let (ann, bob) = (Tenant::from("ann"), Tenant::from("bob"));
        let scope = |includes_unowned| Scope::Owned { tenant: Some(ann.clone()), includes_unowned };
        assert!(scope(false).includes(Some(&ann)) && !scope(false).includes(Some(&bob)));
        assert!(!scope(false).includes(None) && scope(true).includes(None));
        let nobody = Scope::Owned { tenant: None, includes_unowned: true };
        assert!(nobody.includes(None) && !nobody.includes(Some(&ann)));
        assert!(Scope::All.includes(Some(&bob)) && Scope::All.includes(None));
    }
}
