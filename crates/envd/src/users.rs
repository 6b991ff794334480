//! Users and groups of the image, read from /etc/passwd and /etc/group.
//!
//! A static binary has no NSS, and an image may have neither file: root always exists (Docker's rule), and a
//! numeric name stands for that uid. Other name services of an image are not asked.

use std::path::PathBuf;

/// /etc/passwd and /etc/group are read up to this size; a longer file is cut at the limit.
const FILE_BYTES_MAX: u64 = 4 << 20;
const FILE_BYTES_USUAL: usize = 8 << 10;

/// The name that E2B images give to their non-root user; preferred as default when it exists.
pub const PREFERRED_DEFAULT: &str = "user";

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    pub home: PathBuf,
    pub shell: String,
    /// All groups of the user, the primary one included.
    pub groups: Vec<u32>,
}

/// The parsed files; cheap enough to read for each request.
#[derive(Debug, Default)]
pub struct Users {
    passwd: String,
    group: String,
}

impl Users {
    /// Reads the image's files; a missing or unreadable one counts as empty.
    pub fn load() -> Self {
        Users {
            passwd: read_bounded("/etc/passwd"),
            group: read_bounded("/etc/group"),
        }
    }

    /// The files' contents, given.
    #[cfg(test)]
    pub fn of(passwd: &str, group: &str) -> Self {
        Users {
            passwd: passwd.into(),
            group: group.into(),
        }
    }

    /// Whether a user or a group has this number.
    pub fn has_id(&self, id: u32) -> bool {
        self.entries().any(|user| user.uid == id || user.gid == id) || self.group_lines().any(|(_, gid, _)| gid == id)
    }

    /// The user of this name, or of this number.
    pub fn find(&self, name: &str) -> Option<User> {
        self.entries()
            .find(|user| user.name == name)
            .or_else(|| name.parse().ok().map(|uid| self.by_uid(uid)))
            .or_else(|| (name == "root").then(|| self.by_uid(0)))
            .map(|user| self.with_groups(user))
    }

    fn by_uid(&self, uid: u32) -> User {
        self.entries().find(|user| user.uid == uid).unwrap_or_else(|| User {
            name: if uid == 0 { "root".into() } else { uid.to_string() },
            uid,
            gid: uid,
            home: if uid == 0 { "/root".into() } else { "/".into() },
            shell: "/bin/sh".into(),
            groups: Vec::new(),
        })
    }

    /// Name of a uid for listings; the number itself when the image does not know it.
    pub fn user_name(&self, uid: u32) -> String {
        self.by_uid(uid).name
    }

    /// Name of a gid for listings; the number itself when the image does not know it.
    pub fn group_name(&self, gid: u32) -> String {
        self.group_lines().find(|(_, id, _)| *id == gid).map_or_else(
            || {
                if gid == 0 { "root".into() } else { gid.to_string() }
            },
            |(name, _, _)| name.into(),
        )
    }

    fn entries(&self) -> impl Iterator<Item = User> + '_ {
        self.passwd.lines().filter_map(parse_passwd_line)
    }

    fn group_lines(&self) -> impl Iterator<Item = (&str, u32, &str)> {
        self.group.lines().filter_map(|line| {
            let mut fields = line.split(':');
            let (name, _, gid, members) = (fields.next()?, fields.next()?, fields.next()?, fields.next()?);
            Some((name, gid.trim().parse().ok()?, members))
        })
    }

    fn with_groups(&self, mut user: User) -> User {
        user.groups = vec![user.gid];
        for (_, gid, members) in self.group_lines() {
            if gid != user.gid && members.split(',').any(|member| member.trim() == user.name) {
                user.groups.push(gid);
            }
        }
        user
    }
}

fn parse_passwd_line(line: &str) -> Option<User> {
    let fields: Vec<&str> = line.split(':').collect();
    let [name, _, uid, gid, _, home, shell, ..] = fields.as_slice() else {
        return None;
    };
    if name.is_empty() || name.starts_with('#') {
        return None;
    }
    Some(User {
        name: (*name).into(),
        uid: uid.parse().ok()?,
        gid: gid.parse().ok()?,
        home: if home.is_empty() { "/".into() } else { (*home).into() },
        shell: if shell.is_empty() {
            "/bin/sh".into()
        } else {
            (*shell).into()
        },
        groups: Vec::new(),
    })
}

fn read_bounded(path: &str) -> String {
    use std::io::Read;
    // Most files fit at once, which saves a dozen reads on every request.
    let mut bytes = Vec::with_capacity(FILE_BYTES_USUAL);
    if let Ok(file) = std::fs::File::open(path) {
        // A read error leaves what was read so far, which is the best there is.
        let _ = file.take(FILE_BYTES_MAX).read_to_end(&mut bytes);
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Users {
        Users {
            passwd: "root:x:0:0:root:/root:/bin/bash\n#c\nbad line\nuser:x:1000:1000::/home/user:\n".into(),
            group: "root:x:0:\nuser:x:1000:\nsudo:x:27:a,user\ndocker:x:99:xuser\n".into(),
        }
    }

    #[test]
    fn a_user_has_its_supplementary_groups() {
        let user = sample().find("user").unwrap();
        assert_eq!((user.uid, user.gid, user.groups), (1000, 1000, vec![1000, 27]));
        assert_eq!(user.shell, "/bin/sh");
    }

    #[test]
    fn root_and_numbers_exist_in_an_image_without_passwd() {
        let users = Users::default();
        assert_eq!(users.find("root").unwrap().home, PathBuf::from("/root"));
        assert_eq!(users.find("65532").unwrap().gid, 65532);
        assert_eq!(users.find("user"), None);
        assert_eq!(users.group_name(0), "root");
        assert_eq!(users.group_name(7), "7");
    }

    #[test]
    fn a_number_finds_the_named_user() {
        assert_eq!(sample().find("1000").unwrap().name, "user");
        assert_eq!(sample().user_name(5), "5");
    }
}
