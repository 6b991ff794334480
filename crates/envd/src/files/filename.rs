//! The path that a part of an uploaded form names.

use http::header;

/// The filename of a part, a full path here. Clients escape it in two ways that can be told apart from plain
/// characters: `%XX` for a quote and control characters (the HTML rule, also httpx), and a backslash before a
/// quote or backslash (the header rule).
pub fn filename(headers: &http::HeaderMap) -> Option<String> {
    let value = headers.get(header::CONTENT_DISPOSITION)?;
    let text = String::from_utf8_lossy(value.as_bytes()).into_owned();
    let start = text.find("filename=\"")? + "filename=\"".len();
    let mut name = String::new();
    let mut rest = text.get(start..)?.chars();
    while let Some(c) = rest.next() {
        match c {
            '"' => return (!name.is_empty()).then_some(name),
            '\\' if rest.as_str().starts_with(['"', '\\']) => name.extend(rest.next()),
            '%' => match rest.as_str().get(..2).and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
                Some(code @ (0x01..0x20 | b'"')) => {
                    name.push(char::from(code));
                    rest = rest.as_str().get(2..).unwrap_or_default().chars();
                }
                _ => name.push('%'),
            },
            c => name.push(c),
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    fn name_in(header: &[u8]) -> Option<String> {
        let mut headers = http::HeaderMap::new();
        headers.insert(
            header::CONTENT_DISPOSITION,
            http::HeaderValue::from_bytes(header).unwrap(),
        );
        filename(&headers)
    }

    #[test]
    fn a_filename_keeps_its_folders_and_is_unescaped() {
        let cases: [(&str, &str); 6] = [
            ("/home/user/a b.txt", "/home/user/a b.txt"),
            ("a%0Ab%22c", "a\nb\"c"),
            ("a\\\"b\\\\c", "a\"b\\c"),
            ("100%25 x%zz%", "100%25 x%zz%"),
            ("ü/日本.txt", "ü/日本.txt"),
            ("../x", "../x"),
        ];
        for (wire, want) in cases {
            let header = format!("form-data; name=\"file\"; filename=\"{wire}\"");
            assert_eq!(name_in(header.as_bytes()).as_deref(), Some(want), "{wire}");
        }
        assert_eq!(name_in(b"form-data; name=\"file\""), None);
        assert_eq!(name_in(b"form-data; name=\"file\"; filename=\"\""), None);
    }
}
