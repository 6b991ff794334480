//! What the headers of a download ask for, and how its own headers are written. Values in, values out.

use http::{HeaderMap, header};

use super::download::DownloadError;

pub fn header_text(headers: &HeaderMap, name: http::HeaderName) -> Option<&str> {
    headers.get(name)?.to_str().ok()
}

/// Whether to compress: when gzip is all that the client accepts besides identity. Clients that list every
/// coding they know (browsers, httpx) get plain bytes, since compressing costs far more than sending here.
pub fn accepts(headers: &HeaderMap) -> Result<bool, DownloadError> {
    let Some(text) = header_text(headers, header::ACCEPT_ENCODING) else {
        return Ok(false);
    };
    let (mut gzip, mut others, mut star, mut identity) = (None, false, None, None);
    for item in text.split(',') {
        let mut parts = item.split(';').map(str::trim);
        let coding = parts.next().unwrap_or_default().to_ascii_lowercase();
        let quality = parts
            .find_map(|part| part.strip_prefix("q="))
            .and_then(|q| q.parse::<f32>().ok());
        let allowed = quality.is_none_or(|quality| quality > 0.0);
        match coding.as_str() {
            "" => {}
            "gzip" | "x-gzip" => gzip = Some(allowed),
            "identity" => identity = Some(allowed),
            "*" => star = Some(allowed),
            _ => others |= allowed,
        }
    }
    let plain_allowed = identity.or(star) != Some(false);
    let gzip_allowed = gzip.or(star) == Some(true);
    match (plain_allowed, gzip_allowed) {
        (false, false) => Err(DownloadError::Encoding),
        (false, true) => Ok(true),
        (true, _) => Ok(gzip == Some(true) && !others),
    }
}

/// One byte range, inclusive. Several ranges, or what is no range, are answered with the whole file.
pub fn parse_range(text: &str, size: u64) -> Result<Option<(u64, u64)>, DownloadError> {
    let Some((first, last)) = text.trim().strip_prefix("bytes=").and_then(|spec| spec.split_once('-')) else {
        return Ok(None);
    };
    let (first, last) = match (first.trim().parse::<u64>(), last.trim().parse::<u64>()) {
        (Ok(first), Ok(last)) if first <= last => (first, last.min(size - 1)),
        (Ok(first), Err(_)) if last.trim().is_empty() => (first, size - 1),
        (Err(_), Ok(0)) if first.trim().is_empty() => return Err(DownloadError::Range { size }),
        (Err(_), Ok(suffix)) if first.trim().is_empty() => (size.saturating_sub(suffix), size - 1),
        _ => return Ok(None),
    };
    if first >= size {
        Err(DownloadError::Range { size })
    } else {
        Ok(Some((first, last)))
    }
}

/// `inline` with the file's name: plain where it is simple ASCII, in the extended form for all else.
pub fn disposition(path: &std::path::Path) -> String {
    let name = path
        .file_name()
        .map(|name| name.to_string_lossy().into_owned())
        .unwrap_or_default();
    let simple = |c: char| c.is_ascii_graphic() && c != '"' && c != '\\' || c == ' ';
    if name.chars().all(simple) {
        return format!("inline; filename=\"{name}\"");
    }
    let mut encoded = String::new();
    for byte in name.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' => encoded.push(char::from(byte)),
            byte => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    format!("inline; filename*=UTF-8''{encoded}")
}

pub fn http_date(time: std::time::SystemTime) -> String {
    jiff::Timestamp::try_from(time)
        .unwrap_or(jiff::Timestamp::UNIX_EPOCH)
        .strftime("%a, %d %b %Y %H:%M:%S GMT")
        .to_string()
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::HeaderValue;

    fn encoding(text: &'static str) -> Result<bool, DownloadError> {
        let mut headers = HeaderMap::new();
        headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static(text));
        accepts(&headers)
    }

    #[test]
    fn gzip_is_used_where_it_is_asked_for() {
        assert!(encoding("gzip").unwrap());
        assert!(encoding("gzip, identity;q=0.5").unwrap());
        assert!(encoding("identity;q=0, gzip").unwrap());
        assert!(!encoding("gzip, deflate, br").unwrap());
        assert!(!encoding("gzip;q=0").unwrap());
        assert!(!encoding("*").unwrap());
        assert!(matches!(encoding("identity;q=0, br"), Err(DownloadError::Encoding)));
        assert!(matches!(encoding("*;q=0"), Err(DownloadError::Encoding)));
    }

    #[test]
    fn ranges_are_cut_to_the_file() {
        let range = |text| parse_range(text, 10).ok().flatten();
        assert_eq!(range("bytes=0-4"), Some((0, 4)));
        assert_eq!(range("bytes=4-"), Some((4, 9)));
        assert_eq!(range("bytes=4-99"), Some((4, 9)));
        assert_eq!(range("bytes=-3"), Some((7, 9)));
        assert_eq!(range("bytes=-99"), Some((0, 9)));
        assert_eq!(range("bytes=0-1,3-4"), None);
        assert_eq!(range("lines=0-1"), None);
        assert_eq!(range("bytes=5-1"), None);
        assert!(matches!(
            parse_range("bytes=10-", 10),
            Err(DownloadError::Range { size: 10 })
        ));
        assert!(matches!(
            parse_range("bytes=-0", 10),
            Err(DownloadError::Range { size: 10 })
        ));
    }

    #[test]
    fn names_that_a_header_cannot_hold_are_encoded() {
        let of = |name: &str| disposition(std::path::Path::new(name));
        assert_eq!(of("/a/b c.txt"), "inline; filename=\"b c.txt\"");
        assert_eq!(of("/a/ü\n\".txt"), "inline; filename*=UTF-8''%C3%BC%0A%22.txt");
    }

    #[test]
    fn dates_have_the_form_of_http() {
        assert_eq!(http_date(std::time::UNIX_EPOCH), "Thu, 01 Jan 1970 00:00:00 GMT");
    }
}
