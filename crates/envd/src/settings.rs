//! What /init has set, kept for the life of the daemon.
//!
//! Owns values only; `init` decides about changes and `auth` about access.

use std::collections::BTreeMap;
use std::path::PathBuf;

use crate::users::{PREFERRED_DEFAULT, User, Users};

/// What requests fall back to. Cloned into blocking threads, so it holds no secret.
#[derive(Clone, Debug, Default)]
pub struct Defaults {
    /// Environment of every process.
    pub env: BTreeMap<String, String>,
    pub user: Option<String>,
    pub workdir: Option<PathBuf>,
}

impl Defaults {
    /// The user a request acts as. Without a name: the default of /init; `user` gives way to root in an image
    /// that does not have it. The error is the name nobody has.
    pub fn user(&self, users: &Users, name: Option<&str>) -> Result<User, String> {
        if let Some(name) = name {
            return users.find(name).ok_or_else(|| name.to_owned());
        }
        let default = self.user.as_deref().unwrap_or(PREFERRED_DEFAULT);
        let stand_in = if default == PREFERRED_DEFAULT { "root" } else { default };
        users
            .find(default)
            .or_else(|| users.find(stand_in))
            .ok_or_else(|| default.to_owned())
    }

    /// Where relative paths start: the default workdir, else the user's home.
    pub fn base(&self, user: &User) -> PathBuf {
        self.workdir.clone().unwrap_or_else(|| user.home.clone())
    }
}

#[derive(Debug, Default)]
pub struct Settings {
    pub defaults: Defaults,
    /// Checked on requests once set; compared in constant time.
    pub token: Option<String>,
    /// Variables of the last /init, as GET /envs shows them (without the E2B ones).
    pub env_vars: BTreeMap<String, String>,
    pub sandbox_id: Option<String>,
    pub template_id: Option<String>,
    pub lifecycle_id: Option<String>,
}

impl Settings {
    /// Puts the environment together anew: the sandbox's identity first, so that a user may override it.
    pub fn refresh_env(&mut self) {
        let mut env = BTreeMap::from([("E2B_SANDBOX".to_owned(), "true".to_owned())]);
        let identity = [
            ("E2B_SANDBOX_ID", &self.sandbox_id),
            ("E2B_TEMPLATE_ID", &self.template_id),
        ];
        for (key, value) in identity {
            if let Some(value) = value {
                env.insert(key.to_owned(), value.clone());
            }
        }
        env.extend(self.env_vars.clone());
        self.defaults.env = env;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_usual_default_gives_way_to_root_and_another_name_does_not() {
        let users = Users::default();
        assert_eq!(Defaults::default().user(&users, None).unwrap().uid, 0);
        let named = Defaults {
            user: Some("app".into()),
            ..Defaults::default()
        };
        assert_eq!(named.user(&users, None), Err("app".into()));
        assert_eq!(named.user(&users, Some("user")), Err("user".into()));
    }
}
